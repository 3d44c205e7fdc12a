"""The prompts of each step: drawn in order, each with an id that its samples share and a seed of its own."""

import numpy as np

from hybridrl.protocol import DataProto
from hybridrl.trainer.prompt_loader import PromptLoader
from hybridrl.trainer.seeds import Purpose, row_seeds

ROW = "dataset_row"  # column: which row of the training data a prompt is


class StepPrompts:
    """Draws a batch for each step up to `total_steps`, in order. drawn: the last step that has its prompts."""

    def __init__(self, loader: PromptLoader, *, seed: int, total_steps: int):
        self.loader, self.seed, self.total_steps, self.drawn = loader, seed, total_steps, 0

    def draw(self, *, until: int) -> DataProto | None:
        """Return the prompts of the next step, with `step` and `epoch` in meta_info; None behind step `until` and at the end."""
        step, epoch = self.drawn + 1, self.loader.epoch
        if step > min(until, self.total_steps):
            return None
        batch = self.loader.next_batch()
        batch.meta_info = {"step": step, "epoch": epoch}
        identify(batch, seed=self.seed, purpose=Purpose.TRAIN_ROLLOUT, step=step)
        batch.non_tensor_batch[ROW] = np.array(self.loader.rows, dtype=object)
        self.drawn = step
        return batch


def identify(batch: DataProto, *, seed: int, purpose: Purpose, step: int) -> None:
    """Give every prompt an id that its samples share, and a seed that depends only on run, purpose, step and row."""
    batch.non_tensor_batch["uid"] = np.array([f"{step}-{i}" for i in range(len(batch))], dtype=object)
    batch.batch["seeds"] = row_seeds(len(batch), seed=seed, purpose=purpose, step=step)
