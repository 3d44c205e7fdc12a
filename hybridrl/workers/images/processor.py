"""The image processor of a model: decoded images to the tokens and patches that the model reads.

One call of it per row is the only source of both.

Shapes: K images of a row.
"""

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from hybridrl.algos.partition.row_images import RowImages, image_hash
from hybridrl.data_plane.futures import stored
from hybridrl.errors import ConfigError, DataError, model_errors
from hybridrl.workers.engine.hf_model import IMAGE_MODELS, TEXT_ONLY, overridden_config, reads_images

if TYPE_CHECKING:
    from PIL import Image


MARK = "qzImageqz"  # letters only: templates leave them as they are


class ImageProcessor:
    """The image processor of a model, and the token that its chat template writes for an image.

    Args:
        path: Directory or Hugging Face name of the model.
        tokenizer: Its tokenizer.
        options: `data.mm_processor_kwargs`: settings that replace the processor's own.
        max_images: Most images of one row.
        model_type: Family of the model.

    Raises:
        ConfigError: The model has no image processor, or none whose tokens can be counted.
    """

    def __init__(
        self,
        path: str,
        tokenizer: Any,
        *,
        options: dict[str, Any],
        max_images: int,
        token_id: int,
        model_type: str = "",
    ):
        from transformers import AutoImageProcessor

        with model_errors(path, "cannot load its image processor"):
            self._processor: Any = AutoImageProcessor.from_pretrained(path, **options)
        lacking = [name for name in ("merge_size", "get_number_of_image_patches") if not hasattr(self._processor, name)]
        if lacking:
            raise ConfigError(
                f"{path}: {type(self._processor).__name__} has no {lacking[0]}, so tokens cannot be counted"
            )
        self._options, self.max_images, self.token_id = options, max_images, token_id
        self._merged = self._processor.merge_size**2
        self._tokenizer, self.model_type = tokenizer, model_type
        self.token: str = tokenizer.convert_ids_to_tokens(token_id)

    @cached_property
    def text(self) -> str:
        """Return the text that the chat template writes for an image, with one placeholder.

        Raises:
            ConfigError: The template has none.
        """
        content = [{"type": "text", "text": MARK}, {"type": "image"}, {"type": "text", "text": MARK}]
        whole: str = self._tokenizer.apply_chat_template([{"role": "user", "content": content}], tokenize=False)
        text = [*whole.split(MARK), ""][1]
        if text.count(self.token) != 1:
            raise ConfigError(f"the chat template writes {text[:80]!r} for an image, and not one {self.token}")
        return text

    @property
    def form(self) -> dict[str, Any]:
        """Return what two models must have in common to read the same patches and tokens."""
        names = ("patch_size", "temporal_patch_size", "merge_size", "image_mean", "image_std")
        return {"image_token_id": self.token_id} | {name: getattr(self._processor, name, None) for name in names}

    @staticmethod
    def blank(side: int) -> "Image.Image":
        """Return a black image with sides of this many pixels."""
        from PIL import Image

        return Image.new("RGB", (side, side))

    def num_tokens(self, images: Sequence["Image.Image"]) -> int:
        """Return how many tokens the processor makes of the images, without computing their patches."""
        counted = (self._processor.get_number_of_image_patches(image.height, image.width, {}) for image in images)
        return sum(number // self._merged for number in counted)

    def __call__(self, tokens: np.ndarray, images: Sequence["Image.Image"]) -> tuple[np.ndarray, RowImages]:
        """Return the tokens of a row with its images, and what the model reads.

        The tokens of an image stand in place of its placeholder.

        Args:
            tokens: Of the chat template, with one placeholder per image.
            images: In the order of the placeholders.
        """
        made = self._processor(images=list(images), return_tensors="np")
        grids, pixels = np.asarray(made["image_grid_thw"], dtype=np.int64), np.asarray(made["pixel_values"], np.float32)
        numbers = grids.prod(-1) // self._merged
        ends = grids.prod(-1).cumsum()
        repeats = np.ones(len(tokens), dtype=np.int64)
        [placeholders] = (tokens == self.token_id).nonzero()
        repeats[placeholders] = numbers
        starts = (repeats.cumsum() - repeats)[placeholders]
        parts = np.split(pixels, ends[:-1])
        hashes = [image_hash(part, grid) for part, grid in zip(parts, grids, strict=True)]
        return np.repeat(tokens, repeats), {
            "pixel_values": tuple(stored([pixels])),
            "image_grid_thw": grids,
            "image_starts": starts,
            "image_tokens": numbers,
            "image_hashes": np.array(hashes, dtype=np.int64),
        }

    def check_placeholders(self, tokens: Sequence[int], num_images: int, location: str) -> None:
        """Raise DataError unless a row's tokens have one placeholder per image."""
        found = sum(token == self.token_id for token in tokens)
        if found != num_images:
            raise DataError(
                f"{location}: the chat template writes {found} times {self.token} for {num_images} images; a prompt "
                "must not have this token in its text, and the template must write it once per image"
            )


def expanded(values: np.ndarray, images: RowImages) -> np.ndarray:
    """Return values of a template's tokens as values of the row's; an image's are repeated."""
    numbers = images["image_tokens"]
    repeats = np.ones(len(values), dtype=np.int64)
    repeats[images["image_starts"] - (numbers - 1).cumsum() + numbers - 1] = numbers
    return np.repeat(values, repeats)


def load_processor(model: Any, tokenizer: Any, data: Any, *, freezes: str | None = None) -> ImageProcessor | None:
    """Return a model's image processor; None without images, or if it cannot be read.

    Args:
        model: Settings of the model.
        tokenizer: Its tokenizer.
        data: Settings of the data.
        freezes: The setting that freezes its vision tower; None: none does.

    Raises:
        ConfigError: The model has no vision tower to freeze, or its processor cannot be used.
    """
    try:
        found = overridden_config(model.path, dict(model.override_config), trust_remote_code=model.trust_remote_code)
    except ConfigError:  # the workers raise it
        return None
    if reads_images(found):
        options, limit = dict(data.mm_processor_kwargs), data.max_images_per_prompt
        own = {"token_id": found.image_token_id, "model_type": found.model_type}
        return ImageProcessor(model.path, tokenizer, options=options, max_images=limit, **own)
    if freezes is not None:
        raise ConfigError(
            f"{freezes}=true: {model.path} (model_type={found.model_type}) has no vision tower that "
            f"runs; set it to false, or take a model of {', '.join(IMAGE_MODELS)} (the last two with "
            f"model.override_config.{TEXT_ONLY}=false)"
        )
    return None
