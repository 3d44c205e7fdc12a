"""Attention over packed sequences with plain SDPA, for machines without flash attention.

transformers' own way is a block-diagonal mask over the whole pack: memory and work grow with the square of the pack's
tokens, 6 to 16 times the model's other work for a small model. Here sequences of similar length are attended together
as a padded batch, and only inside attention: work grows with the sum of squared lengths. Registered as a transformers
attention function; a layout's runs reach it as a keyword argument of the model's forward.
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
class Run:
    """Adjacent sequences of a pack as a padded batch of shape (b, W)."""

    tokens: (
        torch.Tensor
    )  # (b*W,) int64, index into the pack of each cell's token; some token of the run where there is none
    cells: torch.Tensor  # (n,) int64, flat index of the n cells that hold a token, in pack order
    width: int  # W

    def to(self, device: torch.device) -> "Run":
        """Return the run with its tensors on a device."""
        return Run(self.tokens.to(device), self.cells.to(device), self.width)


def runs_of(lengths: Sequence[int]) -> tuple[Run, ...]:
    """Cut a pack of sequences, given by their lengths (at least 1) in order, into runs with none longer than twice the
    shortest.
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
    return tuple(_run(torch.tensor(group), start) for group, start in zip(groups, starts, strict=False))


def _run(lengths: torch.Tensor, start: int) -> Run:
    column = torch.arange(int(lengths.max()))
    first = start + lengths.cumsum(0) - lengths
    tokens = first[:, None] + column.minimum(lengths[:, None] - 1)
    return Run(tokens.flatten(), (column < lengths[:, None]).flatten().nonzero().squeeze(-1), len(column))


def use_packed_sdpa(model: nn.Module) -> bool:
    """Make a model that would use SDPA use this attention instead.

    Returns whether it does; other models keep their own.
    """
    from transformers import AttentionInterface

    settings = model.config.get_text_config()
    usual = set(getattr(settings, "layer_types", None) or KINDS) <= KINDS
    if settings._attn_implementation != "sdpa" or not usual or not model._supports_attention_backend:
        return False
    AttentionInterface.register(NAME, packed_sdpa)
    model.set_attn_implementation(NAME)
    return True


def packed_sdpa(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: None,
    *,
    runs: tuple[Run, ...] | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Return causal attention inside each sequence of a pack, (1,T,heads,d), from query, key and value
    (1,heads,T,d).
    """
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    if runs is None:
        raise ConfigError(
            f"model.use_remove_padding=True: {type(module).__name__} does not get the keyword arguments of its model; "
            "set model.override_config.attn_implementation=eager, or use_remove_padding=False"
        )
    parts = []
    for run in runs:
        q, k, v = (_as_batch(states, run) for states in (query, key, value))
        mask = _band(run.width, sliding_window, query.device) if sliding_window and run.width > sliding_window else None
        out, _ = sdpa_attention_forward(module, q, k, v, mask, **kwargs)  # (b,W,heads,d)
        parts.append(out.flatten(0, 1).index_select(0, run.cells))
    return torch.cat(parts)[None], None


def _as_batch(states: torch.Tensor, run: Run) -> torch.Tensor:
    """(1,heads,T,d) -> (b,heads,W,d)"""
    return states[0].index_select(1, run.tokens).unflatten(1, (-1, run.width)).transpose(0, 1)


def _band(width: int, window: int, device: torch.device) -> torch.Tensor:
    """(W,W) bool: a token sees itself and the window - 1 tokens before it."""
    distance = torch.arange(width, device=device)[:, None] - torch.arange(width, device=device)
    return (distance >= 0) & (distance < window)
