"""What a process finds out about the Ray cluster that it belongs to."""

import ray

from hybridrl.single_controller.cluster import LOOPBACK, node_address


def test_other_nodes_reach_a_process_at_the_address_of_its_node(ray_cluster):
    [node] = ray.nodes()
    assert node_address() == node["NodeManagerAddress"] != LOOPBACK
