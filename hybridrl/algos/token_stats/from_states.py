"""Statistics of tokens from the states before a language model's head, without its logits.

The head is logits = final(states @ weight.T + bias). Logits (N, V) and their gradient never exist whole: a tile of
them, some tokens by some of the vocabulary, is computed, added to sums per token, and dropped. The backward pass
computes each tile again. That costs a fourth product of states and weight besides the three of a head's forward and
backward pass. Tiles of log-softmax are joined as in Milakov and Gimelshein, arXiv 1805.02867.

Shape letters: N tokens, H hidden size, V rows of the weight on this process; of a tile, C tokens and W of the V rows.
Second derivatives are not defined.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import isqrt
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from hybridrl.errors import DataError

MIN_LOG_PROB = -1000.0
"""Lower limit of log-probs. A float32 probability below it is exactly 0; with -inf, p log p would be NaN."""
CPU_TILE = 2**21
"""Logits of a tile on a CPU: 8 MiB of float32.

The caller may say otherwise. For less oneDNN uses one core.
"""
DEVICE_TILE = 2**26
"""Logits of a tile elsewhere: 256 MiB of float32, enough for matrix products at full speed."""
LOWEST = -1e30
"""Stands for the largest logit of no logits. A difference of two such numbers is finite, and exp of it is 0 or 1."""


class TokenStats(NamedTuple):
    """Numbers of each token, (N,) float32; None where they were not asked for.

    Attributes:
        log_probs_N, entropy_N: See `from_logits.log_probs_and_entropy`.
        sum_pi_squared_N: sum_v p_nv^2, without gradient: the probability that two draws are the same token.
    """

    log_probs_N: torch.Tensor
    entropy_N: torch.Tensor | None
    sum_pi_squared_N: torch.Tensor | None

    def by_name(self) -> dict[str, torch.Tensor]:
        """Return what was asked for, by the names of an engine's outputs: log_probs, entropy, sum_pi_squared."""
        found = {name.removesuffix("_N"): column for name, column in self._asdict().items()}
        return {name: column for name, column in found.items() if column is not None}


@dataclass(frozen=True)
class FinalLogits:
    """What a model does with the head's output x: y = scale x, or c tanh(y / c)."""

    scale: float = 1.0
    soft_cap: float | None = None

    def __call__(self, logits: torch.Tensor) -> torch.Tensor:
        """Return final logits of float32 outputs of the head, computed in place."""
        if self.scale != 1:
            logits.mul_(self.scale)
        if self.soft_cap is not None:
            logits.div_(self.soft_cap).tanh_().mul_(self.soft_cap)
        return logits

    def backward_(self, gradient: torch.Tensor, final: torch.Tensor) -> torch.Tensor:
        """Turn the gradient of final logits into that of the head's output, in place."""
        if self.soft_cap is not None:
            gradient.mul_(1 - (final / self.soft_cap).square_())
        return gradient.mul_(self.scale) if self.scale != 1 else gradient


@dataclass(frozen=True)
class VocabularyShard:
    """Which tokens a process's V rows of the weight are, where the head is sharded over processes.

    Attributes:
        group: The processes that share the vocabulary, each with V rows.
        vocab_size: Tokens in all. Rows of the weight behind them are padding.
    """

    group: dist.ProcessGroup
    vocab_size: int


