"""`DPOTrainer` and `RMTrainer`: the drivers of preference learning and of reward-model training, as lists of stages.

    DPOTrainer   next_batch -> reference [-> kto_baseline] -> update -> validate -> log -> save_checkpoint
    RMTrainer    next_batch -> update -> validate -> log -> save_checkpoint

`main_dpo` and `main_rm` create them. A preference loss is a setting (`loss.loss_type`), not a trainer. What they share
with other trainers of one model is in `trainer.py`.
"""

import math
from collections.abc import Collection, Mapping
from typing import Any

import torch

from hybridrl.algos.partition.row_images import IMAGE_INPUTS, images_of
from hybridrl.algos.preference_losses import PREFERENCE_LOSSES, PreferenceLoss, kto_baseline
from hybridrl.config import DPOConfig, RMConfig
from hybridrl.framework.stage import Stage
from hybridrl.protocol import DataProto
from hybridrl.trainer.data.prompt_loader import PromptLoader
from hybridrl.trainer.data.sequences import collate_sequences
from hybridrl.trainer.run.metrics import mean_metrics
from hybridrl.trainer.run.middleware import BatchContext
from hybridrl.trainer.supervised.preference_data import LabelDataset, PairDataset, PreferenceDataset
from hybridrl.trainer.supervised.supervised_trainer import MODEL_INPUT, SupervisedTrainer

REFERENCE = "ref_sequence_log_probs"
BASELINE = "kto_baseline"


class PairTrainer(SupervisedTrainer):
    """What both drivers share: validation, and means over comparisons."""

    def prepare(self, batch: DataProto) -> None:
        """Add the columns that the loss needs besides those of the data."""

    def finish(self, metrics: Mapping[str, float], batch: DataProto) -> dict[str, float]:
        """Return the metrics of a batch as they are logged."""
        return dict(metrics)

    def validation_metrics(self, loader: PromptLoader) -> dict[str, float]:
        """Return the loss and its statistics, averaged over the comparisons of the validation data."""
        found: list[dict[str, float]] = []
        sizes: list[int] = []
        for _ in range(loader.steps_per_epoch):
            batch = loader.next_batch()
            self.prepare(batch)
            metrics = self.groups[self.role].evaluate(batch).meta_info["metrics"]
            found.append(self.finish(mean_metrics(metrics), batch))
            sizes.append(len(loader.rows))
        return _weighted_means(found, sizes)


class DPOTrainer(PairTrainer):
    """The driver of preference learning; arguments as for `SupervisedTrainer`."""

    role = "dpo"

    @staticmethod
    def loss_of(config: DPOConfig) -> PreferenceLoss:
        """Return the configured loss."""
        return PREFERENCE_LOSSES.lookup(config.loss.loss_type)

    def load_dataset(
        self, config: DPOConfig, files: list[str], tokenizer: Any, *, max_samples: int = -1
    ) -> PreferenceDataset:
        """Return the tokenized pairs of `files`, or the labelled responses for a loss without pairs."""
        kind = PairDataset if self.loss_of(config).is_paired else LabelDataset
        return kind(files, tokenizer, config.data, max_samples=max_samples, processor=self.processor)

    @classmethod
    def step(cls, config: DPOConfig, roles: Collection[str]) -> list[Stage]:
        """Return the stages of a step in order."""
        loss = cls.loss_of(config)
        columns = (*MODEL_INPUT, "preferred", *(["pair"] if loss.is_paired else []))
        added = (*([REFERENCE] if loss.needs_reference else []), *([] if loss.is_paired else [BASELINE]))
        return [
            # 1. Preferences.
            Stage(cls.next_batch, writes=columns, pure=False),
            # 2. What the loss compares with, before the update.
            Stage(cls.reference, role=cls.role, reads=MODEL_INPUT, writes=(REFERENCE,)).when(loss.needs_reference),
            Stage(cls.kto_baseline, role=cls.role, reads=MODEL_INPUT, writes=(BASELINE,)).when(not loss.is_paired),
            # 3. One optimizer step.
            Stage(cls.update, role=cls.role, reads=(*columns, *added), pure=False),
            # 4. Outputs.
            Stage(cls.validate, "testing", cls.role),
            Stage(cls.log, pure=False),
            Stage(cls.save_checkpoint, pure=False),
        ]

    def reference(self, ctx: BatchContext) -> None:
        """Compute the reference policy's log-probs of the responses."""
        self._add_reference(ctx.batch)

    def kto_baseline(self, ctx: BatchContext) -> None:
        """Estimate the KL divergence to the reference policy on mismatched rows."""
        self._add_baseline(ctx.batch)

    def update(self, ctx: BatchContext) -> None:
        """Take one optimizer step on the batch."""
        super().update(ctx)
        ctx.metrics |= self.finish(ctx.metrics, ctx.batch)

    def prepare(self, batch: DataProto) -> None:
        """Add the reference's log-probs, and the baseline of KTO."""
        loss = self.loss_of(self.config)
        if loss.needs_reference:
            self._add_reference(batch)
        if not loss.is_paired:
            self._add_baseline(batch)

    def finish(self, metrics: Mapping[str, float], batch: DataProto) -> dict[str, float]:
        """Return the metrics; without pairs, those of one kind of response as means over this kind."""
        found = dict(metrics)
        if self.loss_of(self.config).is_paired:
            return found
        share = float(batch.batch["preferred"].double().mean())
        for kind, part in (("chosen", share), ("rejected", 1 - share)):
            for name in (f"rewards/{kind}", f"logps/{kind}"):
                found[name] = found[name] / part if part else math.nan
        found["rewards/margins"] = found["rewards/chosen"] - found["rewards/rejected"]
        return found | {"kl": float(batch.batch[BASELINE][0])}

    def _add_reference(self, batch: DataProto) -> None:
        batch.batch[REFERENCE] = self.groups[self.role].compute_ref_log_prob(batch).batch[REFERENCE]

    def _add_baseline(self, batch: DataProto) -> None:
        mismatched = mismatched_rows(batch, max_length=self.config.data.max_length)
        baseline = kto_baseline(self.groups[self.role].compute_scores(mismatched).batch["scores"])
        batch.batch[BASELINE] = torch.full((len(batch),), baseline)


