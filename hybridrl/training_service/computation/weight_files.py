"""A directory with a model's trained tensors.

It appears by a rename, with the hash of what it contains.

    model.json             what is trained, number of updates, base model, and the hash of the tensors
    tensors.safetensors    adapters or weights by name, and Adam's state if it was saved, too

The training worker writes and reads it. The service decides where it lies.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from hybridrl.errors import CheckpointError
from hybridrl.system.atomic_write import fsync_path
from hybridrl.training_service.computation.adapter_slots import TrainedLayers

DESCRIPTION, TENSORS = "model.json", "tensors.safetensors"


@dataclass(frozen=True)
class SavedModel:
    """What `model.json` says."""

    adapter: TrainedLayers
    num_updates: int
    has_optimizer: bool
    base: str


@contextmanager
def new_directory(path: Path) -> Iterator[Path]:
    """Return a directory beside `path` that replaces `path` when the block ends."""
    partial = path.with_name(f".{path.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    yield partial
    for file in partial.iterdir():
        fsync_path(file)
    fsync_path(partial)
    shutil.rmtree(path, ignore_errors=True)
    os.rename(partial, path)
    fsync_path(path.parent)


def write_model(directory: Path, model: SavedModel, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write the two files into a directory that exists."""
    from safetensors.torch import save_file

    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, directory / TENSORS)
    stored = asdict(model) | {"sha256": _hash(directory / TENSORS)}
    (directory / DESCRIPTION).write_text(json.dumps(stored, indent=2), encoding="utf-8")


def read_description(directory: Path) -> SavedModel:
    """Return what a directory has. Raises CheckpointError if it is missing or damaged."""
    return _described(directory)[0]


def read_model(directory: Path) -> tuple[SavedModel, dict[str, torch.Tensor]]:
    """Return what `write_model` wrote. Raises CheckpointError if a part is missing or damaged."""
    from safetensors.torch import load_file

    model, sha256 = _described(directory)
    try:
        if _hash(directory / TENSORS) != sha256:
            raise CheckpointError(f"{directory.name}/{TENSORS} is damaged: its hash is another; load other weights")
        return model, load_file(directory / TENSORS)
    except OSError as error:
        raise CheckpointError(f"{directory.name}/{TENSORS} cannot be read ({error.strerror})") from error


def _described(directory: Path) -> tuple[SavedModel, str]:
    try:
        stored: dict[str, Any] = json.loads((directory / DESCRIPTION).read_text(encoding="utf-8"))
        sha256 = stored.pop("sha256")
        return SavedModel(**stored | {"adapter": TrainedLayers(**stored["adapter"])}), sha256
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"there are no weights at {directory.name}: {error}") from error


def _hash(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
