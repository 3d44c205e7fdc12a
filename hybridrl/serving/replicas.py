"""Replicas that a router sends requests to: what it asks of them, and the workers of a group as replicas.

Used by `router.py`, in the driver process. Decides nothing about routing.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from hybridrl.errors import WorkerLost
from hybridrl.workers.rollout.request_engine import SLICE_S
from hybridrl.workers.rollout.requests import Request, TokenOutput

Resync = Callable[[Sequence[int]], None]  # sends the current weights to restarted processes of these ranks


class NotReplaceable(Exception):
    """The router cannot restart this replica; callers get the original loss instead."""


class LostDuringRestart(Exception):
    """A new process of the replica was lost, too, before it could serve: `cause`."""

    def __init__(self, cause: WorkerLost):
        super().__init__(str(cause))
        self.cause = cause


class Replicas(Protocol):
    """Where requests are served. Methods block; the router calls them from threads, one at a time per replica.

    Attributes:
        can_respawn: Whether `respawn` may work. The trainer restarts replicas that also train.
    """

    num_replicas: int
    can_respawn: bool

    def serve(self, replica: int, requests: list[Request], aborted: list[str]) -> list[TokenOutput]:
        """Hand over requests and generate for a moment.

        Returns:
            Outputs of the requests that have ended.

        Raises:
            WorkerLost, CallTimeout: The replica can no longer be used.
        """

    def respawn(self, replica: int) -> None:
        """Start a new process with the current weights in place of this one.

        Raises:
            NotReplaceable: The replica is not the router's to restart.
            LostDuringRestart: It can be tried again. Any other error means that the restart failed.
        """


class GroupReplicas:
    """Workers with a `serve` method (`ActorRolloutRefWorker`) as replicas.

    The adjacent workers of one engine are one replica. They get the same calls, the first one's answer counts, and if
    one of them is lost, all are.

    Args:
        group: The worker group.
        version: Version of the weights that the replicas must hold; None accepts any.
        progress_timeout_s: A call without an answer for this long counts as lost.
        resync: Sends the current weights to the workers of these ranks, which were just restarted. None: dead workers
            cannot be replaced here.
        num_peers: Workers of a replica.
    """

    def __init__(
        self,
        group: Any,
        *,
        version: int | None,
        progress_timeout_s: float,
        resync: Resync | None = None,
        num_peers: int = 1,
    ):
        self.group, self.version, self.progress_timeout_s, self.resync = group, version, progress_timeout_s, resync
        self.num_peers, self.can_respawn = num_peers, resync is not None
        self.num_replicas = group.world_size // num_peers

    def _ranks_of(self, replica: int) -> range:
        return range(replica * self.num_peers, (replica + 1) * self.num_peers)

    def serve(self, replica: int, requests: list[Request], aborted: list[str]) -> list[TokenOutput]:
        sent = (requests, aborted, SLICE_S, self.version)
        references = self.group.execute_ranks_async(self._ranks_of(replica), "serve", *sent)
        return self.group.fetch(references, method="serve", timeout_s=self.progress_timeout_s)[0]

    def respawn(self, replica: int) -> None:
        group, ranks = self.group, self._ranks_of(replica)
        if self.resync is None:
            raise NotReplaceable(f"the trainer restarts {group.role}-{ranks[0]}, not the router")
        try:
            group.respawn(*ranks)
            group.execute_ranks(ranks, "init_model")
            self.resync(ranks)
        except WorkerLost as error:
            if error.role == group.role and error.rank in ranks:
                raise LostDuringRestart(error) from error
            raise  # of another process, such as the actor that has the weights


@dataclass
class ReplicaOutage:
    """One loss of a replica. Times are seconds of `time.monotonic`.

    Attributes:
        cause: Type and message of the error.
        lost_at: When the router stopped routing to it.
        restored_at: When the router routed to it again; None while it is out.
        num_retried: Requests that were sent to other replicas.
    """

    replica: int
    cause: str
    lost_at: float
    restored_at: float | None = None
    num_retried: int = 0
