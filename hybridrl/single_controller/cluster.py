"""How the processes of a job are called on a Ray cluster. A job's run is `run`; everything of it is called `run/...`.

Which nodes are there. Ray counts one as lost after some ten seconds of silence; its own process there, asked directly,
tells at once.
"""

import socket
from collections.abc import Collection, Mapping
from typing import Any

# Names are looked up here; a driver's own namespace would hide its processes from every other driver.
NAMESPACE = "hybridrl"
MASTER = "master"
KEEPER = "keeper"  # of a submitted job: the process that starts the others, and starts them again
NOTES, RECOVERIES = "notes", "recoveries"  # its threads for what the trainer says


def master_name(run: str) -> str:
    return f"{run}/{MASTER}"


def keeper_name(run: str) -> str:
    return f"{run}/{KEEPER}"


def memory_name(run: str) -> str:
    return f"{run}/memory"


def find_actor(name: str) -> Any:
    """Return the actor of this name on the connected cluster, or None. One that Ray starts again is there."""
    import ray

    try:
        return ray.get_actor(name, namespace=NAMESPACE)
    except ValueError:
        return None


def names_in_use(prefix: str = "") -> list[str]:
    """Return the names of all actors of this library on the connected cluster that begin so."""
    import ray

    found = ray.util.list_named_actors(all_namespaces=True)
    return [entry["name"] for entry in found if entry["namespace"] == NAMESPACE and entry["name"].startswith(prefix)]


def slot_of(name: str) -> str:
    """Return the slot that a process fills: `run/actor-0` and `run/actor-0.2`, its second life, are
    both of `actor-0`.
    """
    return name.rpartition("/")[2].split(".")[0]


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
