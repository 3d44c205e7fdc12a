"""Images of prompts: from a row of a data file to what the model reads.

`RLHFDataset` uses an `ImageProcessor`, in the driver. One call of the model's own image processor per row is the only
source of its image tokens and of its patches. What a data file may hold is checked before a run starts: every image is
decoded once.

Shapes: K images of a row.
"""

import io
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hybridrl.algos.partition.row_images import RowImages, image_hash
from hybridrl.errors import ConfigError, DataError, model_errors

if TYPE_CHECKING:
    from PIL import Image

TAG, VIDEO_TAG = "<image>", "<video>"
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
MODES = frozenset({"1", "L", "LA", "P", "PA", "RGB", "RGBA"})
MAX_BYTES = 50_000_000  # of an encoded image
MAX_PIXELS = 50_000_000  # 150 MB as RGB; a photograph of a phone has 12 to 50 million
MIN_SIDE = 4  # pixels: an image of fewer shows nothing, and is often the rest of a failed download
MAX_RATIO = 200  # of the sides, the limit of Qwen's image processors


class ImageProcessor:
    """The image processor of a model, and the token that its chat template writes for an image.

    Args:
        path: Directory or Hugging Face name of the model.
        tokenizer: Its tokenizer.
        options: `data.mm_processor_kwargs`: settings that replace the processor's own.
        max_images: Most images of one row.

    Raises:
        ConfigError: The model has no image processor, or none whose tokens can be counted.
    """

    def __init__(self, path: str, tokenizer: Any, *, options: dict[str, Any], max_images: int, token_id: int):
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
        self.token = tokenizer.convert_ids_to_tokens(token_id)

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
            "pixel_values": pixels,
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


def image_list(value: Any, location: str, *, max_images: int) -> list[Any]:
    """Return the entries of a row's image column: a list, one image, or nothing."""
    if value is None:
        return []
    found = value if isinstance(value, list) else [value]
    if len(found) > max_images:
        raise DataError(
            f"{location} has {len(found)} images, more than data.max_images_per_prompt={max_images}; raise it, or "
            "leave the row out"
        )
    return found


def encoded_image(value: Any, location: str, *, folder: str) -> bytes:
    """Return the bytes of an entry of an image column.

    Args:
        value: Bytes, a mapping with `bytes` or `path` as Hugging Face's datasets have it, or a path.
        location: File and row, for errors.
        folder: Of the data file, in which paths are.

    Raises:
        DataError: It is none of them, or a path that is not a file in that folder.
    """
    if isinstance(value, dict):
        value = value.get("bytes") or value.get("path")
    if isinstance(value, str):
        value = _file_bytes(value, location, folder=folder)
    if not isinstance(value, bytes | bytearray) or not value:
        raise DataError(f"{location}: an image is {value!r:.60}; give bytes, a mapping with bytes or path, or a path")
    if len(value) > MAX_BYTES:
        raise DataError(f"{location}: an image has {len(value)} bytes, at most {MAX_BYTES} are read; compress it")
    return bytes(value)


def _file_bytes(path: str, location: str, *, folder: str) -> bytes:
    if "://" in path or path.startswith("data:"):
        raise DataError(f"{location}: {path!r:.60} is an address; images are not fetched: store them beside the data")
    try:
        root = os.path.realpath(folder)
        file = os.path.realpath(os.path.join(root, path))
        if os.path.commonpath([root, file]) != root:
            raise DataError(
                f"{location}: the image {path!r:.100} is not in the folder of its data file, {folder}; move it there, "
                "and give its path relative to it"
            )
        if os.path.getsize(file) > MAX_BYTES:
            raise DataError(f"{location}: the image {path!r:.100} has more than {MAX_BYTES} bytes; compress it")
        return Path(file).read_bytes()
    except DataError:  # also a ValueError
        raise
    except (OSError, ValueError) as error:
        raise DataError(f"{location}: the image {path!r:.100} cannot be read: {error}") from error


