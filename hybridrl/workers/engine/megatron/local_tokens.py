"""Select the tokens of a micro-batch that one process computes.

The engine calls it in worker processes, once per micro-batch. Sequences are first padded so that peers can share them.

Shapes: b rows, s tokens of this process, N response tokens whose preceding state this process holds.
"""

from dataclasses import dataclass, replace
from math import lcm
from typing import Any

import torch
import torch.nn.functional as F

from hybridrl.workers.engine.attention.spans import sequence_spans
from hybridrl.workers.engine.batching.layout import TokenLayout
from hybridrl.workers.engine.megatron.layers import PackedParams, zigzag_chunks


@dataclass(frozen=True)
class TokenSharding:
    """How a micro-batch's tokens are sharded over peers.

    Attributes:
        cp_rank: This process's rank among its context-parallel peers.
        cp_size: Context-parallel peers.
        sp_size: Tensor-parallel peers that share activations (sequence parallelism), else 1.
    """

    cp_rank: int
    cp_size: int
    sp_size: int

    @property
    def sequence_multiple(self) -> int:
        """Divisor of a sequence's length: two chunks per context-parallel peer."""
        return 2 * self.cp_size if self.cp_size > 1 else 1

    @property
    def multiple(self) -> int:
        """Divisor of a row's length.

        Each context-parallel peer's part is also divided among the peers that share activations.
        """
        return lcm(self.sequence_multiple, self.cp_size * self.sp_size)


@dataclass(frozen=True)
class LocalTokens:
    """This process's model input and the positions of its results.

    A `TokenLayout` reduced to this process's tokens.
    """

    rows: list[int]  # of the batch; empty in a placeholder for peers
    input_ids: torch.Tensor  # (b,s) or (1,s) int64
    position_ids: torch.Tensor  # same
    packed_params: PackedParams | None
    state: torch.Tensor  # (N,) int64, flat index of the state before each response token
    labels: torch.Tensor  # (N,) int64
    cell: torch.Tensor  # (N,) int64, flat index in (b,R)
    last: torch.Tensor  # (n,) int64, flat index of the last real token of each row that ends here
    last_row: torch.Tensor  # (n,) int64, which row that is
    shape: tuple[int, int]  # (b,R)
    source: torch.Tensor  # (b,s) or (1,s) int64, flat index of each token in the layout, -1 on padding
    layout: TokenLayout

    def to(self, device: torch.device) -> "LocalTokens":
        """Return them with the tensors on a device."""
        if device.type == "cpu":
            return self
        moved: dict[str, Any] = {
            name: value.to(device) for name, value in vars(self).items() if isinstance(value, torch.Tensor)
        }
        moved["layout"] = self.layout.to(device)
        return replace(self, **moved, packed_params=self.packed_params and _packed_to(self.packed_params, device))


