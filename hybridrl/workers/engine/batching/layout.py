"""Arrange the rows of a micro-batch as model input without computing padding.

Both engines use it. Tensors only, no model. Two layouts give the same results:

    padded   one row per sequence, left padding removed, padded on the right to the longest: (b, W)
    packed   one row in all, sequences concatenated, positions restarting at 0 in each: (1, T)

Neither needs an attention mask. Right padding follows every real token, and a causal model cannot see it. In a packed
row the restarting positions mark sequence starts. Flash attention reads them. Other attention is replaced by
`packed_attention`, because not every model of transformers makes masks from positions.

Shapes: B rows of a batch, b rows of a micro-batch, L = P + R columns (prompt and response), N response tokens of a
micro-batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from hybridrl.algos.partition.row_images import RowImages, images_of
from hybridrl.data_plane.futures import arrays_of
from hybridrl.errors import DataError
from hybridrl.protocol import DataProto
from hybridrl.workers.engine.attention.spans import SequenceSpan, sequence_spans
from hybridrl.workers.engine.base import COMPUTED_PAIRS, COMPUTED_TOKENS

if TYPE_CHECKING:  # only runs that share prefixes, or have images, load these
    from hybridrl.workers.engine.attention.spans import AttentionTree
    from hybridrl.workers.engine.image_model import BlankImage


@dataclass(frozen=True)
class GridImages:
    """The images of the rows of a `TokenGrid`, and the blank one of their model."""

    rows: Sequence[RowImages | None]
    blank: "BlankImage"


@dataclass(frozen=True)
class TokenGrid:
    """A batch's `input_ids` (B,L), padded anywhere, with masks that classify its tokens."""

    input_ids: torch.Tensor  # (B,L) int64
    is_real: torch.Tensor  # (B,L) bool, attention_mask == 1
    position: torch.Tensor  # (B,L) int64, index of a real token among its row's real tokens
    is_response: torch.Tensor  # (B,R) bool, response_mask == 1
    lengths: torch.Tensor  # (B,) int64, real tokens
    images: GridImages | None = None  # of a model that reads images


def token_grid(batch: DataProto, blank: "BlankImage | None" = None) -> TokenGrid:
    """Return a batch's tokens on the CPU. Without `response_mask`, R = 0.

    Args:
        batch: The rows.
        blank: The blank image of a model that reads images.

    Raises:
        DataError: A response token is padding or has no token before it, so it has no probability. Or a row has
            images, and the model reads text only.
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
    rows = images_of(batch) or [None] * len(batch)
    if blank is None and any(images is not None for images in rows):
        raise DataError("rows have images, and this model reads text only; give it a model of the policy's family")
    arrays_of(part for images in rows if images is not None for part in images["pixel_values"])  # all in one fetch
    images = None if blank is None else GridImages(rows, blank)
    return TokenGrid(input_ids, is_real, position, is_response, is_real.sum(-1), images)


def placeholder_grid(images: GridImages | None = None) -> TokenGrid:
    """Return one row of two tokens, for a rank without rows in a collective pass."""
    ids = torch.zeros(1, 2, dtype=torch.int64)
    real = torch.ones(1, 2, dtype=torch.bool)
    blank = None if images is None else replace(images, rows=[None])
    return TokenGrid(ids, real, torch.arange(2)[None], real[:, 1:], torch.tensor([2]), blank)


@dataclass(frozen=True)
class SequencePart:
    """Which tokens of each row this process computes.

    Attributes:
        rank: This process among its peers; peer 0 has the first tokens.
        size: Peers.
        group: Their process group.
    """

    rank: int
    size: int
    group: dist.ProcessGroup | None = None


@dataclass(frozen=True)
class TokenLayout:
    """The model's input for one micro-batch, and the positions of its results.

    Flat indices count over the input's tokens.
    """

    input_ids: torch.Tensor  # (b,W) or (1,T) int64; with images (b+1,W) or (1,T+1)
    position_ids: torch.Tensor  # same; with images (4,b+1,W) or (4,1,T+1)
    state: torch.Tensor  # (N,) int64, flat index of the state before each response token
    labels: torch.Tensor  # (N,) int64, the response tokens
    cell: torch.Tensor  # (N,) int64, flat index in (b,R) of each response token
    last: torch.Tensor  # (b,) int64, flat index of each row's last real token
    places: torch.Tensor  # (b,L) int64, flat index of each real token, ascending in a row; -1 on padding
    shape: tuple[int, int]  # (b,R)
    spans: tuple[SequenceSpan, ...] = ()  # of a packed row, for `packed_attention`
    tree: "AttentionTree | None" = None  # of a packed row with shared prefixes, see `tree_layout`
    last_row: torch.Tensor | None = None  # (n,) int64, which rows `last` (n,) is of; None: of all
    part: SequencePart | None = None  # of the rows, if this layout has no more; see `sequence_parallel`
    is_padded: bool = False
    pixel_values: torch.Tensor | None = None  # (N,D) float32, see `image_layout`
    image_grid_thw: torch.Tensor | None = None  # (K,3) int64

    def computed(self) -> dict[str, float]:
        """Return the tokens of a packed row and the tokens that they see: those before them in their rows, and them."""
        positions = self.position_ids if self.pixel_values is None else self.position_ids[0]
        pairs = int((positions + 1).sum())
        return {COMPUTED_TOKENS: float(self.input_ids.numel()), COMPUTED_PAIRS: float(pairs)}

    def to(self, device: torch.device) -> "TokenLayout":
        """Return the layout with its tensors on a device."""
        if device.type == "cpu":
            return self
        moved: dict[str, Any] = {name: v.to(device) for name, v in vars(self).items() if isinstance(v, torch.Tensor)}
        spans, tree = tuple(span.to(device) for span in self.spans), self.tree and self.tree.to(device)
        return replace(self, **moved, spans=spans, tree=tree)


def make_layout(grid: TokenGrid, rows: list[int], *, packed: bool) -> TokenLayout:
    """Return the layout of some rows of a batch.

    Its shape is (1, sum of lengths) if packed, else (len(rows), longest).
    """
    is_real, lengths, position = grid.is_real[rows], grid.lengths[rows], grid.position[rows]
    ids, is_response = grid.input_ids[rows], grid.is_response[rows]
    spans: tuple[SequenceSpan, ...] = ()
    if packed:
        spans = sequence_spans([length for length in lengths.tolist() if length] or [1])
        start = lengths.cumsum(0) - lengths
        input_ids, position_ids = ids[is_real][None], position[is_real][None]
    else:
        width = int(lengths.max())
        start = torch.arange(len(rows)) * width
        input_ids = torch.zeros(len(rows), width, dtype=torch.int64)
        input_ids[torch.arange(width) < lengths[:, None]] = ids[is_real]
        position_ids = torch.arange(width).expand(len(rows), width)
    if input_ids.numel() == 0:  # only rows without tokens, which no loss counts, but the model needs an input
        input_ids = position_ids = torch.zeros(1, 1, dtype=torch.int64)
    row, column = is_response.nonzero(as_tuple=True)
    token = column + (ids.size(1) - is_response.size(1))
    return TokenLayout(
        input_ids=input_ids,
        position_ids=position_ids,
        state=start[row] + position[row, token] - 1,
        labels=ids[row, token],
        cell=row * is_response.size(1) + column,
        last=(start + lengths - 1).clamp(0, input_ids.numel() - 1),
        places=torch.where(is_real, start[:, None] + position, -1),
        shape=(len(rows), is_response.size(1)),
        spans=spans,
        is_padded=not packed,
    )
