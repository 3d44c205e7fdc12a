"""`Saver`: when a run's checkpoints are written, and what happens when storage does not take one
(`trainer.save_failure`).
"""

import glob
import logging
import os
import shutil
from collections.abc import Callable

from hybridrl.config.schema.trainer import TrainerConfig
from hybridrl.config.schema.workers import ModelConfig
from hybridrl.errors import CallTimeout, StorageError
from hybridrl.trainer.checkpoint.store import CheckpointStore, size_of

logger = logging.getLogger(__name__)
WAY_OUT = "free space there, set trainer.max_ckpt_to_keep, or set trainer.default_local_dir to another disk"
ADAM_COPIES = 3  # parameters and two moments of each, all as wide as the parameters


class Saver:
    """Commits to a `CheckpointStore`.

    committed: the newest commit that this run made or goes on from. least_bytes: what a checkpoint takes at least, as
    long as none has been made that shows what it takes.
    """

    def __init__(self, store: CheckpointStore, config: TrainerConfig, *, least_bytes: int = 0):
        self.store, self.config, self.least_bytes = store, config, least_bytes
        self.committed: str | None = None
        self.num_failed = 0

    def metrics(self) -> dict[str, float]:
        """Return how many saves have failed, if any has."""
        return {"checkpoint/num_failed": float(self.num_failed)} if self.num_failed else {}

    def save(self, step: int, write: Callable[[str], None], *, must: bool) -> None:
        """Commit `step` from what `write(directory)` writes.

        Where storage does not take it, and the policy is to continue, one line says so and the run trains on. must:
        there is no later save, so the failure is raised (StorageError, CallTimeout).
        """
        try:
            self._look_at_space()
            self.committed = self.store.commit(step, write, seal_s=self.config.call_timeout_s)
            logger.info("committed %s", self.committed)
        except (StorageError, CallTimeout) as error:
            self.num_failed += 1
            if must or self.config.save_failure == "stop":
                error.add_note(f"{self._what_is_there()}; {WAY_OUT}")
                raise
            logger.warning(
                "no checkpoint of step %d: %s; %s; training goes on, and the next save tries again",
                step,
                error,
                self._what_is_there(),
            )

    def _what_is_there(self) -> str:
        newest = self.store.latest()
        return "nothing is committed yet" if newest is None else f"{newest} is committed as before"

    def _look_at_space(self) -> None:
        """Raise StorageError before anything is written if there is less space than the newest commit takes."""
        newest = self.store.latest()
        needed = self.least_bytes if newest is None else size_of(newest)
        try:
            os.makedirs(self.store.root, exist_ok=True)
            free = shutil.disk_usage(self.store.root).free
        except OSError as error:
            raise StorageError(f"cannot write {self.store.root}: {error}") from error
        if free < needed:
            which = "at least" if newest is None else f"as {os.path.basename(newest)} does"
            raise StorageError(
                f"a checkpoint takes {_readable(needed)} {which}, and {self.store.root} has "
                f"{_readable(free)} free; nothing was written"
            )


def least_bytes(model: ModelConfig) -> int:
    """Return what a checkpoint of this model takes at least: its weights' files, and with an optimizer for all of them
    twice that more.
    """
    files = glob.glob(os.path.join(glob.escape(model.path or ""), "*.safetensors"))
    return sum(map(os.path.getsize, files)) * (1 if model.lora_rank else ADAM_COPIES)


def _readable(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.2f} GB" if num_bytes >= 1e8 else f"{num_bytes / 1e6:.2f} MB"
