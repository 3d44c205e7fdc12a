"""How the rows of a micro-batch lie in the model's input, so that padding is not computed. Tensors only, no model.

Two layouts give the same results:

    padded   one row per sequence, left padding removed, filled up on the right to the longest: (b, W)
    packed   one row in all, sequences end to end, positions restarting at 0 with each: (1, T)

Neither needs an attention mask. On the right, padding is after every real token, which a causal model cannot see. A
packed row's restarting positions say where sequences begin: flash attention reads them, eager attention gets a
block-diagonal mask made from them (`find_packed_sequence_indices` in transformers' masking_utils), SDPA is replaced by
`packed_attention`.

Shapes: B rows of a batch, b rows of a micro-batch, L = P + R columns (prompt and response), N response tokens of a
micro-batch.
"""

from dataclasses import dataclass, replace

import torch

from hybridrl.errors import DataError
from hybridrl.protocol import DataProto
from hybridrl.workers.engine.batching.packed_attention import Run, runs_of


@dataclass(frozen=True)
class TokenGrid:
    """A batch as the loader laid it out: `input_ids` (B,L) with padding anywhere, and which of its tokens are what."""

    input_ids: torch.Tensor  # (B,L) int64
    is_real: torch.Tensor  # (B,L) bool, attention_mask == 1
    position: torch.Tensor  # (B,L) int64, index of a real token among its row's real tokens
    is_response: torch.Tensor  # (B,R) bool, response_mask == 1
    lengths: torch.Tensor  # (B,) int64, real tokens


def token_grid(batch: DataProto) -> TokenGrid:
    """Return a batch's tokens, on the CPU. A batch without `response_mask` has R = 0.

    Raises DataError where a response token is padding or has no token before it: it would have no probability.
    """
    input_ids, is_real = batch.batch["input_ids"].cpu(), batch.batch["attention_mask"].cpu().bool()
    is_response = batch.batch.get("response_mask", input_ids[:, :0]).cpu().bool()
    position = is_real.cumsum(-1) - 1
    prompt_width = input_ids.size(1) - is_response.size(1)
    unusable = is_response & ~(is_real & (position > 0))[:, prompt_width:]
    if unusable.any():
        row, column = unusable.nonzero()[0].tolist()
        raise DataError(
            f"response_mask[{row}, {column}] is 1 but attention_mask has no token there or none before it; "
            "a response token needs both"
        )
    return TokenGrid(input_ids, is_real, position, is_response, is_real.sum(-1))


def placeholder_grid() -> TokenGrid:
    """Return one row of two tokens, for a rank that must take part in a collective pass but has no rows left."""
    ids = torch.zeros(1, 2, dtype=torch.int64)
    real = torch.ones(1, 2, dtype=torch.bool)
    return TokenGrid(ids, real, torch.arange(2)[None], real[:, 1:], torch.tensor([2]))


@dataclass(frozen=True)
class Layout:
    """The model's input for one micro-batch, and where to read its results.

    Flat indices count over the input's tokens.
    """

    input_ids: torch.Tensor  # (b,W) or (1,T) int64
    position_ids: torch.Tensor  # same
    state: torch.Tensor  # (N,) int64, flat index of the state before each response token
    labels: torch.Tensor  # (N,) int64, the response tokens
    cell: torch.Tensor  # (N,) int64, flat index in (b,R) of each response token
    last: torch.Tensor  # (b,) int64, flat index of each row's last real token
    shape: tuple[int, int]  # (b,R)
    runs: tuple[Run, ...] = ()  # of a packed row: what `packed_attention` needs

    def to(self, device: torch.device) -> "Layout":
        """Return the layout with its tensors on a device."""
        if device.type == "cpu":
            return self
        moved = {name: v.to(device) for name, v in vars(self).items() if isinstance(v, torch.Tensor)}
        return replace(self, **moved, runs=tuple(run.to(device) for run in self.runs))


def lay_out(grid: TokenGrid, rows: list[int], *, packed: bool) -> Layout:
    """Return the layout of some rows of a batch: (1, sum of lengths) if packed, else (len(rows), longest)."""
    is_real, lengths, position = grid.is_real[rows], grid.lengths[rows], grid.position[rows]
    ids, is_response = grid.input_ids[rows], grid.is_response[rows]
    runs: tuple[Run, ...] = ()
    if packed:
        runs = runs_of([length for length in lengths.tolist() if length] or [1])
        start = lengths.cumsum(0) - lengths
        input_ids, position_ids = ids[is_real][None], position[is_real][None]
    else:
        width = int(lengths.max())
        start = torch.arange(len(rows)) * width
        input_ids = torch.zeros(len(rows), width, dtype=torch.int64)
        input_ids[torch.arange(width) < lengths[:, None]] = ids[is_real]
        position_ids = torch.arange(width).expand(len(rows), width)
    if (
        input_ids.numel() == 0
    ):  # only rows without tokens, which no loss counts; a model still needs something to run on
        input_ids = position_ids = torch.zeros(1, 1, dtype=torch.int64)
    row, column = is_response.nonzero(as_tuple=True)
    token = column + (ids.size(1) - is_response.size(1))
    return Layout(
        input_ids=input_ids,
        position_ids=position_ids,
        state=start[row] + position[row, token] - 1,
        labels=ids[row, token],
        cell=row * is_response.size(1) + column,
        last=(start + lengths - 1).clamp(0, input_ids.numel() - 1),
        shape=(len(rows), is_response.size(1)),
        runs=runs,
    )
