"""Attention over a prefix tree, exact, in two parts: a segment's tokens see themselves, and their ancestors.

Every segment attends to itself causally. All tokens below a segment, which are adjacent, attend to it in full. So no
mask is needed, and a pair of tokens that may not see each other costs nothing. The parts of one query are merged by
their log-sum-exp, as flash attention merges blocks (https://arxiv.org/abs/2205.14135). In the backward pass each part
gets the merged output and log-sum-exp, and its gradients then simply add up.

On CUDA one FlexAttention kernel does the same with a block mask (https://arxiv.org/abs/2412.05496).

Shapes: T tokens of a packed row, d size of a head.
"""

import functools
import logging
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from hybridrl.errors import ConfigError
from hybridrl.workers.engine import attention
from hybridrl.workers.engine.attention.layer_kinds import RECURRENT, layer_kinds, obstacle, set_text_attention
from hybridrl.workers.engine.attention.masked_attention import masked_tree_attention
from hybridrl.workers.engine.attention.spans import AttentionTree, SequenceSpan

logger = logging.getLogger(__name__)

NAME = "hybridrl_prefix_tree"
Branches = tuple[tuple[int, int, int], ...]


def attend_tree(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, tree: AttentionTree, *, scale: float | None
) -> torch.Tensor:
    """Return attention (1,heads,T,d) of a packed row of trees.

    Args:
        query: (1,heads,T,d).
        key, value: (1,heads or fewer,T,d); adjacent heads of the query share theirs.
        tree: Which tokens see each other.
        scale: Factor of the products of queries and keys. None: d ** -0.5.
    """
    if query.device.type == "cpu":
        return attend_spans(query, key, value, tree.spans, tuple(tree.branches), scale=scale)
    return _flex_attention()(query, key, value, block_mask=tree.block_mask, scale=scale, enable_gqa=True)


def attend_spans(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    spans: tuple[SequenceSpan, ...],
    branches: Branches = (),
    *,
    scale: float | None,
) -> torch.Tensor:
    """Return causal attention inside each sequence of a packed row, on the CPU; arguments as of `attend_tree`."""
    found: torch.Tensor = _TwoPartAttention.apply(query, key, value, spans, branches, scale)
    return found


@functools.cache
def _flex_attention() -> Callable[..., torch.Tensor]:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=True)


_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


