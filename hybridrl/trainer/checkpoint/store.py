"""Checkpoints on storage: a directory `global_step_N` that appears by one rename, complete or not at all.

    global_step_12/
        actor/ critic/      engine shards (torch.distributed.checkpoint), one directory per trained role
        ahead/              pending batches (`trainer.lag`), with the parts of their responses that exist
        replay/             samples of the replay buffer (`trainer.replay`)
        trainer.json        step, position in the data, controllers
        config.yaml         the settings that made it
        manifest.json       size and SHA-256 of every other file

The newest checkpoint is found by listing the directory; there is no pointer file. Older checkpoints are deleted only
after a commit. The driver calls this; workers write the engine shards.
"""

import _thread
import hashlib
import json
import logging
import os
import re
import shutil
import sys
import threading
from collections.abc import Callable, Iterable
from typing import Any

from hybridrl.errors import CheckpointError, HybridRLError, StorageError, is_storage_error, reason_of
from hybridrl.system.atomic_write import fsync_path

logger = logging.getLogger(__name__)
MANIFEST, TRAINER_STATE, CONFIG = "manifest.json", "trainer.json", "config.yaml"
WORKING_DIRECTORY = "working_directory"
ENGINE_STATE, RANKS_FILE = ".metadata", re.compile(r"(?:__|random_)(\d+)(?:_\d+\.distcp|\.pt)")
"""File names of torch.distributed.checkpoint, and of the file that each Megatron rank adds."""
OWN_RANKS_FILE = re.compile(r"rank_(\d+)\..+")
"""File names of an engine that writes its checkpoints without torch.distributed.checkpoint (`Engine.save`)."""
BEGIN_TIMEOUT_S = 30.0  # for a thread that has nothing to wait for
STEP_NAME, PARTIAL = re.compile(r"global_step_(0|[1-9]\d{0,17})"), ".partial"


class CheckpointStore:
    """The checkpoints of one run under `root`; at most `keep` of them stay, None keeps all."""

    def __init__(self, root: str, *, keep: int | None = None):
        self.root, self.keep = os.path.abspath(root), keep

    def steps(self) -> list[int]:
        """Return the committed steps, ascending."""
        if not os.path.isdir(self.root):
            return []
        with os.scandir(self.root) as entries:
            return sorted(int(m[1]) for entry in entries if (m := STEP_NAME.fullmatch(entry.name)) and entry.is_dir())

    def path(self, step: int) -> str:
        return os.path.join(self.root, f"global_step_{step}")

    def latest(self) -> str | None:
        """Return the path of the newest checkpoint, or None."""
        steps = self.steps()
        return self.path(steps[-1]) if steps else None

    def commit(self, step: int, write: Callable[[str], None], *, finish_timeout_s: float | None = None) -> str:
        """Make `global_step_{step}` from what `write(directory)` puts into an empty directory; return its path.

        A failure or a kill at any time leaves the previous checkpoints as they were, and a failure leaves nothing else.

        Args:
            step: Completed step.
            write: Writes the checkpoint's files.
            finish_timeout_s: Limit for hashing, manifest and fsync after `write`; None waits without limit.

        Raises:
            CheckpointError: A checkpoint of this step exists; committed ones are never replaced.
            StorageError: Storage failed, or was too slow.
        """
        if os.path.exists(self.path(step)):
            raise CheckpointError(
                f"{self.path(step)} exists already; set trainer.default_local_dir elsewhere, or remove it"
            )
        partial = f"{self.path(step)}{PARTIAL}"
        try:
            self._clear()
            os.makedirs(partial)
            write(partial)
            ManifestWriter(partial, self.path(step), step=step).finish_within(finish_timeout_s)
        except BaseException as error:
            shutil.rmtree(partial, ignore_errors=True)
            if is_storage_error(error) and not isinstance(error, HybridRLError):
                raise StorageError(f"cannot write {partial}: {reason_of(error)}") from error
            raise
        self._retain(step)
        return self.path(step)

    def _clear(self) -> None:
        """Remove half-written checkpoints that killed processes or slow storage left."""
        for name in os.listdir(self.root) if os.path.isdir(self.root) else ():
            if name.endswith(PARTIAL) and STEP_NAME.fullmatch(name.removesuffix(PARTIAL)):
                shutil.rmtree(os.path.join(self.root, name), ignore_errors=True)

    def _retain(self, committed: int) -> None:
        """Remove all but the newest checkpoints; the one just committed stays, whatever its step."""
        by_age = sorted(self.steps(), key=lambda step: (step == committed, step))
        for step in by_age[: -self.keep] if self.keep else []:
            shutil.rmtree(self.path(step), ignore_errors=True)
            logger.info("removed checkpoint %s, trainer.max_ckpt_to_keep=%d", self.path(step), self.keep)


