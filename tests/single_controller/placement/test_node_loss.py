"""Reservations whose node is lost, where no other node is left or Ray has none for them yet."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hybridrl.errors import PlacementError
from hybridrl.single_controller.placement.node_loss import replace_lost_nodes
from hybridrl.single_controller.placement.placement_groups import remove
from hybridrl.single_controller.placement.plan import Reservation
from hybridrl.system.machine import memory_bytes

ROOT = Path(__file__).parents[3]
pytestmark = pytest.mark.timeout(240)


def test_a_reservation_that_ray_has_no_node_for_is_made_again_and_the_error_names_what_is_missing(ray_cluster):
    from ray.util.placement_group import placement_group

    large = Reservation(name="lost-1/pool/node-0", pool="pool", bundles=({"CPU": 1000},))
    waiting = placement_group([{"CPU": 1000}], strategy="STRICT_PACK", name=large.name)
    try:
        with pytest.raises(PlacementError, match="no node can hold"):
            replace_lost_nodes([waiting], [large], detached=False, timeout_s=1.0)
    finally:
        remove([waiting])


def test_a_local_cluster_has_room_for_snapshots_and_the_loss_of_its_node_is_said_at_once():
    command = [sys.executable, "-m", "tests.support.single_controller.only_node"]
    done = subprocess.run(command, cwd=ROOT, timeout=200, capture_output=True, text=True)
    [line] = [line for line in done.stdout.splitlines() if line.endswith(" bytes")]
    room, free = int(line.split()[0]), int(line.split()[2])
    shared_memory = os.statvfs("/dev/shm")
    available = min(free, memory_bytes(), shared_memory.f_bavail * shared_memory.f_frsize)
    assert room > 0.2 * available  # two snapshots of a step of a real model take gigabytes
    [line] = [line for line in done.stdout.splitlines() if " s: " in line]
    seconds, _, text = line.partition(" s: ")
    assert float(seconds) < 80  # not the 90 s that another node may need
    assert text == (
        "the node of only/node-0 was lost, and no other node of the Ray cluster answers; restart the job on another "
        "cluster, it resumes from its newest checkpoint"
    )
