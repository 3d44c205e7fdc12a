"""Attention over packed sequences with plain SDPA, for machines without flash attention.

transformers uses a block-diagonal mask over the whole packed row. Its memory and work grow with the square of the row's
tokens: 6 to 16 times the other work of a small model. Here adjacent sequences of similar length are attended as a
padded batch, only inside attention. Work grows with the sum of squared lengths. The function is registered with
transformers and receives a layout's spans as a keyword argument of the model's forward.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import nn

from hybridrl.errors import ConfigError

NAME = "hybridrl_packed_sdpa"
KINDS = {"full_attention", "sliding_attention"}


@dataclass(frozen=True)
class SequenceSpan:
    """Adjacent sequences of a packed row, as a padded batch of shape (b, W)."""

    # (b*W,) int64, index into the row of each cell's token; padding cells repeat a token of the span
    tokens: torch.Tensor
    cells: torch.Tensor  # (n,) int64, flat index of the n cells that hold a token, in row order
    width: int  # W

    def to(self, device: torch.device) -> "SequenceSpan":
        """Return the span with its tensors on a device."""
        return SequenceSpan(self.tokens.to(device), self.cells.to(device), self.width)


def sequence_spans(lengths: Sequence[int]) -> tuple[SequenceSpan, ...]:
    """Split a packed row, given its sequence lengths (at least 1), into spans of similar length.

    In a span no sequence is longer than twice the shortest.
    """
    groups: list[list[int]] = []
    shortest = longest = 0
    for length in lengths:
        if groups and max(longest, length) <= 2 * min(shortest, length):
            groups[-1].append(length)
            shortest, longest = min(shortest, length), max(longest, length)
        else:
            groups.append([length])
            shortest = longest = length
    starts = accumulate((sum(group) for group in groups), initial=0)
    return tuple(_span(torch.tensor(group), start) for group, start in zip(groups, starts, strict=False))


def _span(lengths: torch.Tensor, start: int) -> SequenceSpan:
    column = torch.arange(int(lengths.max()))
    first = start + lengths.cumsum(0) - lengths
    tokens = first[:, None] + column.minimum(lengths[:, None] - 1)
    return SequenceSpan(tokens.flatten(), (column < lengths[:, None]).flatten().nonzero().squeeze(-1), len(column))


def use_packed_sdpa(model: Any) -> bool:
    """Replace the SDPA of a transformers model by this attention and return whether it was replaced.

    Models that do not use plain SDPA keep their attention.
    """
    from transformers import AttentionInterface

    settings = model.config.get_text_config()
    is_plain = set(getattr(settings, "layer_types", None) or KINDS) <= KINDS
    if settings._attn_implementation != "sdpa" or not is_plain or not model._supports_attention_backend:
        return False
    AttentionInterface.register(NAME, packed_sdpa)
    set_text_attention(model, NAME)
    return True


def set_text_attention(model: Any, name: str) -> None:
    """Replace the attention of a model's decoder; a vision tower keeps its own."""
    is_composite = model.config.get_text_config() is not model.config
    model.set_attn_implementation({"text_config": name} if is_composite else name)


def packed_sdpa(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: None,
    *,
    spans: tuple[SequenceSpan, ...] | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Return causal attention inside each sequence of a packed row.

    Args:
        query, key, value: (1,heads,T,d).
        spans: The row's spans; their sequences cover it in order.
        sliding_window: Tokens that a token sees, itself included; None for all before it.

    Returns:
        (1,T,heads,d) and None for the attention weights.
    """
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    if spans is None:
        raise ConfigError(
            f"model.use_remove_padding=True: {type(module).__name__} does not get the keyword arguments of its model; "
            "set model.override_config.attn_implementation=eager, or use_remove_padding=False"
        )
    parts = []
    for span in spans:
        q, k, v = (_as_batch(states, span) for states in (query, key, value))
        mask = (
            band(span.width, sliding_window, query.device) if sliding_window and span.width > sliding_window else None
        )
        out, _ = sdpa_attention_forward(module, q, k, v, mask, **kwargs)  # (b,W,heads,d)
        parts.append(out.flatten(0, 1).index_select(0, span.cells))
    return torch.cat(parts)[None], None


def _as_batch(states: torch.Tensor, span: SequenceSpan) -> torch.Tensor:
    """Gather a span's tokens: (1,heads,T,d) -> (b,heads,W,d)."""
    return states[0].index_select(1, span.tokens).unflatten(1, (-1, span.width)).transpose(0, 1)


def band(width: int, window: int, device: torch.device) -> torch.Tensor:
    """Return the (W,W) bool mask of a causal sliding window of `window` tokens."""
    distance = torch.arange(width, device=device)[:, None] - torch.arange(width, device=device)
    return (distance >= 0) & (distance < window)