def decoded_image(encoded: bytes, location: str) -> "Image.Image":
    """Return an image as RGB, transparent parts white, turned as its EXIF entry says.

    Raises:
        DataError: It is damaged, of another format, animated, of another colour model, too small, too large, or too
            narrow. Its size is checked before it is decoded.
    """
    from PIL import Image, ImageOps

    try:
        with Image.open(io.BytesIO(encoded), formats=FORMATS) as image:
            if problem := _problem(image):
                raise DataError(f"{location}: {problem}")
            image.load()
            return _as_rgb(ImageOps.exif_transpose(image))
    except DataError:
        raise
    except Image.UnidentifiedImageError as error:
        raise DataError(
            f"{location}: {len(encoded)} bytes that begin with {encoded[:12]!r} are no image; formats are "
            f"{', '.join(FORMATS)}"
        ) from error
    except (
        Exception
    ) as error:  # decoders of damaged files raise anything: OSError, ValueError, SyntaxError, struct.error
        reason = " ".join(str(error).split()) or type(error).__name__
        raise DataError(f"{location}: an image is damaged or too large: {reason:.200}") from error


def _problem(image: "Image.Image") -> str | None:
    """Return why an opened image, not decoded yet, is not read."""
    short, long = sorted(image.size)
    size = f"an image of {image.width}x{image.height} pixels"
    if image.width * image.height > MAX_PIXELS:
        return f"{size} is larger than {MAX_PIXELS} pixels; make it smaller"
    if short < MIN_SIDE:
        return f"{size} has a side of fewer than {MIN_SIDE}; leave the row out"
    if long > MAX_RATIO * short:
        return f"{size} is more than {MAX_RATIO} times as long as wide; cut it"
    if (frames := getattr(image, "n_frames", 1)) > 1:
        return f"{size} has {frames} frames; store the frame that you mean"
    if image.mode not in MODES:
        return f"{size} has the colour model {image.mode}; convert it to RGB"
    return None


def _as_rgb(image: "Image.Image") -> "Image.Image":
    from PIL import Image

    if image.mode not in ("LA", "PA", "RGBA") and "transparency" not in image.info:
        return image.convert("RGB")
    rgba = image.convert("RGBA")
    white = Image.new("RGBA", rgba.size, "white")
    return Image.alpha_composite(white, rgba).convert("RGB")


def as_encoded(image: "Image.Image") -> bytes:
    """Return an image of Pillow as PNG."""
    with io.BytesIO() as stream:
        image.save(stream, format="PNG")
        return stream.getvalue()


def messages_with_images(messages: list[dict], num_images: int, location: str) -> list[dict]:
    """Return the messages with contents as a chat template reads images: lists of texts and images.

    The k-th `<image>` of the texts is the k-th image. In messages without any, the images come before the first text of
    the user, as in TRL. Messages that have lists already are returned as they are.

    Raises:
        DataError: The messages mention another number of images than the row has, or a video.
    """
    found = [{**message, "content": _parts(message["content"], location)} for message in messages]
    mentioned = sum(part["type"] == "image" for message in found for part in message["content"])
    if not mentioned and num_images:
        first = next((message for message in found if message["role"] == "user"), found[0])
        first["content"] = [{"type": "image"}] * num_images + first["content"]
    elif mentioned != num_images:
        raise DataError(
            f"{location}: the prompt mentions {mentioned} images ({TAG}), and the row has {num_images}; make both equal"
        )
    return found


def _parts(content: Any, location: str) -> list[dict[str, Any]]:
    """Return a message's content as a list of texts and images."""
    if isinstance(content, str):
        content = [{"type": "text", "text": content}]
    parts: list[dict[str, Any]] = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in ("text", "image") or VIDEO_TAG in str(part.get("text") or ""):
            raise DataError(f"{location}: {part!r:.60} is neither a text nor an image; videos and audio are not read")
        if kind == "image":
            parts.append({"type": "image"})
            continue
        for number, text in enumerate(part["text"].split(TAG)):
            parts += [{"type": "image"}] * (number > 0) + ([{"type": "text", "text": text}] if text else [])
    return parts


def check_tokens(tokens: int, limit: int, location: str) -> None:
    """Raise DataError for a row with images that is too long: truncation would cut images."""
    if tokens > limit:
        raise DataError(
            f"{location}: a prompt with images has {tokens} tokens, more than data.max_prompt_length={limit}; raise "
            "it, set data.filter_overlong_prompts=true, or lower max_pixels in data.mm_processor_kwargs"
        )
