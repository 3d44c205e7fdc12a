"""Calls between workers: a cycle is named within seconds, and whatever ends by itself is not refused."""

import os
import pickle
import time
from collections.abc import Iterator

import pytest

from hybridrl.errors import CallCycle, CallTimeout, ConfigError
from hybridrl.master.jobs.job_handle import GroupHandle
from hybridrl.single_controller.invocation import CONTROL, USER_CODE, Dispatch, Invocation
from hybridrl.single_controller.placement.resource_pool import RayResourcePool
from hybridrl.single_controller.ray_worker_group import RayClassWithInitArgs, RayWorkerGroup
from tests.support.fork_request import NEW_INTERPRETER
from tests.support.single_controller.calling_workers import EXPORTED, PLANTED, Caller

pytestmark = [pytest.mark.usefixtures("ray_cluster"), pytest.mark.timeout(120)]
ROLES = ("actor", "rollout", "reward")
HOPS = ("actor", "rollout")
Groups = dict[str, RayWorkerGroup[Caller]]


@pytest.fixture(scope="module")
def groups(ray_cluster) -> Iterator[Groups]:
    """Three roles of one process each; every process knows all three."""
    with RayResourcePool([1], name_prefix="chain") as pool:
        recipe = RayClassWithInitArgs(Caller)
        options = {"concurrency_groups": {USER_CODE: 1, CONTROL: 1}}
        recipe.update_options(options | {"runtime_env": {"env_vars": NEW_INTERPRETER}})
        groups = {role: RayWorkerGroup(pool, recipe, role=role, name_prefix="chain", share=0.3) for role in ROLES}
        handles = {role: GroupHandle.from_group(group) for role, group in groups.items()}
        for group in groups.values():
            group.connect(handles)
        yield groups
        for group in groups.values():
            group.shutdown()


def waits_of(cycle: CallCycle) -> dict[str, str]:
    return dict(zip(cycle.calls, cycle.awaited, strict=True))


def test_two_workers_that_wait_for_each_other_are_named_within_seconds(groups):
    start = time.monotonic()
    waits = {"actor-0.relay": "rollout-0.relay", "rollout-0.relay": "actor-0.weights"}
    with pytest.raises(CallCycle) as caught:
        groups["actor"].relay(["rollout", "actor"], "weights")
    assert time.monotonic() - start < 20  # the deadline is 30 s
    assert waits_of(caught.value) == waits
    assert all(f"{call} waits for {awaited}" in str(caught.value) for call, awaited in waits.items())
    assert "concurrency=2" in str(caught.value)
    assert groups["actor"].weights() == ["weights of 0"]  # nobody waits any longer


def test_a_cycle_of_three_workers_is_found_and_names_those_that_are_part_of_it(groups):
    with pytest.raises(CallCycle) as caught:
        groups["reward"].relay(["actor", "rollout", "actor"], "weights")
    assert waits_of(caught.value) == {"actor-0.relay": "rollout-0.relay", "rollout-0.relay": "actor-0.weights"}
    with pytest.raises(CallCycle) as caught:
        groups["actor"].relay(["rollout", "reward", "actor"], "weights")
    assert waits_of(caught.value) == {
        "actor-0.relay": "rollout-0.relay",
        "rollout-0.relay": "reward-0.relay",
        "reward-0.relay": "actor-0.weights",
    }


def test_a_worker_that_waits_for_itself_is_found(groups):
    with pytest.raises(CallCycle, match=r"actor-0\.relay waits for actor-0\.weights"):
        groups["actor"].relay(["actor"], "weights")
    with pytest.raises(CallCycle, match=r"actor-0\.attach waits for actor-0\.describe"):
        groups["actor"].attach(groups["actor"].worker_names)


def test_calls_of_two_chains_that_wait_for_each_other_are_named_and_one_of_them_goes_on(groups):
    start = time.monotonic()
    hold = [groups[role].sleep_and_relay.submit(0.5, other) for role, other in (HOPS, HOPS[::-1])]
    ends = []
    for role, references in zip(HOPS, hold, strict=True):
        try:
            ends.append(groups[role].fetch(references))
        except CallCycle as error:
            ends.append(error)
    assert time.monotonic() - start < 25  # the deadline is 30 s
    [cycle] = [end for end in ends if isinstance(end, CallCycle)]
    assert ["weights of 0"] in ends
    assert waits_of(cycle) == {
        "actor-0.sleep_and_relay": "rollout-0.weights",
        "rollout-0.sleep_and_relay": "actor-0.weights",
    }
    assert pickle.loads(pickle.dumps(cycle)).awaited == cycle.awaited


