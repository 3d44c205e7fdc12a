import os
import signal

import pytest
import ray

from hybridrl.errors import PlacementError
from hybridrl.single_controller.monitoring.snapshot_store import find_memory, start_memory
from hybridrl.single_controller.placement.placement_groups import find_left
from hybridrl.single_controller.placement.resource_pool import RayResourcePool
from hybridrl.single_controller.processes.termination import end_run
from hybridrl.single_controller.ray_worker_group import RayClassWithInitArgs, RayWorkerGroup
from tests.support.single_controller.sample_workers import Counter

pytestmark = pytest.mark.usefixtures("ray_cluster")
RUN = "taken-up"


def group_on(pool, **options):
    recipe = RayClassWithInitArgs(Counter)
    return RayWorkerGroup(pool, recipe, role="counter", name_prefix=RUN, share=0.25, detached=True, **options)


@pytest.fixture
def left():
    """A group and its pool, as a driver that was lost leaves them."""
    pool = RayResourcePool([2], False, f"{RUN}/pool", detached=True)
    group = group_on(pool)
    group.mark_ready()
    yield group, pool
    end_run(RUN)


def taken_up():
    pool = RayResourcePool([2], False, f"{RUN}/pool", detached=True)
    pool.take_up()
    return group_on(pool, take_up=True)


def test_the_next_driver_goes_on_with_the_processes_and_what_they_know(left):
    old, pool = left
    old.add(3)
    new = taken_up()
    assert new.process_ids == old.process_ids and not new.is_new
    assert new.add(1) == [4, 4]


@pytest.mark.slow
def test_the_driver_before_is_refused_from_then_on(left):
    old, _ = left
    new = taken_up()
    with pytest.raises(PlacementError, match="replaced meanwhile"):
        old.add(1)
    assert new.add(1) == [1, 1]
    third = taken_up()
    with pytest.raises(PlacementError, match="replaced meanwhile"):
        new.add(1)
    third.rebuild()
    assert third.add(1) == [1, 1]


@pytest.mark.slow
def test_a_group_that_was_being_rebuilt_when_its_driver_was_lost_is_started_anew(left):
    old, _ = left
    old.rebuild()  # its workers are constructed, and were not marked again
    new = taken_up()
    assert new.is_new and not set(new.process_ids) & set(old.process_ids)
    assert new.add(1) == [1, 1]


@pytest.mark.slow
def test_a_group_that_lost_a_process_is_started_anew(left):
    old, _ = left
    os.kill(old.process_ids[1], signal.SIGKILL)
    new = taken_up()
    assert new.is_new and not set(new.process_ids) & set(old.process_ids)
    assert new.add(1) == [1, 1]


def test_what_is_asked_for_through_a_memory_outlives_who_asked(left):
    old, _ = left
    memory = start_memory(RUN)
    old.add(5)
    answers = old.ask_through(memory, "total")
    ray.get(memory.keep.remote(b"step 5", {"counter": list(answers)}))
    os.kill(old.process_ids[0], signal.SIGKILL)
    description, parts = ray.get(find_memory(RUN).kept.remote())
    assert description == b"step 5" and ray.get(parts["counter"]) == [5, 5]


@pytest.mark.slow
def test_the_end_of_a_run_leaves_nothing_of_it(left):
    start_memory(RUN)
    end_run(RUN)
    assert find_memory(RUN) is None and find_left(RUN) == {}
    assert not [
        entry for entry in ray.util.list_named_actors(all_namespaces=True) if entry["name"].startswith(f"{RUN}/")
    ]
