"""`NodeRelays`: one actor per node, which passes calls on to its ranks and returns their answers as one.

A driver that calls 1024 ranks sends and awaits 1024 messages; with 8 ranks on a node, it exchanges 128 with relays. A
`RayWorkerGroup` of at least `RELAY_FROM` ranks uses them for calls of all ranks that it waits for. Calls that it does
not wait for go to the ranks themselves, because each rank's result is passed on by its own reference.

A relay runs on the node of its ranks, so it is lost with that node. Failures have the role, the rank and the type that
they have without relays: a relay waits with `wait_all`, as the driver does, and raises what that raises.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from hybridrl.errors import CallTimeout, HybridRLError, WorkerLost
from hybridrl.single_controller.awaiting import TIMEOUT_HINT, register_actors, wait_all
from hybridrl.single_controller.monitoring.lost_workers import reported_reason
from hybridrl.single_controller.monitoring.reports import report_call_timeout
from hybridrl.single_controller.processes.termination import kill_actors

logger = logging.getLogger(__name__)
RELAY_FROM = 64  # ranks; below, all messages of a call cost the driver a few milliseconds (benchmarks/scale.py)
START_TIMEOUT_S = 120.0
THREADS = 16  # calls that a relay has in flight: the threads of a driver may call at the same time
GRACE_S = 10.0  # for a relay to say which of its ranks did not answer


class NodeRelay:
    """The actor. Holds the worker processes of one node."""

    def __init__(self) -> None:
        self.hosts: dict[int, Any] = {}

    def attach(self, hosts: Mapping[int, Any], addresses: Mapping[str, tuple[str, int]]) -> None:
        """Set the processes by rank, and their names in errors, see `register_actors`."""
        self.hosts = dict(hosts)
        register_actors(addresses)

    def call(
        self,
        header: Sequence[Any],
        role: str,
        method: str,
        arguments: Mapping[int, tuple[tuple[Any, ...], dict[str, Any]]],
        threads: str | None,
        timeout_s: float | None,
    ) -> list[Any]:
        """Call a method of one role in processes of this node, and return the results in the order of `arguments`.

        The first failure is raised at once, as by `wait_all`.

        Args:
            header: Of the calls, see `CallHeader.encode`.
            arguments: Rank -> arguments.
            threads: Concurrency group of the calls; None for the thread of all other calls.
        """
        calls = []
        for rank, (args, kwargs) in arguments.items():
            call = self.hosts[rank].call
            call = call if threads is None else call.options(concurrency_group=threads)
            calls.append(call.remote(header, role, method, *args, **kwargs))
        return wait_all(calls, list(arguments), role=role, method=method, timeout_s=timeout_s, hint=TIMEOUT_HINT)


@dataclass
class NodeRelays:
    """The relays of a group's processes, held by the driver.

    Attributes:
        actors: One per node.
        ranks: Of each node, in the order of `actors`.
        host_ids: Rank -> actor id (hex) of its process.
    """

    actors: list[Any]
    ranks: list[list[int]]
    host_ids: dict[int, str] = field(default_factory=dict)

    @classmethod
    def start(
        cls, hosts: Sequence[Any], nodes: Sequence[str], node_of_rank: Sequence[Any], *, label: str
    ) -> "Self | None":
        """Start one relay on every node; return None, after a warning, if one does not start.

        Args:
            hosts: Worker processes by rank.
            nodes: Ray's id of the node of every rank.
            node_of_rank: What is equal for ranks that share a relay.
            label: Roles of the processes.
        """
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        ranks: dict[Any, list[int]] = {}
        for rank, node in enumerate(node_of_rank):
            ranks.setdefault(node, []).append(rank)
        actors: list[Any] = []
        for own in ranks.values():
            options: dict[str, Any] = {
                "num_cpus": 0,
                "max_concurrency": THREADS,
                "scheduling_strategy": NodeAffinitySchedulingStrategy(nodes[own[0]], soft=False),
            }
            actors.append(ray.remote(NodeRelay).options(**options).remote())
        relays = cls(actors, list(ranks.values()), {rank: host._actor_id.hex() for rank, host in enumerate(hosts)})
        register_actors(
            {relay._actor_id.hex(): (label, own[0]) for relay, own in zip(actors, relays.ranks, strict=True)}
        )
        attached = [
            relay.attach.remote(
                {rank: hosts[rank] for rank in own}, {relays.host_ids[rank]: (label, rank) for rank in own}
            )
            for relay, own in zip(actors, relays.ranks, strict=True)
        ]
        try:
            firsts = [own[0] for own in relays.ranks]
            wait_all(attached, firsts, role=label, method="attach", timeout_s=START_TIMEOUT_S)
        except HybridRLError as error:
            logger.warning("the relays of %s did not start, its ranks are called one by one: %s", label, error)
            relays.stop()
            return None
        return relays

    def call(
        self,
        header: Sequence[Any],
        role: str,
        method: str,
        args: Sequence[tuple[Any, ...]],
        kwargs: Sequence[dict[str, Any]],
        *,
        threads: str | None,
        timeout_s: float | None,
    ) -> list[Any]:
        """Call a method on all ranks through the relays; return the results by rank. Errors as of `wait_all`."""
        answers = [
            relay.call.remote(
                header, role, method, {rank: (args[rank], kwargs[rank]) for rank in own}, threads, timeout_s
            )
            for relay, own in zip(self.actors, self.ranks, strict=True)
        ]
        ranks_of = dict(zip(answers, self.ranks, strict=True))
        try:
            parts = wait_all(
                answers,
                [own[0] for own in self.ranks],
                role=role,
                method=method,
                timeout_s=None if timeout_s is None else timeout_s + GRACE_S,
                hint=TIMEOUT_HINT,
                find_lost=lambda answer: self._reported_loss(ranks_of[answer]),
            )
        except CallTimeout as error:
            if hasattr(error, "remote_traceback"):  # of a relay: only this process is connected to the master
                report_call_timeout(role, error.ranks, method, timeout_s or 0.0)
            raise
        except WorkerLost as error:
            if hasattr(error, "remote_traceback") or reported_reason(self.host_ids[error.rank]):
                raise
            own = next(own for own in self.ranks if error.rank in own)
            cause = f"the relay of ranks {own[0]} to {own[-1]}, which is on their node, was lost: {error.cause}"
            raise WorkerLost(role, error.rank, method, cause) from error
        values = {
            rank: value
            for own, part in zip(self.ranks, parts, strict=True)
            for rank, value in zip(own, part, strict=True)
        }
        return [values[rank] for rank in range(len(values))]

    def _reported_loss(self, ranks: Sequence[int]) -> tuple[int, str] | None:
        """Return the first of these ranks that the master has reported as lost, and why; None without any."""
        reasons = ((rank, reported_reason(self.host_ids[rank])) for rank in ranks)
        return next(((rank, reason) for rank, reason in reasons if reason), None)

    def stop(self) -> None:
        """End the relays, not the processes that they call."""
        kill_actors(self.actors)
        self.actors = []


@dataclass
class OrderedRelays:
    """The relays of a group's processes, used only where no call can overtake an earlier one.

    A call through a relay and one that was sent to the ranks themselves arrive in any order.

    Attributes:
        relays: Once a call has used them.
        unawaited: Of the last call of all ranks that its caller did not wait for, references to its numbers of rows.
        in_order: Whether a relayed call can overtake no other call than that.
    """

    relays: NodeRelays | None = None
    unawaited: list[Any] = field(default_factory=list)
    in_order: bool = True

    def note_calls(self, sizes: Sequence[Any] | None) -> None:
        """Note that calls were sent to the ranks themselves.

        Args:
            sizes: References to the numbers of rows of a call of all ranks; None for other calls.
        """
        if sizes is None:
            self.in_order = False
        else:
            self.unawaited = list(sizes)

    def note_all_ended(self) -> None:
        """Note that all calls have ended that were sent to the ranks themselves."""
        self.unawaited, self.in_order = [], True

    def find(
        self, hosts: Sequence[Any], nodes: Sequence[str], node_of_rank: Sequence[Any], *, label: str
    ) -> NodeRelays | None:
        """Return the relays, after starting them if there are none; arguments as for `NodeRelays.start`.

        Returns None where a call through them could overtake an earlier call, or if they do not start.
        """
        import ray

        if self.in_order and self.unawaited:
            count = len(self.unawaited)
            _, self.unawaited = ray.wait(self.unawaited, num_returns=count, timeout=0, fetch_local=False)
        if self.unawaited or not self.in_order:
            return None
        self.relays = self.relays or NodeRelays.start(hosts, nodes, node_of_rank, label=label)
        return self.relays

    def stop(self) -> None:
        """End the relays: a process is about to be replaced, or all are about to end."""
        if self.relays is not None:
            self.relays.stop()
        self.relays = None
        self.note_all_ended()
