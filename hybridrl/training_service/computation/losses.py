"""The loss functions of Tinker's API: plain sums over positions, which the client normalizes.

The training worker calls them with the target log-probs of one micro-batch. Formulas are those of Tinker's document of
losses; `dro` is arXiv:2405.19107 and `gspo` arXiv:2507.18071. Not here: group advantages, means and penalties. These
are the client's.

Shapes: b rows, T positions, K targets of a position. All losses but `cross_entropy` have K = 1.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch

from hybridrl.errors import DataError
from hybridrl.training_service.wire import MAX_VALUES, Datum, Pass

CLIP = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}  # of the ratio itself
TARGETS = "target_tokens"
NOT_PUBLIC = {
    "stable_reinforce": "its formula is not public; use importance_sampling, ppo or cispo",
    "custom": "losses are not traced here; with custom_loss_server_side=false, which this server sends, the SDK "
    "computes a custom loss itself",
}

Columns = Mapping[str, torch.Tensor]
LossOfRows = Callable[[torch.Tensor, Columns, Mapping[str, float]], torch.Tensor]
"""fn(log_probs_bTK, columns, config) -> losses (b,T,K), to be summed."""


@dataclass(frozen=True)
class Loss:
    """A loss function: the inputs that it reads besides the targets, and its options with their defaults."""

    fn: LossOfRows
    inputs: tuple[str, ...]
    config: Mapping[str, float]


def cross_entropy(log_probs_bTK: torch.Tensor, columns: Columns, _: Mapping[str, float]) -> torch.Tensor:
    """Return -w log p, for weights of any sign.

    With -dL/dp as weights it carries the gradient of any loss L.
    """
    return -log_probs_bTK * columns["weights"]


def importance_sampling(log_probs_bTK: torch.Tensor, columns: Columns, _: Mapping[str, float]) -> torch.Tensor:
    """Return -(p/q) A."""
    return -_log_ratio(log_probs_bTK, columns).exp() * columns["advantages"]


def ppo(log_probs_bTK: torch.Tensor, columns: Columns, config: Mapping[str, float]) -> torch.Tensor:
    """Return -min(r A, clip(r) A) with r = p/q."""
    return _clipped(_log_ratio(log_probs_bTK, columns).exp(), columns["advantages"], config)


def cispo(log_probs_bTK: torch.Tensor, columns: Columns, config: Mapping[str, float]) -> torch.Tensor:
    """Return -sg(clip(r)) A log p with r = p/q (arXiv:2506.13585); sg stops the gradient."""
    ratio = _log_ratio(log_probs_bTK, columns).exp().detach()
    clipped = ratio.clamp(config["clip_low_threshold"], config["clip_high_threshold"])
    return -clipped * log_probs_bTK * columns["advantages"]


def dro(log_probs_bTK: torch.Tensor, columns: Columns, config: Mapping[str, float]) -> torch.Tensor:
    """Return -(A log p - beta/2 (log p - log q)^2)."""
    gap = log_probs_bTK - columns["logprobs"]
    counted = (columns["advantages"] != 0) | (columns["logprobs"] != 0)
    return -(log_probs_bTK * columns["advantages"] - config["beta"] / 2 * gap.square() * counted)


def gspo(log_probs_bTK: torch.Tensor, columns: Columns, config: Mapping[str, float]) -> torch.Tensor:
    """Return ppo with r_t = sg(s) p_t / sg(p_t).

    log s is the mean of log p - log q over `sequence_ratio_mask`.
    """
    mask = columns["sequence_ratio_mask"]
    gap = (log_probs_bTK - columns["logprobs"]).detach()
    mean = torch.where(mask != 0, gap, 0.0).sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1)
    ratio = (mean + log_probs_bTK - log_probs_bTK.detach()).exp()
    return _clipped(ratio, columns["advantages"], config)


def _log_ratio(log_probs: torch.Tensor, columns: Columns) -> torch.Tensor:
    """Return log p - log q, 0 where the advantage is 0: clients send no log-probs there."""
    return torch.where(columns["advantages"] != 0, log_probs - columns["logprobs"], 0.0)


def _clipped(ratio: torch.Tensor, advantages: torch.Tensor, config: Mapping[str, float]) -> torch.Tensor:
    clipped = ratio.clamp(config["clip_low_threshold"], config["clip_high_threshold"])
    return -torch.minimum(ratio * advantages, clipped * advantages)


POLICY = ("logprobs", "advantages")
LOSSES = {
    "cross_entropy": Loss(cross_entropy, ("weights",), {}),
    "importance_sampling": Loss(importance_sampling, POLICY, {}),
    "ppo": Loss(ppo, POLICY, CLIP),
    "cispo": Loss(cispo, POLICY, CLIP),
    "dro": Loss(dro, POLICY, {"beta": 0.05}),
    "gspo": Loss(gspo, (*POLICY, "sequence_ratio_mask"), CLIP),
}


def checked_config(request: Pass) -> dict[str, float]:
    """Return the options of a pass's loss. Raises DataError for an unknown loss or option."""
    if (loss := LOSSES.get(request.loss_fn)) is None:
        reason = NOT_PUBLIC.get(request.loss_fn, f"the losses are {', '.join(LOSSES)}")
        raise DataError(f"loss_fn={request.loss_fn!r} is not supported: {reason}")
    config = dict(loss.config)
    for name, value in request.config.items():
        if name not in config or not isinstance(value, int | float) or not np.isfinite(value):
            raise DataError(
                f"loss_fn_config[{name!r}]={value!r}: {request.loss_fn} reads {', '.join(config) or 'no options'}, "
                "which are finite numbers"
            )
        config[name] = float(value)
    return config


