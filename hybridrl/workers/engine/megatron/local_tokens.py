"""What one process computes of a micro-batch: a layout padded to what its peers can share, and its tokens of it.

Shapes: b rows, s tokens of this process, N response tokens whose state this process has.
"""

from dataclasses import dataclass, replace
from math import lcm

import torch

from hybridrl.workers.engine.batching.layout import Layout
from hybridrl.workers.engine.batching.packed_attention import runs_of
from hybridrl.workers.engine.megatron.layers import Pack, two_chunks


@dataclass(frozen=True)
class Sharing:
    """How tokens are shared: this process's place among its context-parallel peers, and tensor-parallel peers that
    share activations.
    """

    cp_rank: int
    cp_size: int
    sp_size: int

    @property
    def sequence_multiple(self) -> int:
        """A sequence's length: two chunks per context-parallel peer."""
        return 2 * self.cp_size if self.cp_size > 1 else 1

    @property
    def multiple(self) -> int:
        """The length of a row: besides, each context-parallel peer's part is cut again among those that share
        activations.
        """
        return lcm(self.sequence_multiple, self.cp_size * self.sp_size)


@dataclass(frozen=True)
class Piece:
    """The model's input of this process, and where to read results; as `Layout`, but for some of its tokens."""

    rows: list[int]  # of the batch; none in a pass that only keeps peers company
    input_ids: torch.Tensor  # (b,s) or (1,s) int64
    position_ids: torch.Tensor  # same
    pack: Pack | None
    state: torch.Tensor  # (N,) int64, flat index of the state before each response token
    labels: torch.Tensor  # (N,) int64
    cell: torch.Tensor  # (N,) int64, flat index in (b,R)
    last: torch.Tensor  # (n,) int64, flat index of the last real token of each row that ends here
    last_row: torch.Tensor  # (n,) int64, which row that is
    shape: tuple[int, int]  # (b,R)

    def to(self, device: torch.device) -> "Piece":
        """Return the piece with its tensors on a device."""
        if device.type == "cpu":
            return self
        moved = {name: value.to(device) for name, value in vars(self).items() if isinstance(value, torch.Tensor)}
        return replace(self, **moved, pack=self.pack and _moved(self.pack, device))


def piece_of(layout: Layout, rows: list[int], sharing: Sharing, *, packed: bool) -> Piece:
    """Return this process's piece of a micro-batch."""
    is_start = layout.position_ids.flatten() == 0
    starts = is_start.nonzero().squeeze(-1)
    sequence = is_start.cumsum(0) - 1
    lengths = torch.diff(starts, append=torch.tensor([len(sequence)]))
    padded = _padded(lengths, sharing, packed=packed)
    shift = padded.cumsum(0) - padded - starts
    held, inverse = _held(padded.tolist(), sharing)

    def flat(index: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(where this process has them, which of them it has)"""
        found = inverse[index + shift[sequence[index]]]
        return found[found >= 0], (found >= 0).nonzero().squeeze(-1)

    moved = torch.arange(len(sequence)) + shift[sequence]
    ids = torch.zeros(int(padded.sum()), dtype=torch.int64).index_copy(0, moved, layout.input_ids.flatten())
    positions = torch.cat([torch.arange(n) for n in padded.tolist()])
    view = (1, -1) if packed else (layout.input_ids.size(0), -1)
    state, kept = flat(layout.state)
    last, last_row = flat(layout.last)
    return Piece(
        rows=rows,
        input_ids=ids[held].view(view),
        position_ids=positions[held].view(view),
        pack=_pack(padded, sharing) if packed else None,
        state=state,
        labels=layout.labels[kept],
        cell=layout.cell[kept],
        last=last,
        last_row=last_row,
        shape=layout.shape,
    )


def _padded(lengths: torch.Tensor, sharing: Sharing, *, packed: bool) -> torch.Tensor:
    """Lengths that can be shared: every row's of a padded batch, the sum of a pack's."""
    multiple = sharing.sequence_multiple if packed else sharing.multiple
    padded = -(-lengths // multiple) * multiple
    if packed:
        padded[-1] += -int(padded.sum()) % sharing.multiple
    return padded


def _held(padded: list[int], sharing: Sharing) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (the tokens of this process, counted over all padded sequences; for every token its place here, -1 if it
    has none).
    """
    start, parts = 0, []
    for length in padded:
        parts.append(start + two_chunks(length, sharing.cp_rank, sharing.cp_size))
        start += length
    held = torch.cat(parts)
    return held, torch.full((start,), -1).index_copy(0, held, torch.arange(len(held)))


def _pack(padded: torch.Tensor, sharing: Sharing) -> Pack:
    ends = torch.nn.functional.pad(padded.cumsum(0), (1, 0)).int()
    longest = int(padded.max())
    return Pack(
        qkv_format="thd",
        cu_seqlens_q=ends,
        cu_seqlens_kv=ends,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        runs=runs_of(padded.tolist()) if sharing.cp_size == 1 else (),
    )


def _moved(pack: Pack, device: torch.device) -> Pack:
    ends = pack.cu_seqlens_q.to(device)
    return replace(pack, cu_seqlens_q=ends, cu_seqlens_kv=ends, runs=tuple(run.to(device) for run in pack.runs))