def local_tokens(layout: TokenLayout, rows: list[int], sharding: TokenSharding, *, packed: bool) -> LocalTokens:
    """Return this process's tokens of a micro-batch."""
    is_start = layout.position_ids.flatten() == 0
    starts = is_start.nonzero().squeeze(-1)
    sequence = is_start.cumsum(0) - 1
    lengths = torch.diff(starts, append=torch.tensor([len(sequence)]))
    padded = _padded_lengths(lengths, sharding, packed=packed)
    shift = padded.cumsum(0) - padded - starts
    local_index, inverse = _local_token_index(padded.tolist(), sharding)

    def flat(index: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (local positions, which of `index` are local)."""
        found = inverse[index + shift[sequence[index]]]
        return found[found >= 0], (found >= 0).nonzero().squeeze(-1)

    moved = torch.arange(len(sequence)) + shift[sequence]
    ids = torch.zeros(int(padded.sum()), dtype=torch.int64).index_copy(0, moved, layout.input_ids.flatten())
    source = torch.full_like(ids, -1).index_copy(0, moved, torch.arange(len(sequence)))
    positions = torch.cat([torch.arange(n) for n in padded.tolist()])
    view = (1, -1) if packed else (layout.input_ids.size(0), -1)
    state, selected = flat(layout.state)
    last, last_row = flat(layout.last)
    return LocalTokens(
        rows=rows,
        input_ids=ids[local_index].view(view),
        position_ids=positions[local_index].view(view),
        packed_params=_params_of_lengths(padded, sharding) if packed else None,
        state=state,
        labels=layout.labels[selected],
        cell=layout.cell[selected],
        last=last,
        last_row=last_row,
        shape=layout.shape,
        source=source[local_index].view(view),
        layout=layout,
    )


def local_tree_tokens(layout: TokenLayout, rows: list[int], sharding: TokenSharding) -> LocalTokens:
    """Return a process's tokens of a micro-batch of prefix trees: all of them, without context parallelism.

    Tokens that fill the row up to a multiple form a segment of their own at its end.
    """
    assert sharding.cp_size == 1 and layout.tree is not None, "the engine shares prefixes in whole rows only"
    num_tokens = layout.input_ids.numel()
    fill = -num_tokens % sharding.multiple
    tree, positions = layout.tree, F.pad(layout.position_ids, (0, fill))
    if fill:
        positions[0, num_tokens:] = torch.arange(fill)
        tree = tree.extended(fill)
    ends, longest = torch.tensor([0, num_tokens + fill], dtype=torch.int32), int(positions.max()) + 1
    return LocalTokens(
        rows=rows,
        input_ids=F.pad(layout.input_ids, (0, fill)),
        position_ids=positions,
        packed_params=_packed_params(ends, longest, tree=tree),
        last_row=torch.arange(len(layout.last)),
        source=F.pad(torch.arange(num_tokens)[None], (0, fill), value=-1),
        layout=layout,
        **{name: getattr(layout, name) for name in ("state", "labels", "cell", "last", "shape")},
    )


def _padded_lengths(lengths: torch.Tensor, sharding: TokenSharding, *, packed: bool) -> torch.Tensor:
    """Return lengths that can be sharded.

    In a padded batch every row is a multiple; in a packed row, their sum.
    """
    multiple = sharding.sequence_multiple if packed else sharding.multiple
    padded = -(-lengths // multiple) * multiple
    if packed:
        padded[-1] += -int(padded.sum()) % sharding.multiple
    return padded


def _local_token_index(padded: list[int], sharding: TokenSharding) -> tuple[torch.Tensor, torch.Tensor]:
    """Return which padded tokens this process holds, and the inverse.

    The first tensor counts tokens over all padded sequences. The second gives each token's local position, -1 if
    another process holds it.
    """
    start, parts = 0, []
    for length in padded:
        parts.append(start + zigzag_chunks(length, sharding.cp_rank, sharding.cp_size))
        start += length
    local_index = torch.cat(parts)
    return local_index, torch.full((start,), -1).index_copy(0, local_index, torch.arange(len(local_index)))


def _params_of_lengths(padded: torch.Tensor, sharding: TokenSharding) -> PackedParams:
    spans = sequence_spans(padded.tolist()) if sharding.cp_size == 1 else ()
    return _packed_params(F.pad(padded.cumsum(0), (1, 0)).int(), int(padded.max()), spans=spans)


def _packed_params(ends: torch.Tensor, longest: int, **segments: Any) -> PackedParams:
    return PackedParams(
        qkv_format="thd", cu_seqlens_q=ends, cu_seqlens_kv=ends, max_seqlen_q=longest, max_seqlen_kv=longest, **segments
    )


def _packed_to(pack: PackedParams, device: torch.device) -> PackedParams:
    ends = pack.cu_seqlens_q.to(device)
    moved: dict[str, Any] = {"cu_seqlens_q": ends, "cu_seqlens_kv": ends}  # fields that megatron-core declares
    spans, tree = tuple(span.to(device) for span in pack.spans), pack.tree and pack.tree.to(device)
    return replace(pack, **moved, spans=spans, tree=tree)
