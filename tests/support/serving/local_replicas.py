"""Replicas of a router in the test's own process, each with a rollout that the test has made."""

from hybridrl.workers.rollout import Rollout
from hybridrl.workers.rollout.requests import Request, TokenOutput


class LocalReplicas:
    """Replicas in this process. `served`: replica -> number of calls."""

    can_respawn = False

    def __init__(self, rollouts: list[Rollout], *, slice_s: float = 0):
        self.num_replicas, self.slice_s = len(rollouts), slice_s
        self.servers = [rollout.request_engine() for rollout in rollouts]
        self.served = [0] * len(rollouts)

    def serve(self, replica: int, requests: list[Request], aborted: list[str]) -> list[TokenOutput]:
        self.served[replica] += 1
        return self.servers[replica].serve(requests, aborted, slice_s=self.slice_s)

    def respawn(self, replica: int) -> None:
        raise RuntimeError("it is this process")
