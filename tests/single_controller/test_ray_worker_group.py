"""Groups of real Ray processes: calls, colocation, references, failures."""

import time

import pytest
import ray
import torch

from hybridrl.errors import CallTimeout, WorkerLost
from hybridrl.master.plan.planner import plan_job
from hybridrl.master.plan.spec import JobSpec, PoolSpec, RoleSpec
from hybridrl.protocol import DataProto, DataProtoFuture
from hybridrl.single_controller.dispatch import Dispatch, register
from hybridrl.single_controller.launch import launch
from hybridrl.single_controller.placement.resource_pool import RayResourcePool
from hybridrl.single_controller.ray_worker_group import (
    RayClassWithInitArgs,
    RayWorkerGroup,
    create_colocated_worker_cls,
    create_colocated_worker_raw_cls,
)
from hybridrl.system.collector import STARTUP_THRESHOLD
from tests.support.single_controller.sample_workers import PEERS_SLEEP_S, Adder, Doubler, QuietAdder

pytestmark = pytest.mark.usefixtures("ray_cluster")


@pytest.fixture
def pool():
    pool = RayResourcePool([2], use_gpu=False, name_prefix="test")
    yield pool
    pool.release()


@pytest.fixture(scope="module")
def adders(ray_cluster):
    """One group for all tests that leave it unchanged, because starting processes is slow."""
    pool = RayResourcePool([2], use_gpu=False, name_prefix="adders")
    group = RayWorkerGroup(pool, RayClassWithInitArgs(Adder, 100), role="adder")
    yield group
    group.shutdown()
    pool.release()


@pytest.fixture
def doomed(pool):
    """A group for one test that blocks or kills its processes."""
    group = RayWorkerGroup(pool, RayClassWithInitArgs(Adder, 100), role="adder")
    yield group
    group.shutdown()


def batch(n: int) -> DataProto:
    return DataProto.from_dict(tensors={"x": torch.arange(n)})


def test_every_worker_has_its_rank_and_runs_in_its_own_process(adders):
    workers = adders.rank_and_pid()
    assert [(rank, size) for rank, size, _ in workers] == [(0, 2), (1, 2)]
    assert [pid for *_, pid in workers] == adders.process_ids and len(set(adders.process_ids)) == 2


def test_a_process_collects_garbage_seldom_until_its_first_call_has_ended():
    with RayResourcePool([1], use_gpu=False, name_prefix="collecting") as pool:
        group = RayWorkerGroup(pool, RayClassWithInitArgs(Adder, 100), role="adder")
        [first], [second] = group.objects_between_collections(), group.objects_between_collections()
        group.shutdown()
    assert first == STARTUP_THRESHOLD > second


