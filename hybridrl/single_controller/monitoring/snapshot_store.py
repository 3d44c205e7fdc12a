"""`JobMemory`: a detached Ray actor that remembers for a driver, so that the next driver of the job can go on where
this one was lost.

Ray ends an object with its owner, which is whoever made the call that returned it. So what is to outlive the driver is
asked for by this actor on the driver's behalf (`RayWorkerGroup.ask_through`). It holds no bytes itself: they are in the
object store of the worker's machine.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from hybridrl.single_controller.cluster import NAMESPACE, find_actor, memory_name

HOLD_S = 60.0  # for the actor to take something over, which takes milliseconds


class JobMemory:
    def __init__(self) -> None:
        self._asked: list = []  # since the last `keep`: held for a driver that is about to say what it wants kept
        self._kept: tuple[bytes, Mapping[str, Sequence]] | None = None

    def ask(self, hosts: Sequence, life: int, role: str, method: str) -> tuple[list, list]:
        """Call a method of a role in all processes; return references to the answers and to their sizes."""
        answers = [host.call_sized.options(num_returns=2).remote(life, role, method) for host in hosts]
        values, sizes = ([pair[i] for pair in answers] for i in range(2))
        self._asked += values
        return values, sizes

    def keep(self, description: bytes, parts: Mapping[str, Sequence]) -> None:
        """Remember this, and forget what was kept before. parts: name -> references from `ask`."""
        self._kept, self._asked = (description, parts), []

    def kept(self) -> tuple[bytes, Mapping[str, Sequence]] | None:
        return self._kept


def start_memory(run: str) -> Any:
    """Start the memory of a run on this machine, and return the actor without waiting for it."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=True)
    options = {
        "name": memory_name(run),
        "namespace": NAMESPACE,
        "lifetime": "detached",
        "num_cpus": 0,
        "scheduling_strategy": here,
    }
    return ray.remote(JobMemory).options(**options).remote()


def find_memory(run: str) -> Any:
    """Return the memory that an earlier driver of the run started, or None."""
    return find_actor(memory_name(run))


def keep(memory: Any, description: bytes, parts: Mapping[str, Sequence]) -> bool:
    """Have it remembered; return whether it is, which it is not where the memory was lost."""
    import ray

    try:
        ray.get(memory.keep.remote(description, parts), timeout=HOLD_S)
        return True
    except (ray.exceptions.RayActorError, TimeoutError):
        return False


def kept(memory: Any) -> tuple[bytes, Mapping[str, Sequence]] | None:
    """Return what was kept last, or None where nothing was, or the memory is lost."""
    import ray

    try:
        return None if memory is None else ray.get(memory.kept.remote(), timeout=HOLD_S)
    except (ray.exceptions.RayError, TimeoutError):
        return None
