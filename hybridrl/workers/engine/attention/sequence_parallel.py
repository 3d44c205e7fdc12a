"""Sequence parallelism: peers share the tokens of a micro-batch, and exchange attention heads (Ulysses).

Each peer computes adjacent tokens of every row. Inside attention, and only there, an all-to-all gives it all tokens for
a share of the heads (https://arxiv.org/abs/2309.14509). So attention is that of whole rows: padded, packed, or of
prefix trees. Peers get the same rows and compute the same loss, from outputs that are summed over them.

The FSDP engine uses it, in worker processes. Shapes: b rows, T tokens of a row, t of them on this process, n peers,
d size of a head.
"""

from dataclasses import replace
from math import lcm
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from hybridrl.errors import ConfigError
from hybridrl.workers.engine.attention import packed_attention, tree_attention
from hybridrl.workers.engine.attention.layer_kinds import REPLACED, layer_kinds, set_text_attention, words
from hybridrl.workers.engine.attention.spans import AttentionTree, SequenceSpan, path_mask
from hybridrl.workers.engine.batching.layout import SequencePart, TokenLayout
from hybridrl.workers.process_setup import collective_timeout

NAME = "hybridrl_sequence_parallel"
KEY = "ulysses_sequence_parallel_size"
KINDS = {"full_attention", "sliding_attention"}
ATTENTIONS = {*REPLACED, packed_attention.NAME, tree_attention.NAME}  # in whose place this one stands


