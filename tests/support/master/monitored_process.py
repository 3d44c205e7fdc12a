"""A watched group for tests: real processes, a real master, and waiting for what it comes to know."""

import time
import uuid
from contextlib import contextmanager

import ray

from hybridrl.master.health.kernel_process import condition
from hybridrl.master.service.client import JobWatch, masters
from hybridrl.single_controller.placement.resource_pool import RayResourcePool
from hybridrl.single_controller.ray_worker_group import RayClassWithInitArgs, RayWorkerGroup
from tests.support.single_controller.sample_workers import Adder


@contextmanager
def watched_adders(folder, *, num_ranks=1, **options):
    """A `JobWatch` and a group of adders under its eyes, which have all joined."""
    job = f"job-{uuid.uuid4().hex[:6]}"
    run = f"{job}-1"
    with (
        JobWatch(job=job, run=run, journal=str(folder / run), **options) as watch,
        RayResourcePool([num_ranks]) as pool,
        RayWorkerGroup(pool, RayClassWithInitArgs(Adder, 1), role="adder", name_prefix=run) as group,
    ):
        wait_for(watch, lambda seen: sum(bool(beat) for beat in seen["beats"].values()) == num_ranks + 1)
        yield watch, group


def describe(watch):
    return ray.get(watch.master.describe.remote(), timeout=30)


def wait_for(watch, true, *, timeout_s=60):
    """Wait until `true(description)`; return the description. A master that is away is asked again."""
    end = time.monotonic() + timeout_s
    while True:
        try:
            seen = describe(watch)
            if true(seen):
                return seen
        except ray.exceptions.RayError:
            seen = None
        assert time.monotonic() < end, seen
        time.sleep(0.01)


def wait_until_left(run, *process_ids, timeout_s=20):
    """Wait until the run has no master and none of these processes any more; return the seconds."""
    start = time.monotonic()
    while run in masters() or any(condition(pid).state for pid in process_ids):
        assert time.monotonic() < start + timeout_s
        time.sleep(0.02)
    return time.monotonic() - start
