"""Distillation in the workers: what they compute besides log-probs, and the divergence of student and teacher.

The formulas are in `algos/distillation.py`. `ActorRolloutRefWorker` and the loss of the policy use it, in the worker
process.
"""

from functools import partial

import torch

from hybridrl.algos.distillation import DIVERGENCES, limited, sampled_token_loss, top_ids, top_log_probs
from hybridrl.config.schema.distillation import FULL_MODES, DistillationConfig
from hybridrl.protocol import DataProto
from hybridrl.workers.engine.base import TokenTerm

DIVERGENCE = "divergence"
"""Output of the student: its divergence from the teacher.

It needs the log-probs of more than the sampled token.
"""


def student_terms(config: DistillationConfig) -> dict[str, TokenTerm]:
    """Return what the student computes besides log-probs: nothing if the sampled token suffices."""
    loss = config.distillation_loss
    if not config.in_loss or config.samples_only:
        return {}
    fn = partial(DIVERGENCES[loss.loss_mode], min_log_prob=loss.log_prob_min_clamp)
    whole = loss.loss_mode in FULL_MODES
    return {
        DIVERGENCE: TokenTerm(fn, ("teacher_all_log_probs",) if whole else ("teacher_top_ids", "teacher_top_log_probs"))
    }


def teacher_terms(config: DistillationConfig, *, num_tokens: int) -> dict[str, TokenTerm]:
    """Return what a teacher computes besides log-probs, by the name of the column.

    Args:
        config: Chooses the divergence.
        num_tokens: Size of the student's output. A teacher's further outputs, which are padding, are never among the
            top tokens.
    """
    if config.samples_only:
        return {}
    if config.distillation_loss.loss_mode in FULL_MODES:
        return {"teacher_all_log_probs": TokenTerm(lambda log_probs_CV: log_probs_CV)}
    k = config.distillation_loss.topk

    def ids(log_probs_CV: torch.Tensor) -> torch.Tensor:
        return top_ids(log_probs_CV[:, :num_tokens], k)

    return {
        "teacher_top_ids": TokenTerm(ids),
        "teacher_top_log_probs": TokenTerm(lambda log_probs_CV: top_log_probs(log_probs_CV, ids(log_probs_CV))),
    }


def divergence_losses(config: DistillationConfig, outputs: dict[str, torch.Tensor], rows: DataProto) -> torch.Tensor:
    """Return the divergence (b, R) of the student from the teacher as configured."""
    loss = config.distillation_loss
    if DIVERGENCE in outputs:
        return limited(outputs[DIVERGENCE], loss.loss_max_clamp)
    teacher_BT = rows.batch["teacher_log_prob"]
    return sampled_token_loss(outputs["log_probs"], teacher_BT, kind=loss.loss_mode, max_loss=loss.loss_max_clamp)