@dataclass(frozen=True)
class _Head:
    """The head, without its tensors."""

    final: FinalLogits
    temperature: float
    elements: int | None
    shard: VocabularyShard | None

    def first_token(self, weight_VH: torch.Tensor) -> int:
        return self.shard.group.rank() * len(weight_VH) if self.shard else 0

    def tiles(self, states_NH: torch.Tensor, weight_VH: torch.Tensor) -> Iterator[tuple[slice, slice]]:
        """Yield (tokens, rows of the weight) of each tile, all tiles of the same rows one after the other."""
        num_rows = len(weight_VH)
        if self.shard is not None:
            num_rows = min(max(0, self.shard.vocab_size - self.first_token(weight_VH)), num_rows)
        elements = self.elements or (CPU_TILE if states_NH.device.type == "cpu" else DEVICE_TILE)
        height = max(1, min(len(states_NH), isqrt(elements)))
        width = max(1, min(num_rows, elements // height))
        for first in range(0, num_rows, width):
            for start in range(0, len(states_NH), height):
                yield slice(start, min(start + height, len(states_NH))), slice(first, min(first + width, num_rows))

    def final_logits(
        self, states_CH: torch.Tensor, weight_WH: torch.Tensor, bias_W: torch.Tensor | None
    ) -> torch.Tensor:
        """Return a tile (C, W) of final logits / temperature, a new float32 tensor."""
        logits_CW = self.final(torch.nn.functional.linear(states_CH, weight_WH, bias_W).float())
        return logits_CW.div_(self.temperature) if self.temperature != 1 else logits_CW

    def backward_(self, gradient_CW: torch.Tensor, scaled_CW: torch.Tensor) -> torch.Tensor:
        """Turn the gradient of a tile of `final_logits` into that of the head's output, in place."""
        if self.temperature != 1:
            gradient_CW.div_(self.temperature)
            scaled_CW = scaled_CW * self.temperature if self.final.soft_cap is not None else scaled_CW
        return self.final.backward_(gradient_CW, scaled_CW)


def token_stats_of_states(
    states_NH: torch.Tensor,
    weight_VH: torch.Tensor,
    labels_N: torch.Tensor,
    *,
    bias_V: torch.Tensor | None = None,
    final: FinalLogits | None = None,
    temperature: float = 1.0,
    with_entropy: bool = False,
    with_sum_pi_squared: bool = False,
    chunk: int | None = None,
    shard: VocabularyShard | None = None,
) -> TokenStats:
    """Return `token_stats` of final(states @ weight.T + bias), differentiable in states, weight and bias.

    The product has the dtype of states and weight, all that follows is float32. With `shard`, the call is collective,
    and its results are those of the whole vocabulary on every process; each must compute the same loss of them.

    Args:
        labels_N: int64 in [0, number of tokens of the whole vocabulary).
        final: What the model does with the head's output; None: nothing.
        temperature: Final logits are divided by it.
        chunk: At most as many logits exist at a time as those of this many tokens. None chooses it by the device.
        shard: Processes that share the vocabulary. None: this process has it whole.

    Raises:
        DataError: Shapes do not fit.
        ValueError: The temperature is not above 0.
    """
    fits = states_NH.ndim == 2 and states_NH.shape[1:] == weight_VH.shape[1:] and labels_N.shape == states_NH.shape[:1]
    if not fits:
        raise DataError(
            "states must be (N, H), weight (V, H) and labels (N,), and are "
            f"{tuple(states_NH.shape)}, {tuple(weight_VH.shape)} and {tuple(labels_N.shape)}"
        )
    if temperature <= 0:
        raise ValueError(f"temperature={temperature} must be above 0; use 1 for greedy decoding")
    elements = None if chunk is None else chunk * len(weight_VH)
    head = _Head(final or FinalLogits(), temperature, elements, shard)
    return TokenStats(
        *_StatsOfStates.apply(states_NH, weight_VH, bias_V, labels_N, head, with_entropy, with_sum_pi_squared)
    )


@dataclass
class _Sums:
    """Sums over the logits z of each token that were seen so far, (N,) float32.

    Below, u = max(z - top, MIN_LOG_PROB).

    Attributes:
        top: The largest z.
        exp: sum exp(z - top).
        weighted: sum u exp(u), if asked for.
        squares: sum exp(z - top)^2, if asked for.
        label: The label's z, 0 before it was seen.
    """

    top: torch.Tensor
    exp: torch.Tensor
    weighted: torch.Tensor | None
    squares: torch.Tensor | None
    label: torch.Tensor

    @classmethod
    def of_nothing(cls, states_NH: torch.Tensor, *, with_entropy: bool, with_squares: bool) -> "_Sums":
        zeros_N = torch.zeros(len(states_NH), dtype=torch.float32, device=states_NH.device)
        return cls(
            top=torch.full_like(zeros_N, LOWEST),
            exp=zeros_N,
            weighted=zeros_N.clone() if with_entropy else None,
            squares=zeros_N.clone() if with_squares else None,
            label=zeros_N.clone(),
        )

    def add_(self, rows: slice, z_CW: torch.Tensor, index_C: torch.Tensor) -> None:
        """Add a tile, which is overwritten. `index_C`: the label's column in the tile, or a number outside of it."""
        safe_C, is_here_C = _within(index_C, z_CW.size(1))
        self.label[rows] += torch.where(is_here_C, z_CW.gather(1, safe_C[:, None]).squeeze(1), 0.0)
        top_C = torch.maximum(self.top[rows], z_CW.amax(dim=1))
        self.rescale_(rows, top_C)
        z_CW.sub_(top_C[:, None])
        exp_CW = z_CW.exp() if self.weighted is not None else z_CW.exp_()
        self.exp[rows] += exp_CW.sum(dim=1)
        if self.weighted is not None:
            self.weighted[rows] += z_CW.clamp_(min=MIN_LOG_PROB).mul_(exp_CW).sum(dim=1)
        if self.squares is not None:
            self.squares[rows] += exp_CW.square_().sum(dim=1)

    def rescale_(self, rows: slice, top_C: torch.Tensor) -> None:
        """Express the sums of some tokens relative to a larger `top`."""
        change_C = self.top[rows] - top_C
        factor_C = change_C.exp()
        if self.weighted is not None:
            self.weighted[rows] = factor_C * (self.weighted[rows] + change_C * self.exp[rows])
        if self.squares is not None:
            self.squares[rows] *= factor_C.square()
        self.exp[rows] *= factor_C
        self.top[rows] = top_C

    def add_up_over_(self, group: dist.ProcessGroup) -> None:
        """Add the sums of processes with other parts of the vocabulary. Collective."""
        top_N = self.top.clone()
        dist.all_reduce(top_N, op=dist.ReduceOp.MAX, group=group)
        self.rescale_(slice(None), top_N)
        own = [column for column in (self.exp, self.weighted, self.squares, self.label) if column is not None]
        total = torch.stack(own)
        dist.all_reduce(total, group=group)
        for column, sum_N in zip(own, total, strict=True):
            column.copy_(sum_N)


class _StatsOfStates(torch.autograd.Function):
    """Statistics, forward and backward one tile of logits at a time.

    With g, h the gradients of log-prob and entropy, z = final logits / temperature, and p = softmax(z):

        dL/dz_v = g (1[v = label] - p_v) - h p_v (log p_v + entropy)
    """

    @staticmethod
    def forward(
        ctx: Any,
        states_NH: torch.Tensor,
        weight_VH: torch.Tensor,
        bias_V: torch.Tensor | None,
        labels_N: torch.Tensor,
        head: _Head,
        with_entropy: bool,
        with_sum_pi_squared: bool,
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        sums = _Sums.of_nothing(states_NH, with_entropy=with_entropy, with_squares=with_sum_pi_squared)
        index_N = labels_N - head.first_token(weight_VH)
        for rows, words in head.tiles(states_NH, weight_VH):
            z_CW = head.final_logits(states_NH[rows], weight_VH[words], _part(bias_V, words))
            sums.add_(rows, z_CW, index_N[rows] - words.start)
        if head.shard is not None:
            sums.add_up_over_(head.shard.group)
        log_sum_N = sums.exp.log()
        entropy_N = None if sums.weighted is None else log_sum_N - sums.weighted / sums.exp
        squares_N = None if sums.squares is None else sums.squares / sums.exp.square()
        if squares_N is not None:
            ctx.mark_non_differentiable(squares_N)
        ctx.set_materialize_grads(False)
        logsumexp_N = sums.top + log_sum_N
        ctx.save_for_backward(states_NH, weight_VH, bias_V, index_N, logsumexp_N, entropy_N)
        ctx.head = head
        return sums.label - logsumexp_N, entropy_N, squares_N

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, g_N: torch.Tensor | None, h_N: torch.Tensor | None, _squares: Any
    ) -> tuple[torch.Tensor | None, ...]:
        states_NH, weight_VH, bias_V, index_N, logsumexp_N, entropy_N = ctx.saved_tensors
        head: _Head = ctx.head
        grads = _Gradients(states_NH, weight_VH, bias_V, needed=ctx.needs_input_grad)
        for rows, words in head.tiles(states_NH, weight_VH):
            z_CW = head.final_logits(states_NH[rows], weight_VH[words], _part(bias_V, words))
            log_p_CW = z_CW - logsumexp_N[rows, None] if head.final.soft_cap else z_CW.sub_(logsumexp_N[rows, None])
            index_C = index_N[rows] - words.start
            entropy = None if h_N is None else (entropy_N[rows], h_N[rows])
            gradient_CW = _of_logits(log_p_CW, index_C, None if g_N is None else g_N[rows], entropy)
            grads.add_(rows, words, head.backward_(gradient_CW, z_CW).to(states_NH.dtype))
        return *grads.finish(head.shard.group if head.shard else None), None, None, None, None


def _of_logits(
    log_p_CW: torch.Tensor,
    index_C: torch.Tensor,
    g_C: torch.Tensor | None,
    entropy: tuple[torch.Tensor, torch.Tensor] | None,
) -> torch.Tensor:
    """Return dL/dz of a tile (C, W) from its log-probs, which are overwritten. `entropy`: its values and gradient."""
    gradient_CW = log_p_CW.exp() if entropy is not None else log_p_CW.exp_()
    if entropy is not None:
        value_C, h_C = entropy
        factor_CW = log_p_CW.clamp_(min=MIN_LOG_PROB).add_(value_C[:, None]).mul_(h_C[:, None])
        gradient_CW.mul_((factor_CW if g_C is None else factor_CW.add_(g_C[:, None])).neg_())
    elif g_C is not None:
        gradient_CW.mul_(-g_C[:, None])
    if g_C is not None:
        safe_C, is_here_C = _within(index_C, gradient_CW.size(1))
        gradient_CW.scatter_add_(1, safe_C[:, None], torch.where(is_here_C, g_C, 0.0)[:, None])
    return gradient_CW


class _Gradients:
    """Gradients of states, weight and bias, as sums over tiles. Sums of more than one part are float32."""

    def __init__(
        self, states_NH: torch.Tensor, weight_VH: torch.Tensor, bias_V: torch.Tensor | None, *, needed: tuple[bool, ...]
    ):
        self._states_NH, self._weight_VH = states_NH, weight_VH
        self._of_states = torch.zeros_like(states_NH, dtype=torch.float32) if needed[0] else None
        self._of_weight = torch.zeros_like(weight_VH) if needed[1] else None
        self._of_bias = torch.zeros_like(bias_V, dtype=torch.float32) if bias_V is not None and needed[2] else None
        self._bias_V = bias_V
        self._words: slice | None = None  # rows of the weight whose gradient is in `_part`
        self._part: torch.Tensor | None = None

    def add_(self, rows: slice, words: slice, gradient_CW: torch.Tensor) -> None:
        """Add what a tile of the logits' gradient contributes. All tiles of the same words come in a row."""
        if self._of_states is not None:
            _add_product_(self._of_states[rows], gradient_CW, self._weight_VH[words])
        if self._of_weight is not None:
            if words != self._words:
                self._store()
                self._words = words
                self._part = self._new_part(self._of_weight[words])
            assert self._part is not None, "it was made for these words"
            _add_product_(self._part, gradient_CW.t(), self._states_NH[rows])
        if self._of_bias is not None:
            self._of_bias[words] += gradient_CW.sum(dim=0, dtype=torch.float32)

    def finish(
        self, group: dist.ProcessGroup | None
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
        """Return the gradients in the dtypes of states, weight and bias. Collective with a group."""
        self._store()
        of_states = None if self._of_states is None else self._of_states.to(self._states_NH.dtype)
        if of_states is not None and group is not None:
            dist.all_reduce(of_states, group=group)
        of_bias = None if self._of_bias is None or self._bias_V is None else self._of_bias.to(self._bias_V.dtype)
        return of_states, self._of_weight, of_bias

    @staticmethod
    def _new_part(target_WH: torch.Tensor) -> torch.Tensor:
        return target_WH if target_WH.dtype == torch.float32 else torch.zeros_like(target_WH, dtype=torch.float32)

    def _store(self) -> None:
        if self._words is not None and self._part is not None and self._of_weight is not None:
            target_WH = self._of_weight[self._words]
            if self._part.dtype != target_WH.dtype:
                target_WH.copy_(self._part)
        self._words = self._part = None


def _add_product_(sum_: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    if left.dtype == sum_.dtype:
        sum_.addmm_(left, right)
    else:
        sum_.add_(left @ right)


def _within(index_C: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the indices limited to [0, width), and which of them are within."""
    return index_C.clamp(0, width - 1), (index_C >= 0) & (index_C < width)


def _part(bias_V: torch.Tensor | None, words: slice) -> torch.Tensor | None:
    return None if bias_V is None else bias_V[words]
