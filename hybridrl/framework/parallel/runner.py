"""`Parallel.runner`: the same `main` in several processes, which hear each other through `task.emit`, `task.on` and
`task.parallel_ctx`.

    def main():
        with Task() as task:
            task.use(evaluate, filter_labels=["standalone", "node.1"])
            task.use(train, filter_labels=["standalone", "node.0"])
            task.run(max_step=100)

    Parallel.runner(n_parallel_workers=2, topology="star")(main)

The processes are Ray actors: on this machine, or anywhere on the cluster that `RAY_ADDRESS` or an earlier `ray.init`
names.
"""

import contextlib
import logging
import math
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import cloudpickle

from hybridrl.framework.parallel.labels import environment_labels
from hybridrl.framework.parallel.process_group import GroupPlan, NodeGroup
from hybridrl.framework.parallel.router import Router, current_router

logger = logging.getLogger(__name__)
TOPOLOGIES = ("mesh", "star", "alone")
# Arguments that say how sockets are found: on Ray processes are found by name, and nothing is lost by leaving them out.
SOCKET_ARGUMENTS = ("protocol", "address", "ports", "startup_interval")


class Parallel:
    """`Parallel()` is this process's router, the same as `task.router`; `Parallel.runner` starts
    groups of processes.
    """

    def __new__(cls) -> Router:  # type: ignore[misc]
        return current_router()

    @staticmethod
    def runner(
        n_parallel_workers: int,
        mq_type: str = "nng",
        *,
        topology: str = "mesh",
        labels: Iterable[str] = (),
        node_ids: int | Sequence[int] | None = None,
        attach_to: Sequence[str] = (),
        auto_recover: bool = False,
        max_retries: float = math.inf,
        name: str | None = None,
        num_cpus: float = 0,
        num_gpus: float = 0,
        options: Mapping[str, Any] | None = None,
        **socket_arguments: Any,
    ) -> Callable[..., list]:
        """Return a function of (main, *args, **kwargs) that runs `main(*args, **kwargs)` in every process and returns
        their results.

        topology: mesh, everybody hears everybody; star, the first process and each other one hear each other; alone,
        nobody does. labels: of every task in the processes, beside `distributed` and `node.N`. node_ids: the numbers N,
        or the first of them; default 0, 1, 2, ... attach_to: names of running groups, or of single processes of them
        (`learner/node-0`), that are linked with every process of this one. auto_recover: a process that raises or dies
        is begun again, at most `max_retries` times each. name: of the group, by which others attach to it. num_cpus,
        num_gpus: reserved per process. options: further options of the Ray actors.

        One process that has no name and is attached to nothing is this one: `main` is called here, standalone, without
        Ray. Raises the first failure of a process, WorkerLost for one that died; no process is left then, and none in
        the end.
        """
        _check_sockets(mq_type, socket_arguments)
        ids = _node_ids(n_parallel_workers, node_ids)
        links = linked(ids, topology)
        _check_attach_to(attach_to)
        retries = max_retries if auto_recover else 0

        def run(main: Callable, *args: Any, **kwargs: Any) -> list:
            if n_parallel_workers == 1 and name is None and not attach_to:
                return [_run_here(main, args, kwargs, max_retries=retries)]
            plan = GroupPlan(
                name or f"parallel-{uuid.uuid4().hex[:6]}",
                cloudpickle.dumps((main, args, kwargs)),
                links,
                frozenset(labels) | environment_labels(),
                tuple(attach_to),
                retries,
                {"num_cpus": num_cpus, "num_gpus": num_gpus, **(options or {})},
            )
            with _ray_session(), NodeGroup(plan) as group:
                return group.run()

        return run


def linked(node_ids: Sequence[int], topology: str) -> dict[int, list[int]]:
    """Return, for every node id, whom it is linked with. In a star the first is the centre."""
    if topology not in TOPOLOGIES:
        raise ValueError(f"topology={topology!r} is unknown; there are {', '.join(TOPOLOGIES)}")
    centre = node_ids[0]
    pairs = {
        "mesh": lambda a, b: True,
        "star": lambda a, b: centre in (a, b),
        "alone": lambda a, b: False,
    }[topology]
    return {a: [b for b in node_ids if a != b and pairs(a, b)] for a in node_ids}


def _node_ids(count: int, node_ids: int | Sequence[int] | None) -> list[int]:
    if count < 1:
        raise ValueError(f"n_parallel_workers={count}; there has to be at least one")
    if node_ids is None or isinstance(node_ids, int):
        return list(range(node_ids or 0, (node_ids or 0) + count))
    if len(node_ids) != count or len(set(node_ids)) != count:
        raise ValueError(
            f"node_ids={list(node_ids)} are not {count} different numbers, one for each of n_parallel_workers={count}"
        )
    return list(node_ids)


def _check_sockets(mq_type: str, given: Mapping[str, Any]) -> None:
    """Arguments of DI-engine that mean nothing on Ray: harmless ones are let pass, with a line in the log."""
    if mq_type != "nng" or "redis_host" in given or "redis_port" in given:
        raise ValueError(
            f"mq_type={mq_type!r}: messages travel through Ray and not through a broker; leave mq_type and redis_* out"
        )
    unknown = [argument for argument in given if argument not in SOCKET_ARGUMENTS]
    if unknown:
        raise TypeError(f"Parallel.runner() has no argument {unknown[0]!r}")
    if given:
        logger.info("Parallel.runner ignores %s: on Ray processes find each other by name", ", ".join(given))


def _check_attach_to(attach_to: Sequence[str]) -> None:
    if isinstance(attach_to, str):
        raise TypeError(f"attach_to={attach_to!r} is one text; write a list, attach_to=[{attach_to!r}]")
    for target in attach_to:
        if "://" in target:
            raise ValueError(
                f"attach_to={target!r} is an address; give that group a name, runner(name='learner'), and "
                "attach_to=['learner']"
            )


def _run_here(main: Callable, args: tuple, kwargs: Mapping[str, Any], *, max_retries: float) -> Any:
    router = current_router()
    router.retries = 0
    while True:
        try:
            return main(*args, **kwargs)
        except Exception as error:
            if router.retries >= max_retries:
                raise
            router.retries += 1
            logger.warning("main failed with %r and is begun again, retry %d", error, router.retries, exc_info=error)


@contextlib.contextmanager
def _ray_session() -> Iterator[None]:
    """Use the Ray that is there; where there is none, start one and end it again."""
    import ray

    if ray.is_initialized():
        yield
        return
    ray.init(include_dashboard=False, logging_level=logging.WARNING)
    try:
        yield
    finally:
        ray.shutdown()
