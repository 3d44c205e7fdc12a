"""Distillation's part of a training step: which teacher scores which rows, and what it adds to the advantages.

The trainer calls these functions in the driver. The formulas are in `algos/distillation.py`; the loss is computed by
the workers (`workers/losses.py`).
"""

import functools
from typing import Any

import numpy as np
import torch

from hybridrl.algos.distillation import sampled_token_advantages
from hybridrl.algos.masked import masked_mean
from hybridrl.config import PPOConfig
from hybridrl.config.schema.distillation import DistillationConfig
from hybridrl.data_plane.futures import DataProtoFuture
from hybridrl.errors import ConfigError, DataError
from hybridrl.protocol import DataProto
from hybridrl.trainer.data.tokenizer import load_tokenizer
from hybridrl.trainer.ppo.columns import MODEL_INPUT
from hybridrl.trainer.ppo.update_batch import call_balanced, select_columns


def check_teachers(config: PPOConfig, tokenizer: Any) -> None:
    """Raise ConfigError unless every teacher reads the student's tokens. Called before anything starts.

    Args:
        config: Settings of the job.
        tokenizer: The student's.
    """
    if not config.distillation.enabled:
        return
    policy, vocabulary = config.actor_rollout_ref.model, tokenizer.get_vocab()
    for key, path in config.distillation.teachers().items():
        setting = f"distillation.teacher_models.{key}.model_path"
        theirs = load_tokenizer(path, key=setting, trust_remote_code=policy.trust_remote_code).get_vocab()
        if theirs == vocabulary:
            continue
        differing = next(token for token in (*vocabulary, *theirs) if theirs.get(token) != vocabulary.get(token))
        raise ConfigError(
            f"{setting}={path}: the teacher has another vocabulary than the student {policy.path} (for instance, the "
            f"token {differing!r} is {theirs.get(differing)} there and {vocabulary.get(differing)} here), so it cannot "
            "score the student's tokens; choose a teacher of the same model family"
        )


def submit_to_teachers(
    batch: DataProto,
    group: Any,
    config: DistillationConfig,
    *,
    num_ranks: int,
    balance: bool,
    share_prefixes: bool = False,
) -> list[DataProtoFuture]:
    """Return, per teacher that has any rows, the future of the columns that its workers compute; see `join_teachers`.

    Args:
        batch: Responses of the student.
        group: Worker group of the teachers; every process has all of them.
        config: Says which rows belong to which teacher.
        num_ranks: Data-parallel size of the teachers' engines.
        balance: Whether every rank gets about the same number of tokens.
        share_prefixes: Whether rows that begin alike are on one rank, see `call_balanced`.
    """
    data, options = select_columns(batch, MODEL_INPUT), {"balance": balance, "share_prefixes": share_prefixes}
    return [
        call_balanced(
            functools.partial(group.compute_teacher_log_prob.submit, teacher=teacher),
            data.select_idxs(rows),
            num_ranks=num_ranks,
            **options,
        )
        for teacher, rows in rows_of_teachers(batch, config).items()
    ]


def join_teachers(batch: DataProto, parts: list[DataProto], config: DistillationConfig) -> DataProto:
    """Return the results of `submit_to_teachers` in the row order of the batch."""
    if len(parts) == 1:
        return parts[0]
    result = DataProto.concat(parts)
    order = np.concatenate([*rows_of_teachers(batch, config).values()])
    result.reorder(torch.from_numpy(order).argsort())
    return result


def rows_of_teachers(batch: DataProto, config: DistillationConfig) -> dict[str, np.ndarray]:
    """Return the row numbers of each teacher that has any. A single teacher has all rows.

    Raises:
        DataError: A row names no teacher, or the data has no such column.
    """
    teachers = list(config.teachers())
    if len(teachers) == 1:
        return {teachers[0]: np.arange(len(batch))}
    column = batch.non_tensor_batch.get(config.teacher_key)
    if column is None:
        raise DataError(
            f"distillation.teacher_key={config.teacher_key}: the data has no such column, and it selects one of "
            f"{len(teachers)} teachers; set it to one of {', '.join(sorted(batch.non_tensor_batch))}"
        )
    keys = column.astype(str)
    if unknown := sorted({*keys} - {*teachers}):
        raise DataError(
            f"{config.teacher_key}={unknown[0]!r}: a row has no teacher; distillation.teacher_models has the keys "
            f"{', '.join(teachers)}"
        )
    return {teacher: rows for teacher in teachers if len(rows := np.flatnonzero(keys == teacher))}


def teacher_metrics(batch: DataProto) -> dict[str, float]:
    """Return `distillation/kl`, an estimate of the reverse KL.

    It is the mean of log s - log p over the sampled tokens.
    """
    columns = batch.batch
    mask_BT = columns["response_mask"]
    difference_BT = columns["old_log_probs"] - columns["teacher_log_prob"]
    return {
        "distillation/kl": float(masked_mean(difference_BT, mask_BT)),
        "distillation/teacher_log_prob": float(masked_mean(columns["teacher_log_prob"], mask_BT)),
    }


def add_teacher_advantages(batch: DataProto, config: DistillationConfig) -> dict[str, float]:
    """Add the weighted advantages of the sampled tokens under the teacher to the column `advantages`.

    Rows without a valid reward stay out. Returns the metric `distillation/advantages`.
    """
    columns, loss = batch.batch, config.distillation_loss
    added_BT = sampled_token_advantages(
        columns["old_log_probs"], columns["teacher_log_prob"], kind=loss.loss_mode, max_loss=loss.loss_max_clamp
    )
    counted_BT = columns["response_mask"].bool() & columns["reward_valid"][:, None]
    added_BT = torch.where(counted_BT, config.coefficient * added_BT, torch.zeros_like(added_BT))
    columns["advantages"] = columns["advantages"] + added_BT
    return {"distillation/advantages": float(masked_mean(added_BT, counted_BT))}


def add_no_scores(batch: DataProto) -> None:
    """Add scores of 0 and valid rewards to a batch that is not scored."""
    mask_BT = batch.batch["response_mask"]
    batch.batch["token_level_scores"] = torch.zeros(mask_BT.shape)
    batch.batch["reward_valid"] = torch.ones(len(mask_BT), dtype=torch.bool)


def add_no_advantages(batch: DataProto) -> None:
    """Add advantages and returns of 0."""
    zeros_BT = torch.zeros_like(batch.batch["token_level_rewards"])
    batch.batch["advantages"], batch.batch["returns"] = zeros_BT, zeros_BT.clone()
