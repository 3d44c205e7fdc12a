"""Patches back to the picture that a model reads, for engines that take pictures.

So an engine and the trainer read the same pixels, and only the driver resizes.
"""

from typing import TYPE_CHECKING, Any

import numpy as np

from hybridrl.algos.partition.row_images import RowImages
from hybridrl.errors import model_errors
from hybridrl.workers.engine.image_model import pixels_of

if TYPE_CHECKING:
    from PIL import Image


class PictureReader:
    """Undoes what the image processor of a model has done after it resized a picture.

    Args:
        path: Directory or Hugging Face name of the model.
    """

    def __init__(self, path: str):
        from transformers import AutoImageProcessor

        with model_errors(path, "cannot load its image processor"):
            self._processor: Any = AutoImageProcessor.from_pretrained(path)

    def __call__(self, images: RowImages) -> list["Image.Image"]:
        """Return the pictures of a row, which the image processor must not resize again."""
        ends = images["image_grid_thw"].prod(-1).cumsum()
        parts = np.split(pixels_of(images), ends[:-1])
        return [self._picture(part, grid) for part, grid in zip(parts, images["image_grid_thw"], strict=True)]

    def _picture(self, patches: np.ndarray, grid: np.ndarray) -> "Image.Image":
        from PIL import Image

        made, (_, height, width) = self._processor, grid.tolist()
        merge, side = made.merge_size, made.patch_size
        shape = (height // merge, width // merge, merge, merge, -1, made.temporal_patch_size, side, side)
        first = patches.reshape(shape)[:, :, :, :, :, 0]  # a still picture repeats in time
        pixels = first.transpose(0, 2, 5, 1, 3, 6, 4).reshape(height * side, width * side, -1)
        pixels = (pixels * np.array(made.image_std) + np.array(made.image_mean)) / made.rescale_factor
        return Image.fromarray(pixels.round().clip(0, 255).astype(np.uint8))


def collapsed(tokens: list[int], images: RowImages | None) -> list[int]:
    """Return tokens with one placeholder per image, as engines take them that insert the others themselves."""
    if images is None:
        return tokens
    kept = np.ones(len(tokens), dtype=bool)
    for start, number in zip(images["image_starts"], images["image_tokens"], strict=True):
        kept[start + 1 : start + number] = False
    return np.array(tokens)[kept].tolist()
