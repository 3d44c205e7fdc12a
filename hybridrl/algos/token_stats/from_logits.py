"""Log-probs of given tokens, entropy and sum of squared probabilities, from logits.

Shape letters: N tokens (rows already flattened), V vocabulary. With a vocabulary of 150 000, float32 copies of the
logits would be the largest tensors of a training step. Here only one chunk of tokens at a time is converted to float32,
forward and backward. Only the logits, their gradient in their own dtype, and a few numbers per token are stored. Logits
sharded over ranks by vocabulary (tensor parallelism) are not handled here. Second derivatives are not defined.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from hybridrl.algos.token_stats.from_states import MIN_LOG_PROB, TokenStats
from hybridrl.errors import DataError

CPU_CHUNK_ELEMENTS = 2**18
"""Logits converted at a time on a CPU: 1 MiB of float32 stays in its cache."""
DEVICE_CHUNK_ELEMENTS = 2**26
"""Logits converted at a time elsewhere: 256 MiB of float32, enough to hide the launch overhead."""


def log_probs_and_entropy(
    logits_NV: torch.Tensor,
    labels_N: torch.Tensor,
    *,
    temperature: float = 1.0,
    with_entropy: bool = False,
    chunk: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return (log_probs_N, entropy_N or None) of softmax(logits / temperature), float32, differentiable.

    With z = logits / temperature:

        log_probs_n = z_{n, label_n} - logsumexp_v z_nv        entropy_n = -sum_v p_nv log p_nv

    All arithmetic is float32, whatever the logits' dtype. Logits of -inf are impossible tokens: p log p is 0 there.

    Args:
        labels_N: int64 in [0, V).
        chunk: Tokens converted at a time. None chooses it by the device.

    Raises:
        DataError: Shapes do not fit.
        ValueError: The temperature is not above 0.
    """
    found = token_stats(logits_NV, labels_N, temperature=temperature, with_entropy=with_entropy, chunk=chunk)
    return found.log_probs_N, found.entropy_N


def token_stats(
    logits_NV: torch.Tensor,
    labels_N: torch.Tensor,
    *,
    temperature: float = 1.0,
    with_entropy: bool = False,
    with_sum_pi_squared: bool = False,
    chunk: int | None = None,
) -> TokenStats:
    """Return the numbers of `log_probs_and_entropy`, and the sum of squared probabilities, in one pass."""
    if logits_NV.ndim != 2 or labels_N.shape != logits_NV.shape[:1]:
        raise DataError(
            f"logits must be (N, V) and labels (N,), and are {tuple(logits_NV.shape)} and {tuple(labels_N.shape)}"
        )
    if temperature <= 0:
        raise ValueError(f"temperature={temperature} must be above 0; use 1 for greedy decoding")
    rows = chunk or _rows_per_chunk(logits_NV)
    return TokenStats(*_TokenStats.apply(logits_NV, labels_N, temperature, with_entropy, with_sum_pi_squared, rows))


TokenFn = Callable[..., torch.Tensor]
"""fn(log_probs_CV, *columns) -> (C, ...): anything of C tokens; differentiable in log_probs_CV if it is trained on."""


def of_log_probs(
    logits_NV: torch.Tensor,
    fn: TokenFn,
    columns: Sequence[torch.Tensor] = (),
    *,
    temperature: float = 1.0,
    chunk: int | None = None,
) -> torch.Tensor:
    """Return fn(log_softmax(logits / temperature), *columns), (N, ...), float32, differentiable in the logits.

    The log-probs exist for one chunk of tokens at a time. The backward pass computes them, and `fn`, again.

    Args:
        fn: Treats every token alone. Called with the log-probs (C, V) of a chunk and its rows of the columns.
        columns: (N, ...), without gradient.
        chunk: Tokens converted at a time. None chooses it by the device.
    """
    return _OfLogProbs.apply(logits_NV, fn, temperature, chunk or _rows_per_chunk(logits_NV), *columns)


class _OfLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits_NV: torch.Tensor, fn: TokenFn, temperature: float, rows: int, *columns: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(logits_NV, *columns)
        ctx.fn, ctx.temperature, ctx.rows = fn, temperature, rows
        parts = _parts(len(logits_NV), rows) or [slice(0, 0)]
        return torch.cat(
            [
                fn(
                    _to_float32(logits_NV[part], temperature).log_softmax(dim=-1), *(column[part] for column in columns)
                ).float()
                for part in parts
            ]
        )

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        logits_NV, *columns = ctx.saved_tensors
        grad_logits_NV = torch.empty_like(logits_NV)
        for part in _parts(len(logits_NV), ctx.rows):
            with torch.enable_grad():
                scaled_CV = _to_float32(logits_NV[part], ctx.temperature).requires_grad_()
                values = ctx.fn(scaled_CV.log_softmax(dim=-1), *(column[part] for column in columns))
            [grad_CV] = torch.autograd.grad(values, scaled_CV, gradient[part].to(values.dtype))
            grad_logits_NV[part] = grad_CV.div_(ctx.temperature)
        return grad_logits_NV, None, None, None, *[None] * len(columns)