class ManifestWriter:
    """Finishes a commit (manifest, fsync, rename) in a thread that can be abandoned.

    A thread that waits for a disk cannot be interrupted. If it is abandoned, it never renames. It is no `Thread`, whose
    `start` waits for ever if the new thread finds no memory.
    """

    def __init__(self, partial: str, path: str, *, step: int):
        self.partial, self.path, self.step = partial, path, step
        self._lock, self._abandoned = threading.Lock(), False
        self._begun, self._ended = threading.Event(), threading.Event()
        self._error: BaseException | None = None

    def finish_within(self, timeout_s: float | None) -> None:
        """Finish the commit; raises StorageError after `timeout_s`, and the commit then never appears."""
        begin_timeout_s = BEGIN_TIMEOUT_S if timeout_s is None else min(BEGIN_TIMEOUT_S, timeout_s)
        # If the new thread finds no memory, the error below says so, not Python. It has none for a Python hook, either.
        report, sys.unraisablehook = sys.unraisablehook, callable
        try:
            _thread.start_new_thread(self._run, ())
            has_begun = self._begun.wait(begin_timeout_s)
        finally:
            sys.unraisablehook = report
        if has_begun:
            self._ended.wait(timeout_s)
        with self._lock:
            self._abandoned = not self._ended.is_set()
        if not has_begun:
            raise StorageError(
                f"{self.partial}: the thread that finishes the commit did not begin in {begin_timeout_s:g} s; this "
                "process may have no memory left: free some, and start the same command again"
            )
        if self._abandoned:
            raise StorageError(
                f"{self.partial} was not on the disk within trainer.call_timeout_s={timeout_s:g} s: storage "
                "is slow or does not respond"
            )
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        self._begun.set()
        try:
            _write_json(os.path.join(self.partial, MANIFEST), {"step": self.step, "files": _inventory(self.partial)})
            _sync_tree(self.partial)
            with self._lock:
                if not self._abandoned:
                    os.rename(self.partial, self.path)
                    fsync_path(os.path.dirname(self.path))
        except BaseException as error:  # raised in `finish_within`
            self._error = error
        self._ended.set()


def directory_bytes(path: str) -> int:
    """Return the bytes of the checkpoint at `path`, without its manifest."""
    return sum(entry["size"] for entry in read_json(os.path.join(path, MANIFEST))["files"].values())


def check_engine_state(directory: str, *, num_ranks: int) -> None:
    """Raise CheckpointError unless this machine sees the files of every rank in `directory`."""
    names = os.listdir(directory) if os.path.isdir(directory) else []
    found = [RANKS_FILE.fullmatch(name) or OWN_RANKS_FILE.fullmatch(name) for name in names]
    absent = set(range(num_ranks)) - {int(match[1]) for match in found if match}
    if absent or not has_engine_state(names):
        what = f"the state of ranks {sorted(absent)}" if absent else ENGINE_STATE
        raise CheckpointError(
            f"{directory} lacks {what}: workers on other machines wrote to disks of their own; "
            "set trainer.default_local_dir to a directory that all machines share"
        )


def has_engine_state(names: Iterable[str]) -> bool:
    """Return whether these are names of files that an engine has written."""
    return any(name == ENGINE_STATE or OWN_RANKS_FILE.fullmatch(name) for name in names)


def write_run_state(directory: str, state: dict, *, config_yaml: str) -> None:
    """Write the driver's part of a checkpoint: its JSON state, the settings, and the working directory.

    Relative paths in the settings refer to that working directory.
    """
    _write_json(os.path.join(directory, TRAINER_STATE), state | {WORKING_DIRECTORY: os.getcwd()})
    with open(os.path.join(directory, CONFIG), "w", encoding="utf-8") as f:
        f.write(config_yaml)


def read_json(path: str) -> dict[str, Any]:
    """Return the object in a JSON file.

    Raises:
        TypeError: It holds something else.
    """
    with open(path, encoding="utf-8") as f:
        content = json.load(f)
    if not isinstance(content, dict):
        raise TypeError(f"a {type(content).__name__}, not an object")
    return content


def _write_json(path: str, content: dict) -> None:
    with open(path, "w", encoding="utf-8") as f:
        json.dump(content, f, indent=1)


def _inventory(directory: str) -> dict[str, dict]:
    files = (os.path.join(folder, name) for folder, _, names in os.walk(directory) for name in names)
    return {
        os.path.relpath(f, directory): {"size": os.path.getsize(f), "sha256": file_sha256(f)} for f in sorted(files)
    }


def file_sha256(path: str) -> str:
    """Return the SHA-256 of a file, in hex."""
    with open(path, "rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def _sync_tree(directory: str) -> None:
    for folder, _, names in os.walk(directory, topdown=False):
        for name in names:
            fsync_path(os.path.join(folder, name))
        fsync_path(folder)


def newest_checkpoint(directory: str) -> str | None:
    """Return the path of the newest checkpoint in a run's directory, or None."""
    return CheckpointStore(directory).latest()
