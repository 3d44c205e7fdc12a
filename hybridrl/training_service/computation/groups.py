"""`Computation`: the two worker groups of a training service, called as functions.

The trainers share each pass; a replica samples alone. In one process there is one of each (`LocalWorkerGroup`), on Ray
as many as wanted (`RayWorkerGroup`). A call that raises one of `LOST` has lost processes. The trainers then start again
without models, and a replica without requests: the service has both. Each group is called by one thread at a time.
"""

import contextlib
import logging
from collections.abc import Callable
from pathlib import Path

import numpy as np

from hybridrl.errors import CallTimeout, WorkerLost
from hybridrl.single_controller.worker_group import WorkerGroup
from hybridrl.training_service.computation.adapter_slots import TrainedLayers
from hybridrl.training_service.computation.rows import metrics_of
from hybridrl.training_service.computation.worker import SamplingWorker, TrainingServiceWorker
from hybridrl.training_service.wire import Pass
from hybridrl.workers.engine.base import StepOptions
from hybridrl.workers.rollout.requests import Request, TokenOutput
from hybridrl.workers.rollout.sampling.scores import ScoreRequest, TokenScores

logger = logging.getLogger(__name__)

LOST = (WorkerLost, CallTimeout)
MAX_LOSSES = 5  # of processes by one operation, which then fails
MAX_STARTS = 5  # in a row, of processes that are lost again before they are ready


def try_often(start: Callable[[], None]) -> None:
    """Call a function that starts processes again while one is lost, at most `MAX_STARTS` times."""
    for number in range(1, MAX_STARTS + 1):
        try:
            start()
            return
        except LOST:
            if number == MAX_STARTS:
                raise


class Replica:
    """One process that samples.

    Attributes:
        starts: How often it was started; its requests end with it.
    """

    def __init__(self, group: WorkerGroup[SamplingWorker], rank: int):
        self._group, self._rank, self.starts = group, rank, 1

    def sample(self, version: str, requests: list[Request], slice_s: float) -> list[TokenOutput]:
        """Generate with a version for one time slice, see `SnapshotSampler.serve`."""
        return self._group.execute_rank(self._rank, "sample", version, requests, slice_s)

    def scores(self, version: str, wanted: ScoreRequest) -> TokenScores:
        """Return what a version predicts for given tokens."""
        return self._group.execute_rank(self._rank, "scores", version, wanted)

    def restart(self) -> None:
        """Start a process in place of one that was lost."""

        def start() -> None:
            self.starts += 1
            self._group.respawn(self._rank)  # type: ignore[attr-defined]
            self._group.execute_rank(self._rank, "init_model")

        try_often(start)


class Computation:
    """See above. The groups are new; `start` loads the model.

    Attributes:
        is_shared: Whether all of it is one process, which does one thing at a time.
        num_trainers: Processes that train together.
        vocabulary: Number of tokens of the model, after `start`.
    """

    vocabulary: int

    def __init__(
        self, trainers: WorkerGroup[TrainingServiceWorker], replicas: WorkerGroup[SamplingWorker], *, is_shared: bool
    ):
        self._trainers, self._replicas, self.is_shared = trainers, replicas, is_shared
        self.num_trainers = trainers.world_size
        self.replicas = [Replica(replicas, rank) for rank in range(replicas.world_size)]

    def start(self) -> None:
        """Load the model everywhere."""
        self._trainers.execute_all("init_model")
        for note in {*self._replicas.execute_all("init_model")} - {None}:
            logger.warning("replicas merge adapters, one version at a time: %s", note)
        self.vocabulary = self._trainers.execute_all("vocabulary")[0]

    def restart_trainers(self) -> None:
        """Start all trainers again: a process group does not go on with another peer."""
        self._trainers.rebuild()  # type: ignore[attr-defined]
        self._trainers.execute_all("init_model")

    # -- models

    def create(self, model: str, adapter: TrainedLayers) -> None:
        """Make a new model."""
        self._trainers.execute_all("create", model, adapter)

    def load(self, model: str, directory: Path, *, with_optimizer: bool) -> TrainedLayers:
        """Make a model of saved weights and return what it trains."""
        return self._trainers.execute_all("load", model, str(directory), with_optimizer=with_optimizer)[0]

    def drop(self, model: str) -> None:
        """Forget a model."""
        self._trainers.execute_all("drop", model)

    def save(self, model: str, directory: Path, *, note: str | None) -> None:
        """Write a model's weights and Adam's state into a new directory."""
        self._trainers.execute_all("save", model, str(directory), with_optimizer=True, note=note)

    def export(self, model: str, directory: Path, *, note: str) -> None:
        """Write a model's adapters in peft's format."""
        self._trainers.execute_all("export", model, str(directory), note=note)

    # -- training

    def run_pass(self, model: str, request: Pass) -> tuple[list[np.ndarray], dict[str, float]]:
        """Run a forward or a forward_backward; return the log-probs of each datum's targets, and metrics."""
        found = {}
        for part in self._trainers.execute_all("run_pass", model, request):
            found.update(part)
        log_probs, losses = zip(*(found[number] for number in range(len(request.data))), strict=True)
        return list(log_probs), metrics_of(losses, request.data)

    def optimizer_step(self, model: str, options: StepOptions) -> dict[str, float]:
        """Update a model with its gradients; return metrics. Without gradients nothing changes."""
        return self._trainers.execute_all("optimizer_step", model, options)[0]

    def scores(self, model: str, wanted: ScoreRequest) -> TokenScores:
        """Return what a model predicts for given tokens at temperature 1."""
        return self._trainers.execute_all("scores", model, wanted)[0]

    # -- versions for sampling

    def publish(self, model: str, version: Path, *, note: str | None) -> None:
        """Make a version for sampling of a model's weights; its name is its directory."""
        is_known = version.exists()
        self._trainers.execute_all("save", model, str(version), with_optimizer=False, note=note)
        if is_known:
            self._tell_replicas("forget", str(version))

    def retire(self, version: str) -> None:
        """Forget a version for sampling."""
        self._tell_replicas("retire", version)

    def _tell_replicas(self, method: str, version: str) -> None:
        with contextlib.suppress(*LOST):  # a lost replica starts without versions
            self._replicas.execute_all(method, version)