class _TokenStats(torch.autograd.Function):
    """Log-probs and entropy, forward and backward one chunk of tokens at a time.

    With g, h the gradients of log-prob and entropy H, and p = softmax(z):

        dL/dz_v = g (1[v = label] - p_v) - h p_v (log p_v + H)
    """

    @staticmethod
    def forward(
        ctx: Any,
        logits_NV: torch.Tensor,
        labels_N: torch.Tensor,
        temperature: float,
        with_entropy: bool,
        with_sum_pi_squared: bool,
        rows: int,
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        logsumexp_N = torch.empty(len(labels_N), dtype=torch.float32, device=logits_NV.device)
        log_probs_N = torch.empty_like(logsumexp_N)
        entropy_N = torch.empty_like(logsumexp_N) if with_entropy else None
        squares_N = torch.empty_like(logsumexp_N) if with_sum_pi_squared else None
        for part in _parts(len(labels_N), rows):
            scaled_CV = _to_float32(logits_NV[part], temperature)
            logsumexp_N[part] = torch.logsumexp(scaled_CV, dim=-1)
            log_probs_CV = scaled_CV.sub_(logsumexp_N[part, None])
            log_probs_N[part] = log_probs_CV.gather(1, labels_N[part, None]).squeeze(1)
            if entropy_N is not None:
                entropy_N[part] = -(log_probs_CV.exp() * _finite(log_probs_CV)).sum(dim=-1)
            if squares_N is not None:
                squares_N[part] = log_probs_CV.mul_(2).exp_().sum(dim=-1)
        if squares_N is not None:
            ctx.mark_non_differentiable(squares_N)
        ctx.save_for_backward(logits_NV, labels_N, logsumexp_N, entropy_N)
        ctx.temperature, ctx.rows = temperature, rows
        ctx.set_materialize_grads(False)  # an entropy that is only reported costs nothing here
        return log_probs_N, entropy_N, squares_N

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_log_probs_N: torch.Tensor | None, grad_entropy_N: torch.Tensor | None, _grad_squares_N: Any
    ) -> tuple[torch.Tensor | None, ...]:
        logits_NV, labels_N, logsumexp_N, entropy_N = ctx.saved_tensors
        if grad_log_probs_N is None:
            grad_log_probs_N = torch.zeros_like(logsumexp_N)
        grad_logits_NV = torch.empty_like(logits_NV)
        for part in _parts(len(labels_N), ctx.rows):
            log_probs_CV = _to_float32(logits_NV[part], ctx.temperature).sub_(logsumexp_N[part, None])
            factor_CV = log_probs_CV.exp()
            if entropy_N is None or grad_entropy_N is None:
                grad_CV = factor_CV.mul_(-grad_log_probs_N[part, None])
            else:
                weight_CV = _finite(log_probs_CV).add_(entropy_N[part, None]).mul_(grad_entropy_N[part, None])
                grad_CV = factor_CV.mul_(weight_CV.add_(grad_log_probs_N[part, None]).neg_())
            labels_C1 = labels_N[part, None]
            grad_CV.scatter_(1, labels_C1, grad_CV.gather(1, labels_C1) + grad_log_probs_N[part, None])
            grad_logits_NV[part] = grad_CV.div_(ctx.temperature)
        return grad_logits_NV, None, None, None, None, None


def _rows_per_chunk(logits_NV: torch.Tensor) -> int:
    elements = CPU_CHUNK_ELEMENTS if logits_NV.device.type == "cpu" else DEVICE_CHUNK_ELEMENTS
    return max(1, elements // max(1, logits_NV.shape[1]))


def _parts(num_tokens: int, rows: int) -> list[slice]:
    return [slice(start, min(start + rows, num_tokens)) for start in range(0, num_tokens, rows)]


def _to_float32(logits_CV: torch.Tensor, temperature: float) -> torch.Tensor:
    """Return logits / temperature as a new float32 tensor, which the caller may overwrite."""
    return logits_CV.to(torch.float32, copy=True).div_(temperature)


def _finite(log_probs_CV: torch.Tensor) -> torch.Tensor:
    return log_probs_CV.clamp_(min=MIN_LOG_PROB)