def test_three_chains_in_a_circle_are_found_and_a_busy_process_is_no_circle(groups):
    circle = [("actor", "rollout"), ("rollout", "reward"), ("reward", "actor")]
    hold = {role: groups[role].sleep_and_relay.submit(0.5, other) for role, other in circle}
    cycles = 0
    for role, references in hold.items():
        try:
            assert groups[role].fetch(references) == ["weights of 0"]
        except CallCycle as error:
            cycles += 1
            assert len(error.calls) == len(error.awaited) == 3
    assert cycles == 1
    busy = groups["rollout"].relay_and_work.submit(["reward"], 3.0)
    assert groups["actor"].sleep_and_relay(0.1, "rollout") == ["weights of 0"]  # it only waits
    assert groups["rollout"].fetch(busy) == ["worked"]


def test_a_caller_that_does_not_wait_is_no_part_of_a_cycle(groups):
    assert groups["actor"].relay_and_work(["rollout", "actor"], 4.0) == ["worked"]
    assert groups["rollout"].execute_rank(0, "last_relayed") == "weights of 0"


def test_a_caller_that_begins_to_wait_later_closes_the_cycle_then(groups):
    start = time.monotonic()
    with pytest.raises(CallCycle) as caught:
        groups["actor"].relay_and_work(["rollout", "actor"], 1.5, wait=True)
    assert waits_of(caught.value) == {"actor-0.relay_and_work": "rollout-0.relay", "rollout-0.relay": "actor-0.weights"}
    assert 1.5 < time.monotonic() - start < 20


def test_a_method_with_a_thread_of_its_own_may_be_called_back(groups):
    assert groups["actor"].relay(["rollout", "actor"], "weights_meanwhile") == ["weights of 0"]
    assert groups["actor"].relay_meanwhile(["rollout", "actor"], "weights_meanwhile") == ["weights of 0"]


def test_user_code_that_waits_does_not_block_the_calls_of_its_process(groups):
    run = groups["actor"].bind("relay", Invocation(Dispatch.ONE_TO_ALL, concurrency_group=USER_CODE))
    start = time.monotonic()
    working = groups["actor"].relay_and_work.submit(["rollout", "reward"], 2.5)
    assert run(["rollout", "actor"], "weights") == ["weights of 0"]
    assert time.monotonic() - start >= 2.5  # it waited for the thread of calls, which it does not hold itself
    assert groups["actor"].fetch(working) == ["worked"]


def test_a_process_without_a_thread_for_questions_is_not_asked_and_the_deadline_ends_the_wait(ray_cluster):
    with (
        RayResourcePool([1], name_prefix="quiet") as pool,
        RayWorkerGroup(pool, RayClassWithInitArgs(Caller), role="quiet") as quiet,
    ):
        quiet.connect({"quiet": GroupHandle.from_group(quiet)})
        own = quiet.bind("relay", Invocation(Dispatch.ONE_TO_ALL, timeout_s=3))
        with pytest.raises(CallTimeout, match=r"quiet.relay\(\) did not answer within 3 s"):
            own(["quiet"], "weights")
        os.kill(quiet.process_ids[0], 0)  # still runs: a question in a group that it lacks would have ended it


def test_an_exception_has_the_tracebacks_of_all_workers_that_it_passed(groups):
    with pytest.raises(KeyError, match=PLANTED) as caught:
        groups["actor"].relay(["rollout", "reward"], "fail")
    text = caught.value.remote_traceback
    raised, *callers = text.split("This method was called from:")
    assert "raise KeyError(PLANTED)" in raised and len(callers) == 2
    assert all("self.relayed = self.groups[hops[0]]" in caller for caller in callers)
    assert caught.value.__notes__ == [
        f"raised in {where}" for where in ("reward-0, fail()", "rollout-0, relay()", "actor-0, relay()")
    ]


def test_a_process_runs_what_it_exported_and_methods_without_a_mark(groups):
    reward = groups["reward"]
    reward.export("exported")
    assert reward.bind("exported", EXPORTED)(7) == [700]
    assert reward.fetch(reward.bind("exported", EXPORTED).submit(8)) == [800]
    unmarked = Invocation(Dispatch.ALL_TO_ALL, pre=lambda value: (([value],), {}), post=lambda outputs: outputs[0])
    assert reward.bind("unmarked", unmarked)(5) == (0, 5)
    assert reward.renamed() == ["original"] and not hasattr(reward, "original")


def test_a_name_that_a_process_does_not_offer_is_refused_with_those_that_it_does(groups):
    with pytest.raises(AttributeError, match="rollout-0 has no 'weight'.* attach, .*unmarked, weights"):
        groups["rollout"].execute_rank(0, "weight")


def test_a_thread_that_the_processes_lack_is_refused_before_a_call_ends_them(ray_cluster, groups):
    with pytest.raises(ConfigError, match=r"concurrency group 'gpu'.* \['concurrent', "):
        groups["actor"].bind("weights", Invocation(concurrency_group="gpu"))


def test_a_worker_process_of_a_trivial_role_loads_neither_torch_nor_tensordict(groups):
    loaded, mib = groups["actor"].loaded(["torch", "tensordict"])[0]
    assert loaded == [] and mib < 200
