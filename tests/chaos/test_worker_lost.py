"""A worker killed inside a collective is reported to the driver within a second; so is one that Ray kills."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from hybridrl.errors import WorkerLost
from hybridrl.single_controller.placement.resource_pool import RayResourcePool
from hybridrl.single_controller.ray_worker_group import RayClassWithInitArgs, RayWorkerGroup
from tests.support.single_controller.sample_workers import Waiter

OUT_OF_MEMORY = """
import ray
from hybridrl.errors import WorkerLost
from hybridrl.single_controller.ray_worker_group import RayClassWithInitArgs, RayWorkerGroup
from hybridrl.single_controller.placement.resource_pool import RayResourcePool
from tests.support.single_controller.sample_workers import Adder

limit = {"memory_usage_threshold": 0.01, "memory_monitor_refresh_ms": 100}  # any machine uses more than this
how = {"include_dashboard": False, "log_to_driver": False, "object_store_memory": 10**8}
ray.init(address="local", num_cpus=1, _system_config=limit, **how)
try:
    adder = RayClassWithInitArgs(Adder, 1)
    with RayResourcePool([1], use_gpu=False) as pool, RayWorkerGroup(pool, adder, role="adder") as group:
        while True:
            group.rank_and_pid()
except WorkerLost as lost:
    print(lost)
"""

pytestmark = [pytest.mark.chaos, pytest.mark.usefixtures("ray_cluster")]


@pytest.mark.parametrize("victim", range(4))
def test_the_first_death_is_reported_at_once_and_by_name(victim):
    killed_at: list[float] = []

    def kill(process_id: int) -> None:
        killed_at.append(time.monotonic())
        os.kill(process_id, signal.SIGKILL)

    with RayResourcePool([4]) as pool, RayWorkerGroup(pool, RayClassWithInitArgs(Waiter), role="waiter") as group:
        threading.Timer(6.0, kill, [group.process_ids[victim]]).start()
        with pytest.raises(WorkerLost) as caught:
            group.reduce_until_killed(victim)
        seconds = time.monotonic() - killed_at[0]
    print(f"rank {victim}: {seconds:.3f} s, {caught.value}")
    assert (caught.value.role, caught.value.rank, caught.value.method) == ("waiter", victim, "reduce_until_killed")
    assert seconds < 1


def test_a_worker_that_ray_kills_for_low_memory_is_lost_like_any_other():
    root, environment = (
        Path(__file__).parents[2],
        {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"},
    )
    done = subprocess.run(
        [sys.executable, "-c", OUT_OF_MEMORY], cwd=root, env=environment, capture_output=True, text=True, timeout=110
    )
    assert done.returncode == 0, done.stderr
    assert "worker adder-0 was lost" in done.stdout and "because the machine ran low on memory (" in done.stdout