class _TwoPartAttention(torch.autograd.Function):
    """`attend_tree` on the CPU, by torch's own flash attention.

    Its backward pass computes in float32: with bfloat16 torch's kernel takes four to eight times as long.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        spans: tuple[SequenceSpan, ...],
        branches: Branches,
        scale: float | None,
    ) -> torch.Tensor:
        states = (query, key, value)
        sums = torch.promote_types(query.dtype, torch.float32)
        _, heads, tokens, size = query.shape
        merged = query.new_empty((1, tokens, heads, size), dtype=sums).transpose(1, 2)
        lse = query.new_empty((1, tokens, heads), dtype=sums).transpose(1, 2)
        for span in spans:
            part, part_lse = _forward(*(_gather(tensor, span) for tensor in states), 0.0, True, scale=scale)
            _scatter(merged, part, span)
            _scatter(lse, part_lse, span)
        for start, stop, end in branches:
            q, k, v = _slices(states, start, stop, end)
            part, part_lse = _forward(q, k, v, 0.0, False, scale=scale)
            before = lse[:, :, stop:end]
            after = torch.logaddexp(before, part_lse.to(sums))
            kept, new = (before - after).exp_()[..., None], (part_lse - after).exp_()[..., None]
            merged[:, :, stop:end] = merged[:, :, stop:end] * kept + part * new
            lse[:, :, stop:end] = after
        out = merged.to(query.dtype)
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.spans, ctx.branches, ctx.scale = spans, branches, scale
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        *tensors, lse = ctx.saved_tensors
        dtype = grad.dtype
        query, key, value, out, grad = (tensor.to(lse.dtype) for tensor in (*tensors, grad))
        states = (query, key, value)
        grads = tuple(map(torch.zeros_like, states))
        for span in ctx.spans:
            inputs = [_gather(tensor, span) for tensor in (*states, out, lse)]
            parts = _backward(_gather(grad, span, zero_padding=True), *inputs, 0.0, True, scale=ctx.scale)
            for total, part in zip(grads, parts, strict=True):
                _scatter(total, part, span)
        for start, stop, end in ctx.branches:
            below = slice(stop, end)
            parts = _backward(
                grad[:, :, below],
                *_slices(states, start, stop, end),
                *(out[:, :, below], lse[:, :, below], 0.0, False),
                scale=ctx.scale,
            )
            grads[0][:, :, below] += parts[0]
            grads[1][:, :, start:stop] += parts[1]
            grads[2][:, :, start:stop] += parts[2]
        return (*(total.to(dtype) for total in grads), None, None, None)


def _slices(states: tuple[torch.Tensor, ...], start: int, stop: int, end: int) -> tuple[torch.Tensor, ...]:
    """Return the queries of a segment's subtree, and the segment's keys and values."""
    query, key, value = states
    return query[:, :, stop:end], key[:, :, start:stop], value[:, :, start:stop]


def _gather(tensor: torch.Tensor, span: SequenceSpan, *, zero_padding: bool = False) -> torch.Tensor:
    """Return a span's tokens as a padded batch: (1,heads,T,...) -> (b,heads,W,...)."""
    found = tensor[0].transpose(0, 1).index_select(0, span.tokens)
    if zero_padding:
        is_padding = torch.ones(len(span.tokens), dtype=torch.bool).index_fill_(0, span.cells, False)
        found[is_padding] = 0
    return found.unflatten(0, (-1, span.width)).transpose(1, 2)


def _scatter(target: torch.Tensor, part: torch.Tensor, span: SequenceSpan) -> None:
    """Write the cells of a padded batch (b,heads,W,...) that hold a token to the row (1,heads,T,...)."""
    cells = part.transpose(1, 2).flatten(0, 1).index_select(0, span.cells)
    target[0].transpose(0, 1).index_copy_(0, span.tokens.index_select(0, span.cells), cells.to(target.dtype))


def use_tree_attention(model: Any) -> bool:
    """Replace the attention of a transformers model by this one and return whether it was replaced.

    Models with layers that `layer_kinds` does not know keep theirs, and rank 0 logs why.
    """
    is_recurrent = bool(layer_kinds(model) & RECURRENT)
    if reason := obstacle(model) or (is_recurrent and attention.state_obstacle(model)):
        log_obstacle(f"{type(model).__name__} {reason}")
        return False
    set_text_attention(model, NAME, tree_attention)
    if is_recurrent:
        attention.RecurrentLayers(model, is_passed_on=True)
    return True


def log_obstacle(reason: str) -> None:
    """Log on rank 0 why a model computes every row alone."""
    if dist.get_rank() == 0:
        logger.warning("use_prefix_grouper=True has no effect: %s; every row is computed alone.", reason)


def tree_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: None,
    *,
    tree: AttentionTree | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Return attention over a prefix tree as transformers calls it: (1,T,heads,d), and None for its weights.

    Raises:
        ConfigError: The model asks for what this attention cannot do.
    """
    other = {"dropout": dropout or None, "an attention mask": attention_mask, "a bias": kwargs.get("position_bias")}
    needs = ", ".join(name for name, given in other.items() if given is not None)
    if tree is None or needs:
        what = "does not get the keyword arguments of its model" if tree is None else f"needs {needs}"
        raise ConfigError(f"use_prefix_grouper=True: {type(module).__name__} {what}; set it to False")
    if sliding_window is None and softcap is None and s_aux is None and value.size(-1) == query.size(-1):
        return attend_tree(query, key, value, tree, scale=scaling).transpose(1, 2), None
    found = masked_tree_attention(
        query, key, value, tree, window=sliding_window, scale=scaling, soft_cap=softcap, sinks=s_aux
    )
    return found.transpose(1, 2), None
