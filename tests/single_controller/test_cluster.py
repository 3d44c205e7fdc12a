"""What a process finds out about the Ray cluster that it belongs to."""

import subprocess
import sys
from pathlib import Path

import ray

from hybridrl.single_controller.cluster import LOOPBACK, node_address

ROOT = Path(__file__).parents[2]


def test_other_nodes_reach_a_process_at_the_address_of_its_node(ray_cluster):
    [node] = ray.nodes()
    assert node_address() == node["NodeManagerAddress"] != LOOPBACK


WITHOUT_CLUSTER = """
import ray
from types import SimpleNamespace
from hybridrl.single_controller.cluster import process_here
assert process_here(SimpleNamespace(_actor_id=b"0")) == 0
assert not ray.is_initialized(), "a question has started a cluster"
"""


def test_a_watch_that_outlives_the_cluster_starts_no_other_one():
    subprocess.run([sys.executable, "-c", WITHOUT_CLUSTER], check=True, timeout=100, cwd=ROOT)
