"""Records of sessions, their models and their sampling sessions, and their files.

Only `service` and `operations` change a record, with the executor's lock held.
"""

import json
import time
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hybridrl.errors import DataError
from hybridrl.system.atomic_write import atomic_write
from hybridrl.training_service.computation.adapter_slots import TrainedLayers
from hybridrl.training_service.computation.snapshot_sampler import BASE
from hybridrl.training_service.state.ledger import Ledger, StoredAnswer, failure
from hybridrl.training_service.state.tenants import Tenant

SESSION_FILE, MODEL_FILE = "session.json", "model.json"


@dataclass
class TrainedModel:
    """A model that a client trains.

    Attributes:
        adapter: What is trained; None before it is created, and if that failed.
        ledger: Its operations.
        inflight: Directory of the weights that all its samplers of kind "inflight" use.
        published: Directory of the weights for sampling that are the model's own now.
        refused: Why it is not made.
        broken: Why it can run nothing any more.
        losses: Sums of the passes since the last step.
        last_step_at: When the last step ended, in seconds since 1970.
    """

    id: str
    session_id: str
    tenant: Tenant
    base_model: str
    ledger: Ledger
    metadata: dict[str, str] | None = None
    adapter: TrainedLayers | None = None
    inflight: str | None = None
    published: str | None = None
    refused: str | None = None
    broken: str | None = None
    last_request: float = field(default_factory=time.time)
    losses: list[float] = field(default_factory=list)
    last_step_at: float = field(default_factory=time.time)

    def end(self, reason: str) -> None:
        """Answer operations that will not run."""
        for operation in self.ledger.waiting():
            if not operation.answer.done():
                operation.answer.set_result(failure(DataError(reason)))
        self.ledger.drop_bodies()


@dataclass
class Sampler:
    """A sampling session, which names the weights that it samples.

    They are weights that do not change, the base model, or the newest ones of a model (`inflight_of`).
    """

    id: str
    session_id: str
    tenant: Tenant
    base_model: str
    version: str = BASE
    model_path: str | None = None
    inflight_of: str | None = None
    answers: dict[int, tuple[str, "Future[StoredAnswer]"]] = field(default_factory=dict)

    def stored(self) -> dict[str, Any]:
        """Return what the file of the session has about it."""
        return {"version": self.version, "model_path": self.model_path, "inflight_of": self.inflight_of}


@dataclass
class ClientSession:
    """A client's session. `ended`: the reason, once it has finished or its client was silent for too long."""

    id: str
    tenant: Tenant
    directory: Path
    metadata: dict[str, str] | None = None
    name: str | None = None
    models: dict[int, TrainedModel] = field(default_factory=dict)
    samplers: dict[int, Sampler] = field(default_factory=dict)
    ended: str | None = None
    last_seen: float = field(default_factory=time.monotonic)

    def write(self) -> None:
        """Store the session, without its models."""
        stored = {
            "tenant": self.tenant.name,
            "metadata": self.metadata,
            "name": self.name,
            "ended": self.ended,
            "samplers": {str(number): sampler.stored() for number, sampler in self.samplers.items()},
        }
        with atomic_write(self.directory / SESSION_FILE) as file:
            json.dump(stored, file)

    def model_directory(self, number: int) -> Path:
        """Return where a model's ledger is."""
        return self.directory / "models" / str(number)


def write_model_file(directory: Path, model: dict[str, Any]) -> None:
    """Store the `metadata` that the client gave a model, and why it was `refused`."""
    directory.mkdir(parents=True, exist_ok=True)
    with atomic_write(directory / MODEL_FILE) as file:
        json.dump(model, file)


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a file."""
    return json.loads(path.read_text(encoding="utf-8"))