@pytest.mark.parametrize("n", [0, 1, 2, 5])
def test_a_batch_of_any_size_is_split_and_joined_in_order(adders, n):
    out = adders.add(batch(n))
    assert out.batch["x"].tolist() == [x + 100 for x in range(n)]
    assert out.batch["rank"].tolist() == [0] * (n - n // 2) + [1] * (n // 2)


def test_shards_are_passed_from_call_to_call_by_reference(adders):
    future = adders.add_async(batch(4))
    assert isinstance(future, DataProtoFuture) and all(isinstance(f, ray.ObjectRef) for f in future.futures)
    assert adders.add(future).batch["x"].tolist() == [200, 201, 202, 203]


def test_variables_of_a_rank_are_refused_in_worker_env(pool):
    with pytest.raises(ValueError, match="worker_env sets RANK=3, WORLD_SIZE=100: each process gets"):
        RayWorkerGroup(pool, RayClassWithInitArgs(Adder, 0), worker_env={"WORLD_SIZE": "100", "RANK": "3", "A": "b"})


def test_other_dispatch_and_execute_modes(adders):
    assert adders.own([3, 4]) == [30, 41]
    assert adders.first_only(7) == (0, 7)
    assert adders.execute_all_sync("own", 5) == [50, 51]
    assert adders.execute_rank_zero_sync("own", 5) == 50
    with pytest.raises(ValueError, match="a list of 2, got 3"):
        adders.own([1, 2, 3])


def test_workers_can_form_a_process_group(adders):
    assert adders.sum_ranks() == [1.0, 1.0]


def test_mesh_dispatch_gives_peers_the_same_rows_and_collects_one_output(adders):
    adders.announce(2)
    out = adders.add_on_mesh(batch(3))
    assert out.batch["x"].tolist() == [100, 101, 102] and out.batch["rank"].tolist() == [0, 0, 0]


def test_a_users_exception_keeps_its_type_and_gets_an_address_at_once(doomed):
    start = time.monotonic()
    with pytest.raises(KeyError, match="planted on 1") as caught:
        doomed.fail_on(1)
    assert time.monotonic() - start < PEERS_SLEEP_S
    assert caught.value.__notes__ == ["raised in adder-1, fail_on()"]
    assert "sample_workers.py" in caught.value.remote_traceback


def test_a_killed_worker_is_reported_while_the_others_still_run(doomed):
    doomed.rank_and_pid()
    start = time.monotonic()
    with pytest.raises(WorkerLost, match=r"adder-1 was lost while running die_on\(\)") as caught:
        doomed.die_on(1)
    assert time.monotonic() - start < PEERS_SLEEP_S
    assert (caught.value.role, caught.value.rank, caught.value.method) == ("adder", 1, "die_on")


def test_a_silent_worker_is_named_after_the_deadline(adders):
    with pytest.raises(CallTimeout, match=r"adder.sleep_on\(\) .*within 2 s; .*rank 1"):
        adders.sleep_on(1)


def test_calls_have_the_timeout_of_their_group_unless_their_method_has_its_own(doomed):
    doomed.set_call_timeout(0.2)
    with pytest.raises(CallTimeout, match=r"doze\(\) .*within 0.2 s; .*limit: trainer.call_timeout_s"):
        doomed.doze(60.0)
    with pytest.raises(CallTimeout, match=r"add_async\(\) .*within 0.2 s; .*limit: trainer.call_timeout"):
        doomed.add_async(batch(2)).get()  # doze() still runs
    with pytest.raises(CallTimeout, match=r"sleep_on\(\) did not answer within 2 s"):
        doomed.sleep_on(1)
    with pytest.raises(CallTimeout, match=r"wait_long\(\) did not answer within 0.2 s"):  # it is not registered
        doomed.fetch(doomed.start_calls("wait_long", [0], [((), {})]), method="wait_long")


def test_an_error_in_a_constructor_keeps_its_type(pool):
    with pytest.raises(ValueError, match="a mistake in the constructor") as caught:
        RayWorkerGroup(pool, RayClassWithInitArgs(Doubler, fail=True), role="doubler")
    assert caught.value.__notes__ == ["raised in doubler-0, setup()"] or caught.value.__notes__ == [
        "raised in doubler-1, setup()"
    ]


def test_colocated_roles_share_a_process_and_keep_their_own_methods(pool):
    roles = {
        "adder": RayClassWithInitArgs(Adder, 1),
        "doubler": RayClassWithInitArgs(Doubler),
        "quiet": RayClassWithInitArgs(QuietAdder, 1),
    }
    group = RayWorkerGroup(pool, create_colocated_worker_cls(roles), role="adder+doubler", name_prefix="spawned")
    groups = group.spawn(roles)
    assert groups["quiet"].own([3, 4]) == [-3, -4]  # an override that is not registered again is still bound
    assert groups["doubler"].pid() == [pid for *_, pid in groups["adder"].rank_and_pid()]
    assert groups["doubler"].double(groups["adder"].add_async(batch(3))).batch["x"].tolist() == [2, 4, 6]
    assert group.worker_names == ["spawned/adder+doubler-0", "spawned/adder+doubler-1"]
    group.fuse(roles)
    assert group.doubler.pid() == groups["doubler"].pid()
    with pytest.raises(ValueError, match="not \\['critic'\\]"):
        group.spawn(["critic"])
    group.shutdown()


ROLES = {"adder": RayClassWithInitArgs(Adder, 1), "doubler": RayClassWithInitArgs(Doubler)}


@ray.remote
class Both(create_colocated_worker_raw_cls(ROLES)):  # type: ignore[misc]
    @register(Dispatch.ONE_TO_ALL)
    def add_then_double(self, data: DataProto) -> list[int]:
        return self.doubler.double(self.adder.add(data)).batch["x"].tolist()

    @register(Dispatch.ONE_TO_ALL)
    def call_critic(self) -> None:
        self.critic.values()


def test_a_worker_calls_the_other_roles_of_its_process(pool):
    group = RayWorkerGroup(pool, RayClassWithInitArgs(Both), role="both")
    assert group.add_then_double(batch(3)) == [[2, 4, 6]] * 2
    group.fuse(ROLES)
    assert group.doubler.double(batch(2)).batch["x"].tolist() == [0, 2]
    with pytest.raises(AttributeError, match=r"no 'critic'; its process has \['adder', 'both', 'doubler'\]"):
        group.call_critic()
    group.shutdown()


@pytest.mark.parametrize("colocate", [pytest.param("process", marks=pytest.mark.slow), "device"])
def test_a_plan_is_launched_with_roles_in_one_process_or_on_one_device(pool, colocate):
    classes = {"adder": RayClassWithInitArgs(Adder, 1), "doubler": RayClassWithInitArgs(Doubler)}
    spec = JobSpec(
        tuple(RoleSpec(role, "p", (2,)) for role in classes), (PoolSpec("p", (2,), colocate),), device_type="CPU"
    )
    groups = launch(plan_job(spec, f"job-{colocate}"), classes, {"p": pool})
    shared = groups["doubler"].pid() == [pid for *_, pid in groups["adder"].rank_and_pid()]
    assert shared == (colocate == "process")
    assert groups["doubler"].double(batch(2)).batch["x"].tolist() == [0, 2]
    for group in groups.values():
        group.shutdown()
