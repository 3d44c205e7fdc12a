"""Add images to the layout of a micro-batch.

That is positions of image tokens, and patches in the order of their tokens.

A blank image of one token follows in a sequence of its own, which no other token sees and no loss reads. Without it a
rank whose rows have no images would skip the vision tower, while the others wait for its part of the tower's weights.

Shapes: as in `layout.py`; N patches of D numbers, K images.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from hybridrl.algos.partition.row_images import RowImages
from hybridrl.workers.engine.attention.spans import SequenceSpan
from hybridrl.workers.engine.batching.layout import GridImages, TokenLayout
from hybridrl.workers.engine.image_model import image_positions, pixels_of


def with_images(layout: TokenLayout, images: GridImages, rows: Sequence[int]) -> TokenLayout:
    """Return the layout with the images of these rows and a blank one, and positions (4,b,W) or (4,1,T).

    The first position is the token's in its row, the others are those of `image_positions`.

    Args:
        layout: Of the tokens alone, with their places.
        images: Of the batch.
        rows: The rows of the micro-batch.
    """
    height, width = layout.input_ids.shape
    positions = layout.position_ids.reshape(1, -1).repeat(4, 1)
    found: dict[int, tuple[np.ndarray, np.ndarray]] = {}  # place of the first token -> patches, grid
    for row, row_places in zip(rows, layout.places, strict=True):
        if (own := images.rows[row]) is not None:
            place = row_places[row_places >= 0]
            positions[1:, place] = image_positions(len(place), own)
            _collect(found, own, place)
    in_order = [found[place] for place in sorted(found)]
    blank = images.blank
    patches = torch.from_numpy(np.concatenate([*(pixels for pixels, _ in in_order), blank.pixel_values]))
    grids = torch.from_numpy(np.concatenate([*(grid for _, grid in in_order), blank.grid]))
    extra = width if layout.is_padded else 1  # cells after the others, of which the first is the blank image's
    ids = torch.cat([layout.input_ids.reshape(-1), torch.zeros(extra, dtype=torch.int64)])
    ids[height * width] = blank.token_id
    positions = torch.cat([positions, torch.arange(extra).repeat(4, 1)], dim=1)
    shape = (height + 1, width) if layout.is_padded else (1, width + 1)
    return replace(
        layout,
        input_ids=ids.view(shape),
        position_ids=positions.view(4, *shape),
        spans=(*layout.spans, _span_of_one(height * width)) if layout.spans else (),
        tree=None if layout.tree is None else layout.tree.extended(1),
        pixel_values=patches,
        image_grid_thw=grids,
    )


def _collect(found: dict[int, tuple[np.ndarray, np.ndarray]], images: RowImages, place: torch.Tensor) -> None:
    """Add a row's images by the place of their first token.

    Rows that share an image have the same place.
    """
    pixels, ends = pixels_of(images), images["image_grid_thw"].prod(-1).cumsum()
    for number, (start, end) in enumerate(zip(images["image_starts"], ends, strict=True)):
        grid = images["image_grid_thw"][number : number + 1]
        found[int(place[start])] = pixels[end - grid.prod() : end], grid


def _span_of_one(token: int) -> SequenceSpan:
    return SequenceSpan(torch.tensor([token]), torch.tensor([0]), 1)
