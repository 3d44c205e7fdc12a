"""From a job's description to its plan: slots, ranks, shares, environments, for any number per node."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridrl.errors import ConfigError, PlacementError
from hybridrl.master.plan.planner import check_declared_size, plan_job
from hybridrl.master.plan.spec import JobSpec, PoolSpec, Resource, RoleSpec, TrainerSpec
from hybridrl.single_controller.placement.resource_pool import ROUNDING

HALF = {"CPU": 0.5, "GPU": 0.5}


def shared(*roles, slots=(2, 2), device_type="GPU", **pool):
    """A job whose roles are on one pool; a role is (name, processes on each node) or those and its resource."""
    specs = [RoleSpec(name, "p", tuple(on_nodes), "", *resource) for name, on_nodes, *resource in roles]
    return JobSpec(tuple(specs), (PoolSpec("p", tuple(slots), **pool),), device_type=device_type)


def places(spec, role):
    [process] = [one for one in plan_job(spec, "job").processes if role in one.roles]
    return process.slots


def test_two_roles_on_the_same_devices_take_half_of_each():
    plan = plan_job(shared(("actor", (2, 2)), ("rollout", (2, 2))), "job")
    assert [process.slots for process in plan.processes] == [((0, 0), (0, 1), (1, 0), (1, 1))] * 2
    assert [process.resources for process in plan.processes] == [HALF, HALF]
    assert [one.name for one in plan.reservations()] == ["job/p/node-0", "job/p/node-1"]
    assert plan.reservations()[0].bundles == ({"GPU": 1.0, "CPU": 1.0},) * 2


def test_smaller_roles_start_behind_the_one_before():
    spec = shared(("actor", (4,)), ("rollout", (2,)), ("reward", (2,)), slots=(4,))
    assert places(spec, "rollout") == ((0, 0), (0, 1)) and places(spec, "reward") == ((0, 2), (0, 3))
    assert [process.share for process in plan_job(spec, "job").processes] == [0.5, 0.5, 0.5]


def test_three_roles_share_a_device_without_exceeding_it():
    plan = plan_job(shared(("a", (1,)), ("b", (1,)), ("c", (1,)), slots=(1,)), "job")
    assert [process.resources["GPU"] for process in plan.processes] == [0.3333] * 3
    assert plan.reservations()[0].bundles == ({"GPU": 1.0, "CPU": 1.0},)


def test_requested_device_shares_are_kept_and_the_others_share_the_rest():
    plan = plan_job(
        shared(
            ("a", (1,), Resource(accelerator=0.4, cpu=2.0)),
            ("b", (1,)),
            ("c", (1,), Resource(memory_mb=100)),
            slots=(1,),
        ),
        "job",
    )
    assert [process.resources for process in plan.processes] == [
        {"CPU": 2.0, "GPU": 0.4},
        {"CPU": 0.3, "GPU": 0.3},
        {"CPU": 0.3, "GPU": 0.3, "memory": 100 * 2**20},
    ]
    assert plan.reservations()[0].bundles == ({"GPU": 1.0, "CPU": 2.6, "memory": 100 * 2**20},)


def test_a_role_without_device_takes_none_from_its_neighbours():
    spec = shared(("actor", (2,)), ("reward", (3,), Resource(accelerator=0.0)), slots=(2,))
    actor, reward = plan_job(spec, "job").processes
    assert actor.resources == {"CPU": 1.0, "GPU": 1.0} and reward.resources == {"CPU": 1.0}
    assert reward.slots == ((0, 0), (0, 1), (0, 0))
    assert plan_job(spec, "job").reservations()[0].bundles == ({"GPU": 1.0, "CPU": 3.0}, {"GPU": 1.0, "CPU": 2.0})


def test_several_devices_for_one_process_are_one_slot():
    plan = plan_job(shared(("actor", (1,), Resource(accelerator=2.0)), slots=(1,)), "job")
    assert plan.processes[0].resources == plan.reservations()[0].bundles[0] == {"CPU": 1.0, "GPU": 2.0}


def test_more_than_one_device_per_slot_is_refused_with_the_fix():
    half = Resource(accelerator=0.6)
    with pytest.raises(ConfigError, match=r"1.2 .*\(a 0.6, b 0.6\).*resource\(accelerator=...\) to 1"):
        plan_job(shared(("a", (1,), half), ("b", (1,), half), slots=(1,)), "job")
    with pytest.raises(ConfigError, match=r"take 1 .*\(a 1\).*nothing for b"):
        plan_job(shared(("a", (1,), Resource(accelerator=1.0)), ("b", (1,)), slots=(1,)), "job")


def test_on_cpus_a_device_is_a_core():
    plan = plan_job(shared(("a", (1,)), ("b", (1,), Resource(cpu=3.0)), slots=(1,), device_type="CPU"), "job")
    assert [process.resources for process in plan.processes] == [{"CPU": 0.5}, {"CPU": 3.0}]
    assert plan.reservations()[0].bundles == ({"CPU": 3.5},)


def test_one_process_for_all_roles_takes_the_slot():
    plan = plan_job(shared(("actor", (2, 2)), ("critic", (2, 2)), colocate="process"), "job")
    [process] = plan.processes
    assert (
        process.roles == ("actor", "critic") and process.share == 1.0 and process.resources == {"CPU": 1.0, "GPU": 1.0}
    )
    assert [worker.name for worker in plan.workers()] == [f"job/actor+critic-{rank}" for rank in range(4)]


def test_a_process_gets_its_rank_and_its_roles_in_its_environment():
    spec = JobSpec(
        (RoleSpec("actor", "p", (2, 1), env={"A": "role"}), RoleSpec("rollout", "p", (1, 1))),
        (PoolSpec("p", (2, 1)),),
        env={"A": "job", "B": "job"},
    )
    actors = [worker.environment for worker in plan_job(spec, "run").workers() if worker.roles == ("actor",)]
    assert actors[2] == {
        "A": "role",
        "B": "job",
        "RANK": "2",
        "WORLD_SIZE": "3",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "NODE_RANK": "1",
        "NAME": "run/actor-2",
        "ROLE": "ACTOR",
        "DEVICE_COLLOCATION_GROUP": "ACTOR,ROLLOUT",
    }
    assert plan_job(spec, "run", worker_env={"B": "trainer"}).workers()[0].environment["B"] == "trainer"


def test_pools_that_are_apart_are_so_on_both_sides():
    roles = (RoleSpec("a", "a", (1, 1)), RoleSpec("b", "b", (1,)))
    spec = JobSpec(
        roles,
        (PoolSpec("a", (1, 1), strategy="strict_spread"), PoolSpec("b", (1,), apart_from=("a",), labels={"zone": "x"})),
    )
    first, _, last = plan_job(spec, "job").reservations()
    assert first.apart_from == ("a", "b") and last.apart_from == ("a",) and last.labels == {"zone": "x"}


def test_the_trainer_has_a_reservation_of_its_own():
    spec = JobSpec(
        (RoleSpec("a", "a", (1,)),),
        (PoolSpec("a", (1,)),),
        TrainerSpec("m:T", Resource(cpu=0.5), {"X": "1"}),
        env={"Y": "2"},
    )
    driver = plan_job(spec, "job").driver
    assert driver.reservation.bundles == ({"CPU": 0.5},) and driver.environment == {"Y": "2", "X": "1"}


def test_a_pool_without_roles_reserves_nothing():
    spec = JobSpec((RoleSpec("a", "a", (1,)),), (PoolSpec("a", (1,)), PoolSpec("b", (99,))))
    assert [one.pool for one in plan_job(spec, "job").reservations()] == ["a"]
    assert len(plan_job(spec, "job").pool("b").reservations[0].bundles) == 99


def test_a_job_larger_than_its_declared_machines_is_refused():
    roles, pools = (RoleSpec("a", "a", (4, 4)),), (PoolSpec("a", (4, 4), hint="Ask for less with total() of a"),)
    for node_num, devices in ((2, 4), (1, 8), (None, 4), (3, None)):
        spec = JobSpec(roles, pools, node_num=node_num, device_per_node=devices)
        check_declared_size(spec, plan_job(spec, "job"))
    for node_num, devices in ((1, 4), (2, 3), (None, 3)):
        spec = JobSpec(roles, pools, node_num=node_num, device_per_node=devices)
        with pytest.raises(PlacementError, match=r"GPU missing.*total\(\) of a.*node_num\(\) or device_per_node\(\)"):
            check_declared_size(spec, plan_job(spec, "job"))


counts = st.lists(st.integers(1, 5), min_size=1, max_size=3)


@settings(max_examples=200, deadline=None)
@given(slots=counts, per_role=st.lists(counts, min_size=1, max_size=4))
def test_ranks_and_devices_equal_those_counted_one_by_one(slots, per_role):
    """Independent of the formula: deal every node's processes out like cards, role after role, and count."""
    roles = [(f"r{i}", on_nodes[: len(slots)]) for i, on_nodes in enumerate(per_role)]
    plan = plan_job(shared(*roles, slots=slots), "job")
    hands = {(node, slot): [] for node, size in enumerate(slots) for slot in range(size)}
    for node, size in enumerate(slots):
        turn = [slot for _ in range(100) for slot in range(size)]
        cards = [(name, local) for name, on_nodes in roles if node < len(on_nodes) for local in range(on_nodes[node])]
        for slot, (name, local) in zip(turn, cards, strict=False):
            hands[node, slot].append((name, node, local))
    found = {place: [] for place in hands}
    for name, on_nodes in roles:
        workers = [worker for worker in plan.workers() if worker.roles == (name,)]
        assert [int(worker.environment["RANK"]) for worker in workers] == list(range(sum(on_nodes)))
        for worker in workers:
            env = {
                key: int(worker.environment[key])
                for key in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK")
            }
            assert env["WORLD_SIZE"] == sum(on_nodes) and env["LOCAL_WORLD_SIZE"] == on_nodes[env["NODE_RANK"]]
            assert env["RANK"] == sum(on_nodes[: env["NODE_RANK"]]) + env["LOCAL_RANK"]
            assert worker.reservation == f"job/p/node-{env['NODE_RANK']}"
            found[env["NODE_RANK"], worker.bundle].append((name, env["NODE_RANK"], env["LOCAL_RANK"]))
    assert found == hands
    for (node, slot), hand in hands.items():
        of = {process.roles[0]: process.resources for process in plan.processes}
        bundle = plan.pool("p").reservations[node].bundles[slot]
        for resource in ("GPU", "CPU"):
            assert bundle[resource] == 1.0 and sum(of[name][resource] for name, *_ in hand) <= 1.0 + ROUNDING
