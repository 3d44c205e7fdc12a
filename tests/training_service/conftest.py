"""A service over a tiny model in this process, for the tests of this folder."""

from pathlib import Path

import numpy as np
import pytest

from hybridrl.single_controller.local_worker_group import LocalWorkerGroup
from hybridrl.single_controller.worker_group import ClassWithInitArgs
from hybridrl.training_service.client import datum
from hybridrl.training_service.computation.worker import TrainingServiceWorker, WorkerSettings
from hybridrl.training_service.service import ServiceSettings, TrainingService
from hybridrl.training_service.state.store import Store
from hybridrl.training_service.state.tenants import Tenants

MAX_RANK, MAX_LENGTH = 8, 64


def make_group(path: Path, *, max_rank: int = MAX_RANK) -> LocalWorkerGroup:
    settings = WorkerSettings(str(path), max_rank=max_rank, max_length=MAX_LENGTH, device="cpu", num_threads=1)
    group = LocalWorkerGroup(None, ClassWithInitArgs(TrainingServiceWorker, settings))
    group.calls.init_model()
    return group


@pytest.fixture(scope="session")
def worker(tiny_qwen2):
    """The calls of a training worker with adapters."""
    return make_group(tiny_qwen2).calls


@pytest.fixture(scope="session")
def full_worker(tiny_qwen2):
    """The calls of one that trains all weights."""
    return make_group(tiny_qwen2, max_rank=0).calls


def make_service(worker, root: Path, *, max_rank: int = MAX_RANK, tenants: Tenants | None = None, timeout_s=300.0):
    settings = ServiceSettings("tiny", "tiny", max_rank, MAX_LENGTH, timeout_s)
    [vocabulary] = worker.vocabulary()
    return TrainingService(settings, Store(root), worker=worker, vocabulary=vocabulary, tenants=tenants)


@pytest.fixture
def service(worker, tmp_path):
    found = make_service(worker, tmp_path / "store")
    found.start()
    yield found
    found.stop()


def sequence(seed: int, length: int = 12):
    """A datum for `cross_entropy` with random tokens and weights of both signs."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(10, 200, length + 1)
    return datum(tokens[:-1], tokens[1:], weights=rng.normal(size=length))
