"""A monitored worker group for tests: real processes, a real master, and waiting for its state."""

import time
import uuid
from contextlib import contextmanager

import ray

from hybridrl.master.service.client import MasterClient, list_masters
from hybridrl.single_controller.placement.resource_pool import RayResourcePool
from hybridrl.single_controller.ray_worker_group import RayClassWithInitArgs, RayWorkerGroup
from hybridrl.system.process_stat import read_process_stat
from tests.support.single_controller.sample_workers import Adder


@contextmanager
def monitored_adders(folder, *, num_ranks=1, **options):
    """Yield a `MasterClient` and a group of adders that have all joined its master."""
    job = f"job-{uuid.uuid4().hex[:6]}"
    run = f"{job}-1"
    with (
        MasterClient(job=job, run=run, journal=str(folder / run), **options) as client,
        RayResourcePool([num_ranks]) as pool,
        RayWorkerGroup(pool, RayClassWithInitArgs(Adder, 1), role="adder", name_prefix=run) as group,
    ):
        wait_for(client, lambda seen: sum(bool(beat) for beat in seen["beats"].values()) == num_ranks + 1)
        yield client, group


def describe(client):
    return ray.get(client.master.describe.remote(), timeout=30)


def wait_for(client, condition, *, timeout_s=60):
    """Wait until `condition(description)` holds and return the description. Tolerates a restart of the master."""
    end = time.monotonic() + timeout_s
    while True:
        try:
            seen = describe(client)
            if condition(seen):
                return seen
        except ray.exceptions.RayError:
            seen = None
        assert time.monotonic() < end, seen
        time.sleep(0.01)


def wait_until_gone(run, *process_ids, timeout_s=60):
    """Wait until the run's master and these processes are gone; return the seconds."""
    start = time.monotonic()
    while run in list_masters() or any(read_process_stat(pid).state for pid in process_ids):
        assert time.monotonic() < start + timeout_s
        time.sleep(0.02)
    return time.monotonic() - start
