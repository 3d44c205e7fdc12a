"""A service over a tiny model in this process, for the tests of this folder."""

from pathlib import Path

import numpy as np
import pytest

from hybridrl.single_controller.local_worker_group import LocalWorkerGroup
from hybridrl.single_controller.worker_group import ClassWithInitArgs
from hybridrl.training_service.client import datum
from hybridrl.training_service.computation.groups import Computation
from hybridrl.training_service.computation.worker import SamplingWorker, TrainingServiceWorker, WorkerSettings
from hybridrl.training_service.service import ServiceSettings, TrainingService
from hybridrl.training_service.state.store import Store
from hybridrl.training_service.state.tenants import Tenants

MAX_RANK, MAX_LENGTH = 8, 64


def make_computation(path: Path, *, max_rank: int = MAX_RANK) -> tuple[Computation, LocalWorkerGroup]:
    """A computation in this process, and its trainer."""
    settings = WorkerSettings(str(path), max_rank=max_rank, max_length=MAX_LENGTH, device="cpu", num_threads=1)
    trainer = LocalWorkerGroup(None, ClassWithInitArgs(TrainingServiceWorker, settings), role="trainer")
    replica = LocalWorkerGroup(None, ClassWithInitArgs(SamplingWorker, settings), role="replica")
    computation = Computation(trainer, replica, is_shared=True)
    computation.start()
    return computation, trainer


@pytest.fixture(scope="session")
def with_adapters(tiny_qwen2):
    """A computation that trains adapters, and its trainer."""
    return make_computation(tiny_qwen2)


@pytest.fixture(scope="session")
def with_all_weights(tiny_qwen2):
    """One that trains all weights, and its trainer."""
    return make_computation(tiny_qwen2, max_rank=0)


@pytest.fixture(scope="session")
def computation(with_adapters):
    return with_adapters[0]


@pytest.fixture(scope="session")
def full_computation(with_all_weights):
    return with_all_weights[0]


def make_service(computation, root: Path, *, max_rank: int = MAX_RANK, tenants: Tenants | None = None, timeout_s=300.0):
    settings = ServiceSettings("tiny", "tiny", max_rank, MAX_LENGTH, timeout_s)
    return TrainingService(settings, Store(root), computation=computation, tenants=tenants)


@pytest.fixture
def service(computation, tmp_path):
    found = make_service(computation, tmp_path / "store")
    found.start()
    yield found
    found.stop()


def sequence(seed: int, length: int = 12):
    """A datum for `cross_entropy` with random tokens and weights of both signs."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(10, 200, length + 1)
    return datum(tokens[:-1], tokens[1:], weights=rng.normal(size=length))
