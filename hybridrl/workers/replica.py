"""`ReplicaWorker`: a process that only serves a model, without training.

The request router calls it. It reads its weights from the model's directory, so a restarted replica needs no push.
"""

from collections.abc import Iterable
from dataclasses import replace

import torch

from hybridrl.single_controller.dispatch import Dispatch, register
from hybridrl.single_controller.worker import Worker
from hybridrl.workers.process_setup import init_worker_process
from hybridrl.workers.rollout.base import Rollout, RolloutHealth, RolloutSetup, make_rollout
from hybridrl.workers.rollout.requests import Request, TokenOutput


class ReplicaWorker(Worker):
    """One process that holds a model and serves requests.

    Args:
        setup: Settings of the rollout. The device is resolved in the process.
        num_threads: CPU threads for torch, see `init_worker_process`.
    """

    def __init__(self, setup: RolloutSetup, *, num_threads: int | None = None):
        self.setup, self.num_threads = setup, num_threads

    @register(Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        """Load the model."""
        device = init_worker_process(device=self.setup.device, num_threads=self.num_threads, single_process=True)
        self.rollout: Rollout = make_rollout(self.setup.config.name, replace(self.setup, device=device))
        self._engine = self.rollout.request_engine()

    @register(Dispatch.ALL_TO_ALL)
    def serve(
        self, requests: list[Request], aborted: list[str], slice_s: float, weights_version: int | None = None
    ) -> list[TokenOutput]:
        """Serve requests for one time slice, see `RequestEngine.serve`.

        Raises:
            StaleWeightsError: The weights are of another version.
        """
        self.rollout.require_version(weights_version, holder=f"replica {self.rank}")
        return self._engine.serve(requests, aborted, slice_s=slice_s)

    @register(Dispatch.ONE_TO_ALL)
    def load_weights(self, version: int, weights: Iterable[tuple[str, torch.Tensor]]) -> RolloutHealth:
        """Replace all weights, given under Hugging Face names, by those of `version`."""
        return self.rollout.load_weights(version, weights)
