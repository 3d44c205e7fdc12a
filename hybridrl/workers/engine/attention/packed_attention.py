"""Attention over packed sequences with SDPA, or `attend_spans` on a CPU, for machines without flash attention.

transformers uses a block-diagonal mask over the whole packed row. Its memory and work grow with the square of the row's
tokens: 6 to 16 times the other work of a small model. Here adjacent sequences of similar length are attended as a
padded batch, only inside attention. Work grows with the sum of squared lengths. The function is registered with
transformers and receives a layout's spans as a keyword argument of the model's forward.
"""

import math
from typing import Any

import torch
from torch import nn

from hybridrl.errors import ConfigError
from hybridrl.workers.engine import attention
from hybridrl.workers.engine.attention.layer_kinds import RECURRENT, layer_kinds, set_text_attention
from hybridrl.workers.engine.attention.spans import SequenceSpan, path_mask

NAME = "hybridrl_packed"
REPLACED = {"sdpa", "eager"}


def use_packed_layout(model: Any) -> bool:
    """Let a transformers model compute the spans of packed rows; return whether it needs them.

    Flash attention finds sequences by their positions, and keeps its place.
    """
    is_replaced = model.config.get_text_config()._attn_implementation in REPLACED
    is_recurrent = bool(layer_kinds(model) & RECURRENT)
    if is_replaced:
        set_text_attention(model, NAME, packed_sdpa)
    if is_recurrent:
        attention.RecurrentLayers(model, is_passed_on=is_replaced)
    return is_replaced or is_recurrent


def packed_sdpa(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: None,
    *,
    spans: tuple[SequenceSpan, ...] | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Return causal attention inside each sequence of a packed row.

    Args:
        query, key, value: (1,heads,T,d).
        spans: The row's spans; their sequences cover it in order.
        sliding_window: Tokens that a token sees, itself included; None for all before it.
        softcap, s_aux: See `masked_attention`.

    Returns:
        (1,T,heads,d) and None for the attention weights.
    """
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    if spans is None:
        raise ConfigError(
            f"model.use_remove_padding=True: {type(module).__name__} does not get the keyword arguments of its model; "
            "set it to False"
        )
    is_plain = softcap is None and s_aux is None and value.size(-1) == query.size(-1)
    if query.device.type == "cpu" and is_plain and max(span.width for span in spans) <= (sliding_window or math.inf):
        return attention.attend_spans(query, key, value, spans, scale=kwargs.get("scaling")).transpose(1, 2), None
    parts = []
    for span in spans:
        q, k, v = (_as_batch(states, span) for states in (query, key, value))
        window = sliding_window if sliding_window and span.width > sliding_window else None
        if softcap is None and s_aux is None:
            mask = None if window is None else path_mask(span.width, span.width, window, query.device)
            out, _ = sdpa_attention_forward(module, q, k, v, mask, **kwargs)  # (b,W,heads,d)
        else:
            scale = kwargs.get("scaling")
            found = attention.masked_attention(q, k, v, window=window, scale=scale, soft_cap=softcap, sinks=s_aux)
            out = found.transpose(1, 2)
        parts.append(out.flatten(0, 1).index_select(0, span.cells))
    return torch.cat(parts)[None], None


def _as_batch(states: torch.Tensor, span: SequenceSpan) -> torch.Tensor:
    """Gather a span's tokens: (1,heads,T,d) -> (b,heads,W,d)."""
    return states[0].index_select(1, span.tokens).unflatten(1, (-1, span.width)).transpose(0, 1)
