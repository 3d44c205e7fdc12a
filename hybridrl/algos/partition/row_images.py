"""Images of a batch's rows, as its processor made them for the model.

The object column `multi_modal_inputs` has a `RowImages` per row, or None for a row without images. The samples of one
prompt share one object, so that pickle writes the pixels of a prompt once. On Ray a message has references to them.
`multi_modal_data`, the encoded images, stays in the driver. Both names are verl's.

Shapes: K images of a row, N patches of all of them, D numbers of a patch.
"""

import hashlib
from collections.abc import Sequence
from typing import Any, TypedDict, cast

import numpy as np
import torch

from hybridrl.algos.partition import prefix_tree

IMAGE_INPUTS, IMAGE_DATA = "multi_modal_inputs", "multi_modal_data"


class RowImages(TypedDict):
    """The images of a row, in the order of its tokens.

    pixel_values: (N,D) float32 in parts, arrays or `StoredArray`s: the normalized patches. `pixels_of` reads them.
    image_grid_thw: (K,3) int64, patches of each image in time, height and width.
    image_starts: (K,) int64, place of its first token among the row's real tokens.
    image_tokens: (K,) int64, its number of tokens.
    image_hashes: (K,) int64, negative, equal for equal images only.
    """

    pixel_values: tuple[Any, ...]
    image_grid_thw: np.ndarray
    image_starts: np.ndarray
    image_tokens: np.ndarray
    image_hashes: np.ndarray


def joined_images(parts: Sequence[tuple[int, "RowImages | None"]]) -> "RowImages | None":
    """Return the images of a row from those of its parts, None without any.

    Args:
        parts: Number of tokens before the part, and its images, whose places count from its start.
    """
    found = [(start, images) for start, images in parts if images is not None]
    if len(found) < 2 and all(start == 0 for start, _ in found):
        return found[0][1] if found else None
    moved: list[Any] = [{**images, "image_starts": images["image_starts"] + start} for start, images in found]
    names = RowImages.__annotations__.keys() - {"pixel_values"}
    pixels = tuple(part for images in moved for part in images["pixel_values"])
    return cast(
        RowImages,
        {"pixel_values": pixels, **{name: np.concatenate([images[name] for images in moved]) for name in names}},
    )


def images_of(batch: Any) -> list[RowImages | None] | None:
    """Return the images of each row of a `DataProto`; None for a batch without the column."""
    column = batch.non_tensor_batch.get(IMAGE_INPUTS)
    return None if column is None else list(column)


def image_hash(pixels: np.ndarray, grid: np.ndarray) -> int:
    """Return a negative number for an image: no token has it."""
    digest = hashlib.blake2b(np.ascontiguousarray(grid, dtype=np.int64).tobytes(), digest_size=8)
    digest.update(np.ascontiguousarray(pixels).data)
    return -1 - (int.from_bytes(digest.digest(), "little") >> 2)


def prefix_rows(
    input_ids_BL: torch.Tensor, is_real_BL: torch.Tensor, images: Sequence[RowImages | None] | None
) -> list[prefix_tree.Row]:
    """Return what tells the prefixes of rows apart.

    That is their tokens, with the hash of an image for each of its tokens.

    Two prompts with different images of one size have equal tokens, and must not share them.
    """
    rows = prefix_tree.real_tokens(input_ids_BL, is_real_BL)
    for row, found in zip(rows, images if images is not None else (), strict=False):
        if found is not None:
            for start, number, value in zip(
                found["image_starts"], found["image_tokens"], found["image_hashes"], strict=True
            ):
                row[start : start + number] = value
    return rows
