"""Which nodes are there. Ray counts one as lost after some ten seconds of silence; its own process there, asked directly, tells at once."""

import socket
from collections.abc import Collection, Mapping
from typing import Any

ANSWER_WITHIN_S = 1.0  # a connection is accepted by the kernel, however busy the node is


def answers(node: Mapping[str, Any]) -> bool:
    """Return whether Ray's own process on a node (the raylet) accepts a connection. node: an entry of `ray.nodes()`."""
    try:
        with socket.create_connection((node["NodeManagerAddress"], node["NodeManagerPort"]), timeout=ANSWER_WITHIN_S):
            return True
    except OSError:
        return False


def living(node_ids: Collection[str]) -> set[str]:
    """Return those of these nodes that Ray counts as alive and that answer."""
    import ray

    return {node["NodeID"] for node in ray.nodes() if node["NodeID"] in node_ids and node["Alive"] and answers(node)}
