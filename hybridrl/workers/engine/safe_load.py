"""`without_code`: load a checkpoint's files without running code that they may contain.

Python's pickle format can name any function and have it called. A checkpoint may come from somebody else, and whoever
changes a file can also write its hash into the manifest.
"""

import enum
import os
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from hybridrl.errors import CheckpointError

METADATA = ".metadata"  # of torch.distributed.checkpoint
WEIGHTS_ONLY_VARIABLE = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"  # torch.load then constructs tensors and plain data only
METADATA_CLASSES = {
    "pathlib": {"PosixPath", "PurePosixPath"},
    "pathlib._local": {"PosixPath", "PurePosixPath"},  # as Python 3.13 calls them
    "torch": {"Size", *(name for name, value in vars(torch).items() if isinstance(value, torch.dtype))},
    "torch.serialization": {"_get_layout"},
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo", "_StoragePrefix"},
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
}


@contextmanager
def without_code(directory: str | Path) -> Iterator[None]:
    """Refuse a checkpoint whose metadata name a function, and load only plain data in the block.

    Args:
        directory: An engine's directory in a checkpoint.

    Raises:
        CheckpointError: `.metadata` names a file elsewhere, or a class or function that no checkpoint needs, or is
            damaged.
    """
    entries = getattr(read_metadata(os.path.join(directory, METADATA)), "storage_data", None) or {}
    for file in {str(entry.relative_path) for entry in entries.values()}:
        if os.path.basename(file) != file:
            raise CheckpointError(f"{directory}/{METADATA} names {file!r}, which is no file of it; do not load it")
    before = os.environ.get(WEIGHTS_ONLY_VARIABLE)
    os.environ[WEIGHTS_ONLY_VARIABLE] = "1"
    try:
        yield
    except pickle.UnpicklingError as error:
        raise CheckpointError(f"{directory}: a file holds more than tensors and plain data: {error}") from error
    finally:
        if before is None:
            del os.environ[WEIGHTS_ONLY_VARIABLE]
        else:
            os.environ[WEIGHTS_ONLY_VARIABLE] = before


def read_metadata(path: str | Path) -> Any:
    """Return the metadata of torch.distributed.checkpoint in a file, constructing nothing but its own classes.

    Raises:
        CheckpointError: As for `without_code`.
    """
    with open(path, "rb") as file:
        try:
            unpickler: Any = _MetadataUnpickler(file)
            found = unpickler.load()
            if max(unpickler.memo, default=0) > len(unpickler.memo):  # torch would take memory for what is between
                raise ValueError("its memo has holes")
            return found
        except CheckpointError as error:
            raise CheckpointError(f"{path} {error}") from None
        except Exception as error:  # a damaged pickle raises any of a dozen types
            raise CheckpointError(f"{path} is damaged ({type(error).__name__}: {error})") from error


class _MetadataUnpickler(pickle._Unpickler):
    """Unpickler in Python: C's allocates as many entries of its memo as a file of 12 bytes says."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):
            return _enum_member
        if name not in METADATA_CLASSES.get(module, ()):
            raise CheckpointError(f"names {module}.{name}, which no checkpoint needs; do not load it")
        return super().find_class(module, name)


def _enum_member(cls: Any, name: str) -> enum.Enum:
    """Return a member of an enum: Python 3.11.0 to 3.11.3 pickle it as a call of `getattr`."""
    if not isinstance(cls, enum.EnumMeta):
        raise CheckpointError("names builtins.getattr, which no checkpoint needs; do not load it")
    return cls[name]
