"""`NodeRelays`: one actor per node, which passes calls on to its ranks and returns their answers as one.

A driver that calls 1024 ranks sends and awaits 1024 messages; with 8 ranks on a node, it exchanges 128 with relays. A
`RayWorkerGroup` of at least `RELAY_FROM` ranks uses them for calls of all ranks that it waits for. Calls that it does
not wait for go to the ranks themselves, because each rank's result is passed on by its own reference.

The driver's work is per node, too: it cuts a batch for nodes, and relays cut theirs for ranks (`SplitBatch`). Where
the driver concatenates the results, each relay joins those of its ranks first (`JoinedBatches`).

A relay runs on the node of its ranks, so it is lost with that node. Failures have the role, the rank and the type that
they have without relays: a relay waits with `wait_all`, as the driver does, and raises what that raises.
"""

import json
import logging
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self

from hybridrl.data_plane.batches import JoinedBatches, SplitBatch, concat_joined
from hybridrl.errors import CallTimeout, HybridRLError, WorkerLost
from hybridrl.single_controller.awaiting import TIMEOUT_HINT, register_actors, wait_all
from hybridrl.single_controller.monitoring.lost_workers import any_reported, reported_reason
from hybridrl.single_controller.monitoring.reports import report_call_timeout
from hybridrl.single_controller.processes.termination import kill_actors

logger = logging.getLogger(__name__)
PLAIN_TYPES = (type(None), bool, int, float, str)  # the same after JSON
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

    def call(self, encoded: "bytes | tuple[Any, ...]") -> list[Any] | JoinedBatches:
        """Call a method of one role in processes of this node, and return the results in the order of the ranks.

        The first failure is raised at once, as by `wait_all`.

        Args:
            encoded: `NodeCall.encode`.
        """
        node = NodeCall.decode(encoded)
        args, kwargs = list(map(_sent_to_each, node.args)), {k: _sent_to_each(v) for k, v in node.kwargs.items()}
        calls = []
        for i, rank in enumerate(node.ranks):
            call = self.hosts[rank].call
            call = call if node.threads is None else call.options(concurrency_group=node.threads)
            own_args, own_kwargs = [a[i] for a in args], {k: v[i] for k, v in kwargs.items()}
            calls.append(call.remote(node.header, node.role, node.method, *own_args, **own_kwargs))
        results = wait_all(
            calls, node.ranks, role=node.role, method=node.method, timeout_s=node.timeout_s, hint=TIMEOUT_HINT
        )
        joined = set(node.joined)
        own = [result for rank, result in zip(node.ranks, results, strict=True) if rank in joined]
        return JoinedBatches.of(own) or results


def _sent_to_each(argument: Sequence[Any]) -> Sequence[Any]:
    """Return what is sent to each rank; a part of a batch that several ranks share is put once."""
    import ray

    if not isinstance(argument, SplitBatch):
        return argument
    parts = argument.parts()
    if len(parts) < len(argument):
        parts = [ray.put(part) for part in parts]
    return [parts[i] for i in argument.part_of]


class NodeCall(NamedTuple):
    """A call of all ranks of one node.

    Attributes:
        header: Of the calls, see `CallHeader.encode`.
        ranks: Of the node.
        args, kwargs: Each argument as a sequence over these ranks.
        threads: Concurrency group of the calls; None for the thread of all other calls.
        joined: Those of the ranks whose batches are wanted as one, without the results of the others.
    """

    header: Sequence[Any]
    role: str
    method: str
    ranks: Sequence[int]
    args: Sequence[Sequence[Any]]
    kwargs: Mapping[str, Sequence[Any]]
    threads: str | None
    timeout_s: float | None
    joined: Sequence[int]

    def encode(self) -> "bytes | tuple[Any, ...]":
        """Return the call as bytes if its arguments are plain, because Ray sends bytes at half of an object's cost."""
        plain = all(type(v) in PLAIN_TYPES for entries in [*self.args, *self.kwargs.values()] for v in entries)
        return json.dumps(self).encode() if plain else tuple(self)

    @classmethod
    def decode(cls, encoded: "bytes | Sequence[Any]") -> Self:
        """Return the call that `encode` encoded."""
        return cls(*(json.loads(encoded) if isinstance(encoded, bytes) else encoded))


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

    def __post_init__(self) -> None:
        ranks = [rank for own in self.ranks for rank in own]
        self.in_rank_order = ranks == sorted(ranks)

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
        args: Sequence[Sequence[Any]],
        kwargs: Mapping[str, Sequence[Any]],
        *,
        threads: str | None,
        timeout_s: float | None,
        joined: Sequence[int] | None = None,
    ) -> Any:
        """Call a method on all ranks through the relays; return the results by rank. Errors as of `wait_all`.

        Args:
            args, kwargs: Each argument as a sequence over the ranks.
            joined: Ranks, ascending; if their results are batches that can be joined, the result is one batch of them.
        """
        wanted = set(joined or ()) if self.in_rank_order else set()
        answers = []
        for relay, own in zip(self.actors, self.ranks, strict=True):
            own_args, own_kwargs = [_of(own, a) for a in args], {k: _of(own, v) for k, v in kwargs.items()}
            own_joined = [rank for rank in own if rank in wanted]
            call = NodeCall(header, role, method, own, own_args, own_kwargs, threads, timeout_s, own_joined)
            answers.append(relay.call.remote(call.encode()))
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
        return self.merged(parts, wanted)

    def merged(self, parts: Sequence[Any], wanted: AbstractSet[int]) -> Any:
        """Return the results of all nodes by rank, or the one batch of the wanted ranks if every node has joined its.

        A node that could not join its results has returned all of them; the others' are separated again.
        """
        joined = [part for part in parts if isinstance(part, JoinedBatches)]
        all_joined = len(joined) == sum(not wanted.isdisjoint(own) for own in self.ranks)
        if joined and all_joined and (batch := concat_joined(joined)) is not None:
            return batch
        values: list[Any] = [None] * sum(map(len, self.ranks))
        for own, part in zip(self.ranks, parts, strict=True):
            if isinstance(part, JoinedBatches):
                own, part = [rank for rank in own if rank in wanted], part.separate()
            for rank, value in zip(own, part, strict=True):
                values[rank] = value
        return values

    def _reported_loss(self, ranks: Sequence[int]) -> tuple[int, str] | None:
        """Return the first of these ranks that the master has reported as lost, and why; None without any."""
        if not any_reported():
            return None
        reasons = ((rank, reported_reason(self.host_ids[rank])) for rank in ranks)
        return next(((rank, reason) for rank, reason in reasons if reason), None)

    def stop(self) -> None:
        """End the relays, not the processes that they call."""
        kill_actors(self.actors)
        self.actors = []


def _of(ranks: Sequence[int], argument: Sequence[Any]) -> Sequence[Any]:
    """Return the entries of these ranks."""
    return argument.of(ranks) if isinstance(argument, SplitBatch) else [argument[rank] for rank in ranks]


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

    def is_safe(self) -> bool:
        """Return whether a call through the relays can overtake no earlier call."""
        import ray

        if self.in_order and self.unawaited:
            count = len(self.unawaited)
            _, self.unawaited = ray.wait(self.unawaited, num_returns=count, timeout=0, fetch_local=False)
        return self.in_order and not self.unawaited

    def stop(self) -> None:
        """End the relays: a process is about to be replaced, or all are about to end."""
        if self.relays is not None:
            self.relays.stop()
        self.relays = None
        self.note_all_ended()
