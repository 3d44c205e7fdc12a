"""`SFTTrainer`: the driver of supervised fine-tuning, as a list of stages.

    next_batch -> update -> validate -> log -> save_checkpoint

`main_sft` creates it. What it shares with other trainers of one model is in `trainer/supervised/trainer.py`.
"""

import math
from collections.abc import Collection, Mapping

from hybridrl.config import SFTConfig
from hybridrl.framework.stage import Stage
from hybridrl.trainer.data.prompt_loader import PromptLoader
from hybridrl.trainer.sft.dataset import SFTDataset
from hybridrl.trainer.supervised.trainer import MODEL_INPUT, SupervisedTrainer

ROLE = "sft"


class SFTTrainer(SupervisedTrainer):
    """The driver of supervised fine-tuning; arguments as for `SupervisedTrainer`."""

    role = ROLE
    engine_directories: Mapping[str, str] = {ROLE: "model"}

    def load_dataset(self, config: SFTConfig, files: list[str], tokenizer: object) -> SFTDataset:
        """Return the tokenized conversations of `files`."""
        return SFTDataset(files, tokenizer, config.data)

    @classmethod
    def step(cls, config: SFTConfig, roles: Collection[str]) -> list[Stage]:
        """Return the stages of a step in order."""
        return [
            # 1. Conversations.
            Stage(cls.next_batch, writes=MODEL_INPUT, pure=False),
            # 2. One optimizer step on the assistant's tokens.
            Stage(cls.update, role=ROLE, reads=MODEL_INPUT, pure=False),
            # 3. Outputs.
            Stage(cls.validate, "testing", ROLE),
            Stage(cls.log, pure=False),
            Stage(cls.save_checkpoint, pure=False),
        ]

    def validation_metrics(self, loader: PromptLoader) -> dict[str, float]:
        """Return the mean negative log-likelihood of the assistant's tokens."""
        sums = [self.groups[ROLE].compute_loss(loader.next_batch())[0] for _ in range(loader.steps_per_epoch)]
        return {"loss": math.fsum(total for total, _ in sums) / math.fsum(count for _, count in sums)}