class RMTrainer(PairTrainer):
    """The driver of reward-model training; arguments as for `SupervisedTrainer`."""

    role = "rm"
    outputs = 1

    def load_dataset(self, config: RMConfig, files: list[str], tokenizer: Any, *, max_samples: int = -1) -> PairDataset:
        """Return the tokenized pairs of `files`."""
        return PairDataset(files, tokenizer, config.data, max_samples=max_samples)

    @classmethod
    def step(cls, config: RMConfig, roles: Collection[str]) -> list[Stage]:
        """Return the stages of a step in order."""
        columns = (*MODEL_INPUT, "pair", "preferred", *(["margin"] if config.data.margin_key else []))
        return [
            # 1. Pairs.
            Stage(cls.next_batch, writes=columns, pure=False),
            # 2. One optimizer step.
            Stage(cls.update, role=cls.role, reads=columns, pure=False),
            # 3. Outputs.
            Stage(cls.validate, "testing", cls.role),
            Stage(cls.log, pure=False),
            Stage(cls.save_checkpoint, pure=False),
        ]


def mismatched_rows(batch: DataProto, *, max_length: int) -> DataProto:
    """Return a batch with each prompt and the response of the next row that has another prompt.

    After the last row comes the first one. Where all prompts are equal, the next row's is taken.

    Args:
        batch: A batch of `LabelDataset`, padded on the right.
        max_length: A response is cut so that no sequence is longer.
    """
    ids, lengths = batch.batch["input_ids"], batch.batch["attention_mask"].sum(-1).tolist()
    prompt_lengths = [n - m for n, m in zip(lengths, batch.batch["response_mask"].sum(-1).tolist(), strict=True)]
    images, sequences = images_of(batch), []
    prompts = [tuple(tokens[:length]) for tokens, length in zip(ids.tolist(), prompt_lengths, strict=True)]
    for row, prompt_length in enumerate(prompt_lengths):
        others = [(row + 1 + place) % len(batch) for place in range(len(batch))]
        other = next((other for other in others if prompts[other] != prompts[row]), others[0])
        response = ids[other, prompt_lengths[other] : lengths[other]][: max_length - prompt_length]
        mask = torch.tensor([0] * prompt_length + [1] * len(response))
        own = {} if images is None else {IMAGE_INPUTS: images[row]}
        sequences.append({"input_ids": torch.cat([ids[row, :prompt_length], response]), "loss_mask": mask, **own})
    return collate_sequences(sequences, 0)


def _weighted_means(rows: list[dict[str, float]], weights: list[int]) -> dict[str, float]:
    """Return the weighted mean of every name, over the rows where it is a number."""
    means = {}
    for name in rows[0]:
        known = [(row[name], weight) for row, weight in zip(rows, weights, strict=True) if not math.isnan(row[name])]
        total = sum(weight for _, weight in known)
        means[name] = math.fsum(value * weight for value, weight in known) / total if total else math.nan
    return means
