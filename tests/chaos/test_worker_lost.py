"""One of four workers is killed while the others wait for it in a collective: the driver knows in less than a second."""

import os
import signal
import threading
import time

import pytest

from hybridrl.errors import WorkerLost
from hybridrl.single_controller.ray_worker_group import RayClassWithInitArgs, RayWorkerGroup
from hybridrl.single_controller.resource_pool import RayResourcePool
from tests.single_controller.sample_workers import Waiter

pytestmark = [pytest.mark.chaos, pytest.mark.usefixtures("ray_cluster")]


@pytest.mark.parametrize("victim", range(4))
def test_the_first_death_is_told_at_once_and_by_name(victim):
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
