"""Attention in plain torch, for what kernels leave out: sinks, soft caps, windows over a prefix tree.

Queries are the last tokens of a path, and see the tokens of the path before them. A sink is one more term of the
softmax that no value belongs to. Memory grows with queries times keys of one sequence or segment, never of the row.

Shapes: b sequences, q queries, k keys of the same path, the queries' tokens last.
"""

import torch
import torch.nn.functional as F

from hybridrl.workers.engine.attention.spans import AttentionTree, path_mask


def masked_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    window: int | None,
    scale: float | None,
    soft_cap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return attention (b,heads,q,e) of the last q tokens of paths of k tokens.

    Args:
        query: (b,heads,q,d).
        key: (b,heads or fewer,k,d); adjacent heads of the query share theirs.
        value: (b,heads or fewer,k,e).
        window: Tokens that a token sees, itself included; None for all before it.
        scale: Factor of the products of queries and keys. None: d ** -0.5.
        soft_cap: Bound c of the scaled products x, as c tanh(x / c).
        sinks: (heads,) the further term of each head's softmax.
    """
    sees = path_mask(query.size(2), key.size(2), window, query.device)
    if soft_cap is None and sinks is None:
        return F.scaled_dot_product_attention(query, key, value, attn_mask=sees, scale=scale, enable_gqa=True)
    shared = query.size(1) // key.size(1)
    key, value = key.repeat_interleave(shared, 1), value.repeat_interleave(shared, 1)
    products = (query @ key.transpose(-1, -2)).to(torch.promote_types(query.dtype, torch.float32))
    products = products * (query.size(-1) ** -0.5 if scale is None else scale)
    if soft_cap is not None:
        products = soft_cap * (products / soft_cap).tanh()
    products = products.masked_fill(~sees, float("-inf"))
    if sinks is not None:
        column = sinks.to(products.dtype).view(1, -1, 1, 1).expand(*products.shape[:3], 1)
        products = torch.cat([products, column], -1)
    return products.softmax(-1)[..., : key.size(2)].to(value.dtype) @ value


def masked_tree_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    tree: AttentionTree,
    *,
    window: int | None,
    scale: float | None,
    soft_cap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return attention (1,heads,T,e) of a packed row of trees, segment by segment. Arguments as above."""
    parts = []
    for path in tree.paths:
        start, stop = path[-1]
        keys, values = (torch.cat([states[:, :, first:last] for first, last in path], 2) for states in (key, value))
        seen = keys.size(2) if window is None else min(keys.size(2), stop - start + window - 1)
        part = masked_attention(
            query[:, :, start:stop],
            keys[:, :, -seen:],
            values[:, :, -seen:],
            window=window,
            scale=scale,
            soft_cap=soft_cap,
            sinks=sinks,
        )
        parts.append(part)
    return torch.cat(parts, 2)
