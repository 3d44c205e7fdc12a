"""Turn the data of a pass into rows for an engine, and outputs into arrays.

The training worker calls it. A datum of N tokens becomes a row of N + 1: an engine computes the log-prob of a response
token from the state before it, and here every token has targets. The last token is a filler that nothing reads.

Shapes: B rows, T longest datum, K most targets of a position.
"""

from collections.abc import Sequence

import numpy as np
import torch

from hybridrl.protocol import DataProto
from hybridrl.training_service.computation.losses import LOSSES, TARGETS
from hybridrl.training_service.wire import Datum
from hybridrl.workers.engine.base import TokenTerm

LOG_PROBS, TOP_IDS, TOP_LOG_PROBS = "target_log_probs", "top_ids", "top_log_probs"
ROW, TOP = "row", "top"


def target_log_probs(log_probs_CV: torch.Tensor, targets_CK: torch.Tensor) -> torch.Tensor:
    """Return the log-probs (C,K) of given tokens."""
    return log_probs_CV.gather(-1, targets_CK)


def top_ids(log_probs_CV: torch.Tensor, top_Ck: torch.Tensor) -> torch.Tensor:
    """Return the k most likely tokens (C,k).

    k is the width of a column whose values do not count.
    """
    return log_probs_CV.topk(top_Ck.size(-1), dim=-1).indices.float()


def top_log_probs(log_probs_CV: torch.Tensor, top_Ck: torch.Tensor) -> torch.Tensor:
    """Return their log-probs (C,k)."""
    return log_probs_CV.topk(top_Ck.size(-1), dim=-1).values


TERMS = {
    LOG_PROBS: TokenTerm(target_log_probs, (TARGETS,)),
    TOP_IDS: TokenTerm(top_ids, (TOP,)),
    TOP_LOG_PROBS: TokenTerm(top_log_probs, (TOP,)),
}


def rows_of(data: Sequence[Datum], loss_fn: str) -> DataProto:
    """Return the rows of data: tokens and masks, targets (B,T,K), and the inputs of the loss (B,T,K)."""
    B, T = len(data), max((len(datum.tokens) for datum in data), default=1)
    input_ids, attention_mask = torch.zeros(B, T + 1, dtype=torch.int64), torch.zeros(B, T + 1, dtype=torch.int64)
    for row, datum in enumerate(data):
        input_ids[row, : len(datum.tokens)] = torch.from_numpy(datum.tokens)
        attention_mask[row, : len(datum.tokens) + 1] = 1
    columns = {name: _column(data, name, T) for name in (TARGETS, *LOSSES[loss_fn].inputs)}
    tensors = {
        "input_ids": input_ids,
        "attention_mask": attention_mask,
        "response_mask": attention_mask[:, 1:].clone(),
        ROW: torch.arange(B),
        **columns,
    }
    return DataProto.from_dict(tensors=tensors)


def _column(data: Sequence[Datum], name: str, T: int) -> torch.Tensor:
    K = max((_targets(datum).shape[1] for datum in data), default=1)
    column = torch.zeros(len(data), T, K, dtype=torch.int64 if name == TARGETS else torch.float32)
    for row, datum in enumerate(data):
        shape = _targets(datum).shape
        values = datum.inputs.get(name)  # `weights` may be missing: each position counts once then
        array = np.ones(shape, np.float32) if values is None else values.reshape(shape)
        column[row, : shape[0], : shape[1]] = torch.from_numpy(np.ascontiguousarray(array))
    return column


def _targets(datum: Datum) -> np.ndarray:
    targets = datum.inputs[TARGETS]
    return targets if targets.ndim == 2 else targets[:, None]


def arrays_of(log_probs_BTK: torch.Tensor, data: Sequence[Datum]) -> list[np.ndarray]:
    """Return the log-probs of each datum in the shape of its targets."""
    found = []
    for row, datum in enumerate(data):
        N, K = _targets(datum).shape
        found.append(log_probs_BTK[row, :N, :K].numpy().reshape(datum.inputs[TARGETS].shape))
    return found


def metrics_of(losses: Sequence[float], data: Sequence[Datum]) -> dict[str, float]:
    """Return the metrics of a pass.

    Args:
        losses: Of each datum. The sum runs in their order, whatever ranks and micro-batches were.
        data: The data.
    """
    return {"loss:sum": sum(losses), "num_tokens:sum": float(sum(len(datum.tokens) for datum in data))}
