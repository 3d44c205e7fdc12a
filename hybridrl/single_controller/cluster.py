"""Actors and nodes of a job on a Ray cluster: names, lookup, answers, and which nodes are alive.

All actors of a run are named `{run}/...`. Ray needs about 10 s of silence to declare a node dead; connecting to its
raylet port answers at once.
"""

import socket
import sys
from collections.abc import Collection, Mapping
from contextlib import suppress
from typing import Any

from hybridrl.errors import CallTimeout

# One Ray namespace for all drivers: in a driver's own namespace no other driver could find its actors.
NAMESPACE = "hybridrl"
LOOPBACK = "127.0.0.1"
MASTER = "master"
JOB_SUPERVISOR = "supervisor"  # of a submitted job: the process that starts and restarts the job's other processes
# Its concurrency groups: for calls of the trainer, and for processes that look up a role's processes.
PROGRESS_GROUP, RECOVERY_GROUP, ROSTER_GROUP = "progress", "recovery", "roster"
CONNECT_TIMEOUT_S = 1.0  # the kernel accepts a connection, however busy the node is


def node_address() -> str:
    """Return the address at which other nodes reach this process; the loopback address without a Ray cluster."""
    ray = sys.modules.get("ray")
    if ray is None or not ray.is_initialized():
        return LOOPBACK
    return ray.util.get_node_ip_address()


def master_name(run: str) -> str:
    """Return the name of a run's master."""
    return f"{run}/{MASTER}"


def job_supervisor_name(run: str) -> str:
    """Return the name of a submitted run's job supervisor."""
    return f"{run}/{JOB_SUPERVISOR}"


def snapshot_store_name(run: str) -> str:
    """Return the name of a run's snapshot store."""
    return f"{run}/snapshots"


def find_actor(name: str) -> Any:
    """Return the actor of this name on the connected cluster, or None.

    An actor that Ray is restarting is found too.
    """
    import ray

    try:
        return ray.get_actor(name, namespace=NAMESPACE)
    except ValueError:
        return None


def actor_names(prefix: str = "") -> list[str]:
    """Return the names with this prefix of this library's actors on the connected cluster."""
    import ray

    found = ray.util.list_named_actors(all_namespaces=True)
    return [entry["name"] for entry in found if entry["namespace"] == NAMESPACE and entry["name"].startswith(prefix)]


def process_of(actor: Any) -> tuple[str, int]:
    """Return node id and process id of an actor, also before it answers.

    They are "" and 0 if Ray does not say.
    """
    from ray._private.state import state

    with suppress(Exception):  # whatever the library raises whose cluster is being lost
        found = state.actor_table(actor._actor_id.hex())
        return found["Address"]["NodeID"], int(found["Pid"])
    return "", 0


def process_here(actor: Any) -> int:
    """Return the process id of an actor on this node, 0 if it has no process here."""
    import ray

    node, pid = process_of(actor)
    # Asked after its end, Ray would start another cluster.
    return pid if pid and ray.is_initialized() and node == ray.get_runtime_context().get_node_id() else 0


def slot_from_name(name: str) -> str:
    """Return the slot in an actor's name.

    It is `actor-0` for `run/actor-0` and for its second incarnation `run/actor-0.2`.
    """
    return name.rpartition("/")[2].split(".")[0]


def accepts_connections(node: Mapping[str, Any]) -> bool:
    """Return whether the raylet of a node, an entry of `ray.nodes()`, accepts a connection."""
    try:
        with socket.create_connection((node["NodeManagerAddress"], node["NodeManagerPort"]), timeout=CONNECT_TIMEOUT_S):
            return True
    except OSError:
        return False


def alive_nodes(node_ids: Collection[str]) -> set[str]:
    """Return those of these nodes that Ray counts as alive and whose raylet accepts a connection."""
    import ray

    return {
        node["NodeID"]
        for node in ray.nodes()
        if node["NodeID"] in node_ids and node["Alive"] and accepts_connections(node)
    }


def get_value(reference: Any, *, what: str, timeout_s: float, hint: str = "") -> Any:
    """Return the value behind one reference that belongs to no worker group.

    The answer of a master is an example.

    Args:
        what: name of the value, for the error.
        hint: appended to the text of `CallTimeout`.

    Raises:
        CallTimeout: there is no value within `timeout_s` seconds.
        ray.exceptions.RayError: the process or the object is lost, or the process raised an error.
    """
    import ray
    from ray.exceptions import GetTimeoutError

    try:
        return ray.get(reference, timeout=timeout_s)
    except GetTimeoutError:
        raise CallTimeout(f"{what} was not ready within {timeout_s:.3g} s{hint}") from None
