"""`Parallel.runner`: run the same `main` in several processes that exchange events and contexts.

    def main():
        with Task() as task:
            task.use(evaluate, filter_labels=["standalone", "node.1"])
            task.use(train, filter_labels=["standalone", "node.0"])
            task.run(max_step=100)

    Parallel.runner(n_parallel_workers=2, topology="star")(main)

The processes are Ray actors, on this machine or on the cluster of `RAY_ADDRESS` or of an earlier `ray.init`. They
communicate through `task.emit`, `task.on` and `task.parallel_ctx`.
"""

import logging
import math
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import cloudpickle

from hybridrl.framework.events.labels import environment_labels
from hybridrl.framework.parallel.peer_router import PeerRouter, peer_router
from hybridrl.framework.parallel.process_group import GroupPlan, MemberGroup
from hybridrl.framework.parallel.ray_session import ray_session

logger = logging.getLogger(__name__)
TOPOLOGIES = ("mesh", "star", "alone")
# DI-engine's arguments for finding sockets. On Ray, processes are found by name, so that they have no effect.
SOCKET_ARGUMENTS = ("protocol", "address", "ports", "startup_interval")


class Parallel:
    """`Parallel()` returns this process's router; `Parallel.runner` starts groups of processes."""

    def __new__(cls) -> PeerRouter:  # type: ignore[misc]
        return peer_router()

    @staticmethod
    def runner(
        n_parallel_workers: int,
        mq_type: str = "nng",
        *,
        topology: str = "mesh",
        labels: Iterable[str] = (),
        node_ids: int | Sequence[int] | None = None,
        attach_to: Sequence[str] = (),
        attach_timeout_s: float = 60.0,
        exit_timeout_s: float = 10.0,
        auto_recover: bool = False,
        max_retries: float = math.inf,
        name: str | None = None,
        num_cpus: float = 0,
        num_gpus: float = 0,
        options: Mapping[str, Any] | None = None,
        **socket_arguments: Any,
    ) -> Callable[..., list]:
        """Return a function of (main, *args, **kwargs) that runs `main` in every process.

        It returns the results of `main(*args, **kwargs)`. A single process without a name and without `attach_to` is
        the calling one: `main` runs here, standalone, without Ray. The first failure of a process is raised, after the
        others had `exit_timeout_s` for the rest of their step, their exit hooks and `finally` blocks. No process is
        left running, neither after a failure nor at the end.

        Args:
            n_parallel_workers: Number of processes.
            mq_type: Only DI-engine's default, "nng", is accepted.
            topology: "mesh" links every pair, "star" the first process with each other one, "alone" none.
            labels: Labels of every task in the processes, in addition to `distributed` and `node.N`.
            node_ids: The numbers N, or the first of them; default 0, 1, 2, ...
            attach_to: Names of running groups, or of single processes of them (`learner/node-0`), which are linked with
                every process of this group. They may start later.
            attach_timeout_s: How long to wait for the groups of `attach_to`.
            exit_timeout_s: How long the processes may go on after a failure of one of them, and after Ctrl-C. After
                half of it `main` is interrupted.
            auto_recover: Restart a process that raises or dies.
            max_retries: Maximum number of restarts per process.
            name: Name of the group, for `attach_to` of others.
            num_cpus: CPUs reserved per process.
            num_gpus: GPUs reserved per process.
            options: Further options of the Ray actors.
            **socket_arguments: Socket arguments of DI-engine; ignored, with a log line.

        Raises:
            WorkerLost: A process died.
            ConfigError: RAY_ADDRESS names no Ray cluster that accepts this process.
            PlacementError: A group of `attach_to` did not start in time.
        """
        _check_sockets(mq_type, socket_arguments)
        ids = _node_ids(n_parallel_workers, node_ids)
        links = topology_links(ids, topology)
        _check_attach_to(attach_to)
        retries = max_retries if auto_recover else 0

        def run(main: Callable, *args: Any, **kwargs: Any) -> list:
            if n_parallel_workers == 1 and name is None and not attach_to:
                return [_run_in_process(main, args, kwargs, max_retries=retries)]
            plan = GroupPlan(
                name or f"parallel-{uuid.uuid4().hex[:6]}",
                cloudpickle.dumps((main, args, kwargs)),
                links,
                frozenset(labels) | environment_labels(),
                tuple(attach_to),
                attach_timeout_s,
                exit_timeout_s,
                retries,
                {"num_cpus": num_cpus, "num_gpus": num_gpus, **(options or {})},
            )
            with ray_session(attach_to, timeout_s=attach_timeout_s), MemberGroup(plan) as group:
                return group.run()

        return run


def topology_links(node_ids: Sequence[int], topology: str) -> dict[int, list[int]]:
    """Return, per node id, its linked ids; in a star the first is the centre."""
    if topology not in TOPOLOGIES:
        raise ValueError(f"topology={topology!r} is unknown; use one of {', '.join(TOPOLOGIES)}")
    centre = node_ids[0]
    pairs = {"mesh": lambda a, b: True, "star": lambda a, b: centre in (a, b), "alone": lambda a, b: False}[topology]
    return {a: [b for b in node_ids if a != b and pairs(a, b)] for a in node_ids}


def _node_ids(count: int, node_ids: int | Sequence[int] | None) -> list[int]:
    if count < 1:
        raise ValueError(f"n_parallel_workers={count}: must be at least 1")
    if node_ids is None or isinstance(node_ids, int):
        return list(range(node_ids or 0, (node_ids or 0) + count))
    if len(node_ids) != count or len(set(node_ids)) != count:
        raise ValueError(f"node_ids={list(node_ids)}: must be {count} different numbers (n_parallel_workers={count})")
    return list(node_ids)


def _check_sockets(mq_type: str, given: Mapping[str, Any]) -> None:
    """Refuse DI-engine's message brokers; log and ignore its socket arguments."""
    if mq_type != "nng" or "redis_host" in given or "redis_port" in given:
        raise ValueError(
            f"mq_type={mq_type!r}: messages travel through Ray and not through a broker; leave out mq_type and redis_*"
        )
    unknown = [argument for argument in given if argument not in SOCKET_ARGUMENTS]
    if unknown:
        raise TypeError(f"Parallel.runner() has no argument {unknown[0]!r}")
    if given:
        logger.info("Parallel.runner ignores %s: on Ray, processes find each other by name", ", ".join(given))


def _check_attach_to(attach_to: Sequence[str]) -> None:
    if isinstance(attach_to, str):
        raise TypeError(f"attach_to={attach_to!r} is a string; write a list, attach_to=[{attach_to!r}]")
    for target in attach_to:
        if "://" in target:
            raise ValueError(
                f"attach_to={target!r} is an address; give that group a name, runner(name='learner'), and "
                "attach_to=['learner']"
            )


def _run_in_process(main: Callable, args: tuple, kwargs: Mapping[str, Any], *, max_retries: float) -> Any:
    router = peer_router()
    router.retries = 0
    while True:
        try:
            return main(*args, **kwargs)
        except Exception as error:
            if router.retries >= max_retries:
                raise
            router.retries += 1
            logger.warning("main failed with %r; restarting it, retry %d", error, router.retries, exc_info=error)
