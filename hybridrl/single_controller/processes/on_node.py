"""Run code on a chosen node of the connected cluster: a task there, or a detached actor on the caller's node."""

from collections.abc import Callable
from typing import Any

from hybridrl.single_controller.cluster import NAMESPACE


def start_task(node: str, function: Callable[..., Any], *args: Any) -> Any:
    """Start a function once on the node of this id; return a reference to its result.

    The task needs no free core. It is not repeated: the reference raises if the node is lost.
    """
    import ray

    return ray.remote(num_cpus=0, max_retries=0)(function).options(**_on(node)).remote(*args)


def start_detached(name: str, cls: type, *args: Any, must_be_here: bool, **options: Any) -> Any:
    """Start an actor on this node that outlives this process; return it without waiting.

    Args:
        name: Of the actor.
        cls: Its class.
        args: Of its constructor.
        must_be_here: Whether it waits for this node. Otherwise Ray may place it on another one, and often does.
        options: Further options of the actor.

    Raises:
        ValueError: An actor of this name runs already.
    """
    import ray

    here = _on(ray.get_runtime_context().get_node_id(), soft=not must_be_here)
    known = {"name": name, "namespace": NAMESPACE, "lifetime": "detached", "num_cpus": 0}
    return ray.remote(cls).options(**known, **here, **options).remote(*args)


def _on(node: str, *, soft: bool = False) -> dict[str, Any]:
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    return {"scheduling_strategy": NodeAffinitySchedulingStrategy(node, soft=soft)}
