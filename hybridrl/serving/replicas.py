"""Replicas that a router sends requests to: what it asks of them, and the workers of a group as replicas.

Used by `router.py`, in the driver process. Decides nothing about routing.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from hybridrl.single_controller.references import OutputRefs
from hybridrl.workers.rollout.request_server import SLICE_S
from hybridrl.workers.rollout.requests import Request, TokenOutput


class NotReplaceable(Exception):
    """The router cannot restart this replica; callers get the original loss instead."""


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
            NotReplaceable: The replica is not the router's to restart. Any other error means that the restart failed.
        """


class GroupReplicas:
    """Workers of a group with a `serve` method (`ActorRolloutRefWorker`), each of them a replica.

    Args:
        group: The worker group.
        version: Version of the weights that the replicas must hold; None accepts any.
        progress_timeout_s: A call without an answer for this long counts as lost.
        resync: Sends the current weights to a worker that was just restarted. None: dead workers cannot be replaced
            here.
    """

    def __init__(
        self, group: Any, *, version: int | None, progress_timeout_s: float, resync: Callable[[int], None] | None = None
    ):
        self.group, self.version, self.progress_timeout_s, self.resync = group, version, progress_timeout_s, resync
        self.num_replicas, self.can_respawn = group.world_size, resync is not None

    def serve(self, replica: int, requests: list[Request], aborted: list[str]) -> list[TokenOutput]:
        future = self.group.execute_rank_async(replica, "serve", requests, aborted, SLICE_S, self.version)
        references = OutputRefs([future], ranks=[replica], fetch=self.group.fetch)
        return self.group.fetch(references, method="serve", timeout_s=self.progress_timeout_s)[0]

    def respawn(self, replica: int) -> None:
        if self.resync is None:
            raise NotReplaceable(f"{self.group.role}-{replica} also trains; the trainer restarts it, not the router")
        self.group.respawn(replica)
        self.group.execute_rank(replica, "init_model")
        self.resync(replica)


@dataclass
class ReplicaOutage:
    """One loss of a replica. Times are seconds of `time.monotonic`.

    Attributes:
        cause: Type and message of the error.
        last_ok_at: Last answer before the loss.
        lost_at: When the router stopped routing to it.
        restored_at: When the router routed to it again; None while it is out.
        num_retried: Requests that were sent to other replicas.
    """

    replica: int
    cause: str
    last_ok_at: float
    lost_at: float
    restored_at: float | None = None
    num_retried: int = 0
