"""Save checkpoints of a run, and handle storage that does not accept one (`trainer.save_failure`).

Used by the PPO and SFT trainers, in the driver. What is inside a checkpoint is the trainer's business, its format
`store.py`'s.
"""

import glob
import logging
import os
import shutil
from collections.abc import Callable

from hybridrl.config.schema.trainer import TrainerConfig
from hybridrl.config.schema.workers import ModelConfig
from hybridrl.errors import CallTimeout, StorageError
from hybridrl.trainer.checkpoint.store import CheckpointStore, directory_bytes

logger = logging.getLogger(__name__)
HINT = "free space there, set trainer.max_ckpt_to_keep, or set trainer.default_local_dir to another disk"
ADAM_COPIES = 3  # parameters and two Adam moments, all of the same dtype


class CheckpointSaver:
    """Saves checkpoints to a `CheckpointStore`.

    Args:
        store: Where to save.
        config: `trainer.*` settings.
        min_checkpoint_bytes: Lower bound of a checkpoint's size, used until a first one shows the real size.

    Attributes:
        committed: Path of the newest checkpoint that this run made or resumed from.
        num_failed: Saves that failed.
    """

    def __init__(self, store: CheckpointStore, config: TrainerConfig, *, min_checkpoint_bytes: int = 0):
        self.store, self.config, self.min_checkpoint_bytes = store, config, min_checkpoint_bytes
        self.committed: str | None = None
        self.num_failed = 0
        self._overdue = -1  # step whose save a process did not answer

    def metrics(self) -> dict[str, float]:
        """Return the number of failed saves, if any."""
        return {"checkpoint/num_failed": float(self.num_failed)} if self.num_failed else {}

    def save(self, step: int, write: Callable[[str], None], *, required: bool, retries: bool = False) -> None:
        """Commit `step` from what `write(directory)` writes.

        If storage fails and `trainer.save_failure=continue`, the failure is logged and the run trains on.

        Args:
            step: Completed step.
            write: Writes the checkpoint's files into an empty directory.
            required: No later save follows, so a failure is always raised.
            retries: Whether the caller replaces processes that do not answer, and calls again. The second call gives up
                if it may: slow storage would only keep the new processes waiting, too.

        Raises:
            StorageError: The save failed, and `required` or `trainer.save_failure=stop`.
            CallTimeout: The same; or a process did not answer, and `retries`.
        """
        may_fail = not required and self.config.save_failure == "continue"
        if may_fail and self._overdue == step:
            return self._give_up(step, "processes that did not answer were replaced")
        try:
            self._check_free_space()
            self.committed = self.store.commit(step, write, finish_timeout_s=self.config.call_timeout_s)
            logger.info("committed %s", self.committed)
        except (StorageError, CallTimeout) as error:
            if retries and isinstance(error, CallTimeout) and error.role and self._overdue != step:
                self._overdue = step
                raise
            if not may_fail:
                self.num_failed += 1
                error.add_note(f"{self._describe_newest()}; {HINT}")
                raise
            self._give_up(step, str(error))

    def _give_up(self, step: int, reason: str) -> None:
        self.num_failed += 1
        logger.warning(
            "no checkpoint of step %d: %s; %s; training continues, and the next save tries again",
            step,
            reason,
            self._describe_newest(),
        )

    def _describe_newest(self) -> str:
        newest = self.store.latest()
        return "nothing is committed yet" if newest is None else f"{newest} is still committed"

    def _check_free_space(self) -> None:
        """Raise StorageError if less space is free than the newest checkpoint takes."""
        newest = self.store.latest()
        needed = self.min_checkpoint_bytes if newest is None else directory_bytes(newest)
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


def min_checkpoint_bytes(model: ModelConfig) -> int:
    """Return a lower bound of the checkpoint size in bytes.

    It is the size of the model's weight files.

    The bound is `ADAM_COPIES` times the files; once the files with LoRA, where the optimizer covers only the adapters.
    """
    files = glob.glob(os.path.join(glob.escape(model.path or ""), "*.safetensors"))
    return sum(map(os.path.getsize, files)) * (1 if model.uses_lora else ADAM_COPIES)


def _readable(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.2f} GB" if num_bytes >= 1e8 else f"{num_bytes / 1e6:.2f} MB"
