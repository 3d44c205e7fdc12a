"""Replicas of a model that is not trained: in processes of their own (`ReplicaWorker`), or one in the calling process
(`LocalReplica`).

Both read their weights from the model's directory, so a replica that is started anew has them by itself.
"""

from collections.abc import Iterable
from dataclasses import replace

import torch

from hybridrl.single_controller.dispatch import Dispatch, register
from hybridrl.single_controller.worker import Worker
from hybridrl.workers.process_setup import enter_process
from hybridrl.workers.rollout.base import RolloutHealth, RolloutSetup, VersionedRollout, make_rollout
from hybridrl.workers.rollout.request_server import SLICE_S, Server
from hybridrl.workers.rollout.requests import Request, TokenOutput


class ReplicaWorker(Worker):
    """One process that holds a model and answers requests. setup: its device is found when the process starts."""

    def __init__(self, setup: RolloutSetup, *, num_threads: int | None = None):
        self.setup, self.num_threads = setup, num_threads

    @register(Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        """Read the model."""
        device = enter_process(device=self.setup.device, num_threads=self.num_threads, alone=True)
        self.rollout: VersionedRollout = make_rollout(self.setup.config.name, replace(self.setup, device=device))
        self._server = Server(self.rollout)

    @register(Dispatch.ALL_TO_ALL)
    def serve(
        self, requests: list[Request], aborted: list[str], slice_s: float, weights_version: int | None = None
    ) -> list[TokenOutput]:
        """See `Server.serve`. Called by `Router`; raises StaleWeightsError unless the weights are of this version."""
        self.rollout.require_version(weights_version, holder=f"replica {self.rank}")
        return self._server.serve(requests, aborted, slice_s=slice_s)

    @register(Dispatch.ONE_TO_ALL)
    def load_weights(self, version: int, weights: Iterable[tuple[str, torch.Tensor]]) -> RolloutHealth:
        """Hold these weights, all of them under Hugging Face names, as `version` from now on."""
        self.rollout.load_weights(version, weights)
        return self.rollout.health()


class LocalReplica:
    """One replica in this process, for a `Router`. It is never lost: what goes wrong in it is raised."""

    num_replicas = 1

    def __init__(self, rollout: VersionedRollout):
        self._server: Server = Server(rollout)

    def serve(self, replica: int, requests: list[Request], aborted: list[str]) -> list[TokenOutput]:
        return self._server.serve(requests, aborted, slice_s=SLICE_S)

    def respawn(self, replica: int) -> None:
        raise RuntimeError("the replica is this process and cannot be replaced")