def sequence_part(size: int) -> SequencePart:
    """Return this process's part among `size` adjacent ranks, whose process group is created. Collective.

    Raises:
        ConfigError: The size does not divide the ranks.
    """
    world, rank = dist.get_world_size(), dist.get_rank()
    if world % size:
        raise ConfigError(f"{KEY}={size}: does not divide the {world} processes of the engine; use a divisor of it")
    timeout = collective_timeout()
    groups = [dist.new_group(list(range(first, first + size)), timeout=timeout) for first in range(0, world, size)]
    return SequencePart(rank % size, size, groups[rank // size])


def part_of_layout(layout: TokenLayout, part: SequencePart) -> TokenLayout:
    """Return a layout with this process's tokens alone; `spans` and `tree` remain those of whole rows.

    Rows are filled up to a multiple of the peers. In a packed row the fill is a sequence of its own, at the end.
    """
    width = layout.input_ids.size(1)
    fill = -width % part.size
    share = (width + fill) // part.size
    first = part.rank * share

    def local(index: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (flat indices of what is here, which of `index` that is)."""
        row, column = index // width, index % width
        here = (column // share == part.rank).nonzero().squeeze(-1)
        return (row * share + column - first)[here], here

    state, wanted = local(layout.state)
    last, last_row = local(layout.last)
    tree, spans = layout.tree, layout.spans
    if fill and tree is not None:
        tree = tree.extended(fill)
    elif fill and spans:
        spans = (*spans, SequenceSpan(width + torch.arange(fill), torch.arange(fill), fill))
    return replace(
        layout,
        input_ids=_own(layout.input_ids, torch.zeros(fill, dtype=torch.int64), part),
        position_ids=_own(layout.position_ids, torch.arange(fill), part),
        state=state,
        labels=layout.labels[wanted],
        cell=layout.cell[wanted],
        last=last,
        last_row=last_row,
        spans=spans,
        tree=tree,
        part=part,
    )


def places_of_part(layout: TokenLayout, part: SequencePart) -> torch.Tensor:
    """Return the places (b*t,) int64 of this process's tokens, -1 for the fill."""
    places = torch.arange(layout.input_ids.numel()).view_as(layout.input_ids)
    return _own(places, torch.full((-places.size(1) % part.size,), -1), part).flatten()


def _own(tokens: torch.Tensor, filling: torch.Tensor, part: SequencePart) -> torch.Tensor:
    """Return this process's columns (b, t) of tokens (b, T) filled with (fill,)."""
    filled = torch.cat([tokens, filling.expand(len(tokens), -1)], dim=1)
    return filled.chunk(part.size, dim=1)[part.rank].contiguous()


def use_sequence_parallel(model: Any, size: int) -> None:
    """Replace the attention of a transformers model by one that exchanges heads with `size - 1` peers.

    Call it after `use_packed_layout` or `use_tree_attention`, which it replaces, too.

    Raises:
        ConfigError: The model has another kind of attention, or heads that the peers cannot share.
    """
    if reason := _obstacle(model, size):
        raise ConfigError(f"{KEY}={size}: {type(model).__name__} {reason}; set it to 1")
    set_text_attention(model, NAME, sequence_parallel_attention)


def _obstacle(model: Any, size: int) -> str | None:
    settings = model.config.get_text_config()
    if kinds := layer_kinds(model) - KINDS:
        return f"has {words(kinds)}"
    if getattr(model.config, "vision_config", None) is not None:
        return "reads images, whose tokens are not shared"
    if settings._attn_implementation not in ATTENTIONS:
        return f"runs with attn_implementation={settings._attn_implementation}"
    if settings.num_attention_heads % size:
        return f"has num_attention_heads={settings.num_attention_heads}, which {size} processes cannot share"
    return None


def sequence_parallel_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: None,
    *,
    part: SequencePart | None = None,
    spans: tuple[SequenceSpan, ...] = (),
    tree: AttentionTree | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Return causal attention to whole rows for this process's tokens, as transformers calls it.

    Args:
        query, key, value: (b,heads,t,d), possibly with fewer heads of keys and values.
        part: This process's part of the rows.
        spans, tree: Those of a whole packed row; without both, rows are padded on the right.

    Returns:
        (b,t,heads,d) and None for the attention weights.

    Raises:
        ConfigError: The model asks for what this attention cannot do.
    """
    if part is None or attention_mask is not None or kwargs.get("position_bias") is not None:
        what = "does not get the keyword arguments of its model" if part is None else "needs a mask or a bias"
        raise ConfigError(f"{KEY}: {type(module).__name__} {what}; use 1")
    heads, few = query.size(1), key.size(1)
    shared = lcm(few, part.size)  # heads of keys and values that the peers can share: each may be needed by several
    states = query, *(states.repeat_interleave(shared // few, dim=1) for states in (key, value))
    q, k, v = (_Exchange.apply(tensor, part.group, True) for tensor in states)
    inner: Any = module
    if shared != few:  # other groups of heads than the module's
        k, v = (states.repeat_interleave(heads // shared, dim=1) for states in (k, v))
        inner = SimpleNamespace(is_causal=True)
    out = _attend(inner, q, k, v, spans=spans, tree=tree, **kwargs)
    return _Exchange.apply(out.transpose(1, 2), part.group, False).transpose(1, 2).contiguous(), None


def _attend(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    spans: tuple[SequenceSpan, ...],
    tree: AttentionTree | None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> torch.Tensor:
    """Return attention (b,T,heads,d) of whole rows, for some of the heads."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    states = query, key, value
    if tree is not None:
        options = {"tree": tree, "sliding_window": sliding_window, **kwargs}
        return tree_attention.tree_attention(module, *states, None, **options)[0]
    if spans:
        options = {"spans": spans, "sliding_window": sliding_window, **kwargs}
        return packed_attention.packed_sdpa(module, *states, None, **options)[0]
    mask = None
    if sliding_window and query.size(2) > sliding_window:
        mask = path_mask(query.size(2), query.size(2), sliding_window, query.device)
    found: torch.Tensor = sdpa_attention_forward(module, *states, mask, **kwargs)[0]
    return found


class _Exchange(torch.autograd.Function):
    """Exchange heads for tokens: (b,heads,t,d) to (b,heads/n,T,d) with `to_heads`, or back. Collective."""

    @staticmethod
    def forward(ctx: Any, states: torch.Tensor, group: dist.ProcessGroup, to_heads: bool) -> torch.Tensor:
        ctx.group, ctx.to_heads = group, to_heads
        return _exchanged(states, group, to_heads=to_heads)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return _exchanged(gradient, ctx.group, to_heads=not ctx.to_heads), None, None


def _exchanged(states: torch.Tensor, group: dist.ProcessGroup, *, to_heads: bool) -> torch.Tensor:
    cut, join = (1, 2) if to_heads else (2, 1)
    sent = states.unflatten(cut, (group.size(), -1)).movedim(cut, 0).contiguous()
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    return received.movedim(0, join).flatten(join, join + 1)


class SumOverPeers(torch.autograd.Function):
    """Sum over peers, each of which has some of the cells and zeros elsewhere.

    All peers compute the same loss from the sum, so the gradient of a peer's cells is the gradient of the sum.
    """

    @staticmethod
    def forward(ctx: Any, cells: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        total = cells.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient, None
