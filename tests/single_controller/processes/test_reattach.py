import os
import signal

import pytest
import ray

from hybridrl.errors import PlacementError
from hybridrl.single_controller.cluster import find_actor, snapshot_store_name
from hybridrl.single_controller.placement.placement_groups import find_leftover_groups
from hybridrl.single_controller.placement.resource_pool import RayResourcePool
from hybridrl.single_controller.processes.termination import kill_run
from hybridrl.single_controller.ray_worker_group import RayClassWithInitArgs, RayWorkerGroup
from hybridrl.trainer.recovery.policies import StepSnapshot
from hybridrl.trainer.recovery.snapshots import SurvivingState, load_snapshot, start_snapshot_store
from tests.support.single_controller.sample_workers import Counter

pytestmark = pytest.mark.usefixtures("ray_cluster")
RUN = "reattached"


def group_on(pool, **options):
    recipe = RayClassWithInitArgs(Counter)
    return RayWorkerGroup(pool, recipe, role="counter", name_prefix=RUN, share=0.25, detached=True, **options)


@pytest.fixture
def leftover():
    """A group and its pool, as a lost driver leaves them."""
    pool = RayResourcePool([2], False, f"{RUN}/pool", detached=True)
    group = group_on(pool)
    group.mark_ready()
    yield group, pool
    kill_run(RUN)


def reattached():
    pool = RayResourcePool([2], False, f"{RUN}/pool", detached=True)
    pool.reattach()
    return group_on(pool, reattach=True)


def test_the_next_driver_reattaches_to_the_processes_and_their_state(leftover):
    old, pool = leftover
    old.add(3)
    new = reattached()
    assert new.process_ids == old.process_ids and not new.is_new
    assert new.add(1) == [4, 4]


@pytest.mark.slow
def test_calls_of_the_previous_driver_are_refused_after_reattaching(leftover):
    old, _ = leftover
    new = reattached()
    with pytest.raises(PlacementError, match="by a driver that another one has replaced"):
        old.add(1)
    assert new.add(1) == [1, 1]
    third = reattached()
    with pytest.raises(PlacementError, match="by a driver that another one has replaced"):
        new.add(1)
    third.rebuild()
    assert third.add(1) == [1, 1]


@pytest.mark.slow
def test_a_group_whose_driver_was_lost_during_a_rebuild_is_started_again(leftover):
    old, _ = leftover
    old.rebuild()  # its workers are constructed, but not marked ready again
    new = reattached()
    assert new.is_new and not set(new.process_ids) & set(old.process_ids)
    assert new.add(1) == [1, 1]


@pytest.mark.slow
def test_a_group_that_lost_a_process_is_started_again(leftover):
    old, _ = leftover
    os.kill(old.process_ids[1], signal.SIGKILL)
    new = reattached()
    assert new.is_new and not set(new.process_ids) & set(old.process_ids)
    assert new.add(1) == [1, 1]


def test_results_of_calls_through_a_snapshot_store_outlive_driver_and_worker(leftover):
    old, _ = leftover
    before = SurvivingState(RUN)
    old.add(5)
    before.store(StepSnapshot(5, before.call_surviving({"counter": old}, "total"), {}))
    os.kill(old.process_ids[0], signal.SIGKILL)
    found = load_snapshot(find_actor(snapshot_store_name(RUN)))
    assert found.step == 5 and ray.get(found.engine_refs["counter"]) == [5, 5]


@pytest.mark.slow
def test_killing_a_run_leaves_no_actor_and_no_reservation(leftover):
    start_snapshot_store(RUN)
    kill_run(RUN)
    assert find_actor(snapshot_store_name(RUN)) is None and find_leftover_groups(RUN) == {}
    assert not [
        entry for entry in ray.util.list_named_actors(all_namespaces=True) if entry["name"].startswith(f"{RUN}/")
    ]