def check_data(request: Pass, *, vocabulary: int, max_length: int) -> None:
    """Raise DataError if a datum cannot be trained on.

    Its shape, its length, token ids or numbers that are not finite may be why.
    """
    if not request.data:
        raise DataError("data is empty; send at least one datum")
    for number, datum in enumerate(request.data):
        _check_datum(datum, f"data[{number}]", request.loss_fn, vocabulary=vocabulary, max_length=max_length)
    longest, shapes = max(len(datum.tokens) for datum in request.data), [d.inputs[TARGETS].shape for d in request.data]
    num_targets = max(shape[1] if len(shape) == 2 else 1 for shape in shapes)
    if (size := len(request.data) * longest * num_targets) > MAX_VALUES:
        raise DataError(
            f"data has {len(request.data)} sequences of up to {longest} tokens with {num_targets} targets each: filled "
            f"up, they have {size} values, of {MAX_VALUES}; send sequences of one length together, in several passes"
        )


def _check_datum(datum: Datum, what: str, loss_fn: str, *, vocabulary: int, max_length: int) -> None:
    length = len(datum.tokens)
    if not 1 <= length <= max_length:
        raise DataError(f"{what} has {length} tokens; send 1 to {max_length}, which the server's --max-length sets")
    check_tokens(datum.tokens, f"{what}.model_input", vocabulary)
    needed = (TARGETS, *LOSSES[loss_fn].inputs)
    if missing := [name for name in needed if name not in datum.inputs and name != "weights"]:
        raise DataError(f"{what}.loss_fn_inputs lacks {', '.join(missing)}; {loss_fn} reads {', '.join(needed)}")
    shape = datum.inputs[TARGETS].shape
    check_tokens(datum.inputs[TARGETS], f"{what}.{TARGETS}", vocabulary)
    if len(shape) > (2 if loss_fn == "cross_entropy" else 1) or shape[:1] != (length,) or 0 in shape:
        raise DataError(f"{what}.{TARGETS} has the shape {list(shape)}, and the input has {length} tokens")
    for name in (name for name in needed[1:] if name in datum.inputs):
        values = datum.inputs[name]
        if values.shape != shape:
            raise DataError(f"{what}.{name} has the shape {list(values.shape)}, and {TARGETS} has {list(shape)}")
        if not np.isfinite(values).all():
            raise DataError(f"{what}.{name} has a value that is not finite; a step with it would be lost")


def check_tokens(tokens: np.ndarray, what: str, vocabulary: int) -> None:
    """Raise DataError for a token that the model does not have."""
    if tokens.dtype.kind != "i":
        raise DataError(f"{what} has the dtype {tokens.dtype}; token ids are int64")
    if tokens.size and not 0 <= tokens.min() <= tokens.max() < vocabulary:
        worst = int(tokens.max() if tokens.max() >= vocabulary else tokens.min())
        raise DataError(f"{what} has the token {worst}; the model has {vocabulary}, from 0")
