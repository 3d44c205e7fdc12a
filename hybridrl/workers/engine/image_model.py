"""Models that read images: their tower, their blank image, and the positions of image tokens.

Engines and rollouts use it in worker processes. `algos/partition/row_images.py` describes the images of a row;
`hf_model.py` has the families.

Shapes: L tokens of a row, N patches of D numbers, b prompts of width P.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import nn

from hybridrl.algos.partition.row_images import RowImages
from hybridrl.data_plane.futures import arrays_of

TEXT_ONLY = ("spans", "tree")
"""Arguments of the text's attention, which the model would pass on to its tower's."""


@dataclass(frozen=True)
class BlankImage:
    """The smallest image, of one token.

    Every micro-batch has one, so that all ranks compute the tower at the same time.

    Attributes:
        token_id: Of an image's tokens.
        merge: Patches of a token in each direction.
        width: D.
    """

    token_id: int
    merge: int
    width: int

    @classmethod
    def of(cls, config: Any) -> "BlankImage":
        """Return the blank image of the model with this config."""
        vision = config.vision_config
        width = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
        return cls(config.image_token_id, vision.spatial_merge_size, width)

    @cached_property
    def pixel_values(self) -> np.ndarray:
        """Return its patches."""
        return np.zeros((self.merge**2, self.width), dtype=np.float32)

    @property
    def grid(self) -> np.ndarray:
        """Return its row of `image_grid_thw`."""
        return np.array([[1, self.merge, self.merge]])


def placeholder_ids(config: Any) -> tuple[int, ...]:
    """Return the tokens that stand for images and videos, which a policy must not sample."""
    return config.image_token_id, config.video_token_id


def pixels_of(images: RowImages) -> np.ndarray:
    """Return the patches (N,D) float32 of a row."""
    parts = arrays_of(images["pixel_values"])
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def image_positions(length: int, images: RowImages | None) -> torch.Tensor:
    """Return the positions (3,L) int64 of a row's tokens in time, height and width.

    A text token is one after the largest position before it. An image's tokens lie on a grid that begins there
    (M-RoPE, arXiv:2409.12191). So an image takes as many positions as its longer side has tokens.
    """
    positions = np.tile(np.arange(length), (3, 1))
    if images is not None:
        for start, number, grid in zip(
            images["image_starts"], images["image_tokens"], images["image_grid_thw"], strict=True
        ):
            merge = round((int(grid.prod()) / int(number)) ** 0.5)
            sides = (int(grid[0]), int(grid[1]) // merge, int(grid[2]) // merge)
            end, first = start + number, positions[0, start]
            positions[:, start:end] = first + np.indices(sides).reshape(3, -1)
            positions[:, end:] += max(sides[1:]) - number
    return torch.from_numpy(positions)


def vision_tower(model: Any) -> nn.Module:
    """Return the part of a model that computes images, with its projection to the text's states."""
    tower: nn.Module = model.model.visual
    return tower


def num_tower_params(config: Any) -> int:
    """Return the number of parameters of a config's vision tower, without loading or drawing."""
    import transformers

    with torch.device("meta"):
        model = transformers.AutoModelForImageTextToText.from_config(config)
    return sum(parameter.numel() for parameter in vision_tower(model).parameters())


def prepare_images(model: Any) -> BlankImage:
    """Return the blank image of a model that reads images.

    Its tower then ignores arguments of the text's attention, which describe tokens and not patches.
    """

    def drop(tower: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        return args, {name: value for name, value in kwargs.items() if name not in TEXT_ONLY}

    vision_tower(model).register_forward_pre_hook(drop, with_kwargs=True)
    return BlankImage.of(model.config)


def prefill_inputs(
    positions: torch.Tensor, mask: torch.Tensor, images: Sequence[RowImages | None]
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Return positions (4,b,P), offsets (b,) of the positions after them, and a model's arguments for the images.

    After the prefill a rollout has the images in its key-value cache, and only needs the offsets.

    Args:
        positions: (b,P) int64, of the tokens in their prompts.
        mask: (b,P), 1 on tokens.
        images: Of each prompt.
    """
    four = positions[None].repeat(4, 1, 1)
    offsets = torch.zeros(len(mask), dtype=torch.int64, device=mask.device)
    for row, found in enumerate(images):
        if found is not None:
            own = image_positions(int(mask[row].sum()), found).to(mask.device)
            four[1:, row, mask[row].bool()] = own
            offsets[row] = own.max() + 1 - own.shape[1]
    some = [found for found in images if found is not None]
    if not some:
        return four, offsets, {}
    patches = torch.from_numpy(np.concatenate(arrays_of(part for found in some for part in found["pixel_values"])))
    grids = torch.from_numpy(np.concatenate([found["image_grid_thw"] for found in some]))
    return four, offsets, {"pixel_values": patches.to(mask.device), "image_grid_thw": grids.to(mask.device)}
