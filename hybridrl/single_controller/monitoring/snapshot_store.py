"""`SnapshotStore`: a detached Ray actor that keeps step snapshots alive for the next driver of a run.

Ray deletes an object when its owner, the caller that created it, dies. Snapshots must outlive the driver, so this actor
makes the calls and owns the results (`RayWorkerGroup.call_through_actor`). It holds references only: the bytes are in
the object stores of the workers' nodes. The functions below are called by the driver.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hybridrl.errors import CallTimeout
from hybridrl.single_controller.cluster import NAMESPACE, find_actor, get_value, snapshot_store_name
from hybridrl.system.machine import machine_id

STORE_TIMEOUT_S = 60.0  # for one call of the actor, which takes milliseconds; its first call waits for its start


class SnapshotStore:
    """The actor. Holds one stored snapshot, and results since then that the driver may still store."""

    def __init__(self) -> None:
        self._unstored: list[Any] = []
        self._snapshot: tuple[bytes, Mapping[str, Sequence[Any]]] | None = None

    def process(self) -> dict[str, Any]:
        """Return this process's id and its machine's."""
        return {"pid": os.getpid(), "machine": machine_id()}

    def call(self, hosts: Sequence[Any], header: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """Call a role's method in all processes; return references to the results and to their numbers of rows.

        Args:
            header: of the calls, see `CallHeader`.
        """
        outputs = [host.call_with_num_rows.options(num_returns=2).remote(header) for host in hosts]
        values, sizes = ([pair[i] for pair in outputs] for i in range(2))
        self._unstored += values
        return values, sizes

    def store(self, description: bytes, parts: Mapping[str, Sequence[Any]]) -> None:
        """Replace the stored snapshot.

        Args:
            description: the driver's own state.
            parts: role -> references that `call` returned.
        """
        self._snapshot, self._unstored = (description, parts), []

    def load(self) -> tuple[bytes, Mapping[str, Sequence[Any]]] | None:
        return self._snapshot


def start_snapshot_store(run: str) -> Any:
    """Start the snapshot store of a run, preferably on this node; return the actor without waiting for it."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    this_node = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=True)
    options = {
        "name": snapshot_store_name(run),
        "namespace": NAMESPACE,
        "lifetime": "detached",
        "num_cpus": 0,
        "scheduling_strategy": this_node,
    }
    return ray.remote(SnapshotStore).options(**options).remote()


def find_snapshot_store(run: str) -> Any:
    """Return the snapshot store that a previous driver of the run started, or None."""
    return find_actor(snapshot_store_name(run))


def watch_process(store: Any, set_process: Callable[[Mapping[str, Any]], None]) -> None:
    """Call `set_process` with the store's `process` as soon as it has started; returns at once."""
    store.process.remote().future().add_done_callback(
        lambda answer: None if answer.exception() else set_process(answer.result())
    )


def store_snapshot(store: Any, description: bytes, parts: Mapping[str, Sequence[Any]]) -> bool:
    """Store a snapshot; return False if the store is lost or does not answer."""
    import ray

    stored = store.store.remote(description, parts)
    try:
        get_value(stored, what="the snapshot store's answer", timeout_s=STORE_TIMEOUT_S)
        return True
    except (ray.exceptions.RayActorError, CallTimeout):
        return False


def load_snapshot(store: Any) -> tuple[bytes, Mapping[str, Sequence[Any]]] | None:
    """Return the stored snapshot; None if there is none, or the store is lost or does not answer."""
    import ray

    if store is None:
        return None
    try:
        found: tuple[bytes, Mapping[str, Sequence[Any]]] | None = get_value(
            store.load.remote(), what="the stored snapshot", timeout_s=STORE_TIMEOUT_S
        )
        return found
    except (ray.exceptions.RayError, CallTimeout):
        return None
