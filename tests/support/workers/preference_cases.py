"""Preference learning on any engine: the same pairs, every loss, a few steps. Imports no engine.

Not a test file.
"""

from collections.abc import Callable

import torch

from hybridrl.config.schema.preference import PreferenceLossConfig
from hybridrl.protocol import DataProto
from hybridrl.workers.engine.base import Engine, MicroBatching
from hybridrl.workers.losses import GlobalCounts
from hybridrl.workers.preference import preference_loss, reward_loss
from tests.support.workers.engine_cases import make_batch, num_response_tokens

LOSSES = ("dpo", "ipo", "kto", "orpo", "simpo")
REWARD = "reward model"
STEPS = 3
MICRO = MicroBatching(max_rows=6)


def preference_rows() -> DataProto:
    """Return 12 pairs, with the columns that any of the losses reads."""
    batch = make_batch()
    draw = torch.Generator().manual_seed(7)
    batch.batch["pair"] = torch.arange(12).repeat_interleave(2)
    batch.batch["preferred"] = torch.tensor([1, 0, 0, 1] * 6)
    batch.batch["ref_sequence_log_probs"] = -4 * batch.batch["response_mask"].sum(-1) + torch.randn(24, generator=draw)
    batch.batch["kto_baseline"] = torch.full((24,), 0.3)
    return batch


def learn(make: Callable[..., Engine], folder: str, name: str) -> dict:
    """Train a policy with a loss, or a reward model, and return losses, gradient norms, and the weights.

    Args:
        make: Called with the model's path and `kind`; returns an engine that is set up.
        folder: Path of the model.
        name: One of `LOSSES`, or `REWARD`.
    """
    rows = preference_rows()
    counts = GlobalCounts(num_tokens=num_response_tokens(rows), num_seqs=len(rows))
    if name == REWARD:
        engine, outputs, loss_fn = make(folder, kind="score"), ("scores",), reward_loss(counts)
    else:
        config = PreferenceLossConfig(loss_type=name)
        engine, outputs, loss_fn = make(folder, kind="causal_lm"), ("log_probs",), preference_loss(config)(counts)
    losses, norms = [], []
    for _ in range(STEPS):
        reports = engine.forward_backward(rows, MICRO, loss_fn, outputs=outputs)
        losses.append(sum(stats["loss"] for stats in reports))
        norms.append(engine.optimizer_step()["grad_norm"])
    weights = {name: tensor.clone() for name, tensor in engine.weights()}
    return {"losses": losses, "norms": norms, "weights": weights}
