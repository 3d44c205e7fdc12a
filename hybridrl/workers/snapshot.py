"""A rank's part of an engine's durable state as bytes: what the object store keeps, so that the process that made it may die.

It is what `Engine.save` writes and `Engine.load` reads, by way of a directory in memory: every engine has both, tested with every layout.
A rank writes into a directory of its own, so that its files are known as its own; restoring needs the files of all ranks in one.
"""

import contextlib
import logging
import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch.distributed.checkpoint.api import CheckpointException

from hybridrl.single_controller.decorator import Dispatch, register

logger = logging.getLogger(__name__)
MEMORY = "/dev/shm"

Files = dict[str, np.ndarray]
"""Relative path -> content, uint8."""


class Snapshots:
    """For workers with `save_checkpoint` and `load_checkpoint`, into and from a directory: the same from process to process."""

    save_checkpoint: Callable[[str], Any]
    load_checkpoint: Callable[[str], Any]

    @register(Dispatch.ONE_TO_ALL)
    def take_snapshot(self) -> Files:
        """Return this rank's part of what `save_checkpoint` writes."""
        return files_of(self.save_checkpoint)

    @register(Dispatch.ONE_TO_ALL)
    def load_snapshot(self, *parts: Files) -> None:
        """Continue from what all ranks of a group returned, this one or one before it."""
        load_files(parts, self.load_checkpoint)


def files_of(save: Callable[[str], Any]) -> Files:
    """Return the files that `save(directory)` writes on this rank. Collective as `save` is.

    Where the memory file system is too small (containers often have 64 MB) they go through the directory for temporary files.
    """
    if os.access(MEMORY, os.W_OK):
        with contextlib.suppress(OSError, CheckpointException):  # an engine's collective failure is everybody's, so all go on together
            return _files_of(save, parent=MEMORY)
        logger.warning("a snapshot does not fit into %s; it goes through %s, which may be slower", MEMORY, tempfile.gettempdir())
    return _files_of(save, parent=tempfile.gettempdir())


def load_files(parts: Sequence[Files], load: Callable[[str], Any]) -> None:
    """Call `load(directory)` on a directory with what all ranks gave. Collective as `load` is."""
    size = sum(content.nbytes for files in parts for content in files.values())
    roomy = os.access(MEMORY, os.W_OK) and _free_bytes(MEMORY) > 2 * size  # peers on this machine need as much
    with tempfile.TemporaryDirectory(dir=MEMORY if roomy else None, prefix="hybridrl-snapshot-") as directory:
        for files in parts:
            for name, content in files.items():
                path = Path(directory, name)
                path.parent.mkdir(parents=True, exist_ok=True)
                content.tofile(path)
        load(directory)


def _files_of(save: Callable[[str], Any], *, parent: str) -> Files:
    with tempfile.TemporaryDirectory(dir=parent, prefix="hybridrl-snapshot-") as directory:
        save(directory)
        paths = sorted(path for path in Path(directory).rglob("*") if path.is_file())
        return {str(path.relative_to(directory)): np.fromfile(path, dtype=np.uint8) for path in paths}


def _free_bytes(directory: str) -> int:
    found = os.statvfs(directory)
    return found.f_bavail * found.f_frsize
