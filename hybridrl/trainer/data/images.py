"""Images of data files' rows: their column, their places in the text, refusals.

The datasets use an `ImageColumn`, in the driver. `workers/images` turns the images into what a model reads. What a data
file may hold is checked before a run starts: every image is decoded once.
"""

import base64
import os
from collections.abc import Iterable, Iterator, Sequence, Set
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hybridrl.algos.partition.row_images import IMAGE_DATA, IMAGE_INPUTS
from hybridrl.errors import DataError
from hybridrl.workers import images as row_images

if TYPE_CHECKING:
    from PIL import Image

    from hybridrl.trainer.data.parquet import ParquetRows

TAG, VIDEO_TAG = "<image>", "<video>"
TRL_COLUMN = "image"


class ImageColumn:
    """The images of files' rows, for a dataset that tokenizes in its constructor.

    Args:
        rows: The files.
        key: `data.image_key`.
        processor: Of the model, an `ImageProcessor`; None: the model reads text only.

    Raises:
        DataError: A row has videos, or images that the model does not read.
    """

    def __init__(self, rows: "ParquetRows", key: str, processor: Any):
        self._rows, self.processor = rows, processor
        self.name = find_column(rows, key)
        if self.name is not None and processor is None:
            raise DataError(
                f"{rows.location(rows.first_filled(self.name) or 0)} has images in column {self.name!r} "
                "(data.image_key), and the model, or this program, reads text only; train a model that reads images "
                "(Qwen3.5 does with model.override_config.language_model_only=false), or remove the column"
            )
        self._numbers: dict[int, int] = {}  # row -> images
        self._more: dict[int, int] = {}  # row -> tokens of its images, beyond their placeholders

    def _read(self, row: int) -> tuple[list[bytes], list["Image.Image"]]:
        """Return the images of a row, encoded and decoded."""
        if self.name is None:
            return [], []
        return read_images(self._rows, row, self.name, max_images=self.processor.max_images)

    def messages(self, row: int, messages: list[dict]) -> list[dict]:
        """Return a row's messages as a chat template reads images; count the images' tokens.

        Every image is decoded.
        """
        if self.processor is None:
            return messages
        location = self._rows.location(row)
        _, images = self._read(row)
        found = messages_with_images(messages, len(images), location)
        self._numbers[row] = len(images)
        if images:
            self._more[row] = self.processor.num_tokens(images) - len(images)
        return found

    def check(self, row: int, tokens: Sequence[int], trained: Iterable[int] = ()) -> None:
        """Raise DataError unless a row has one placeholder per image, none of them trained.

        Args:
            row: A row whose `messages` were asked for.
            tokens: Its tokens.
            trained: Those that a loss reads.
        """
        if self.processor is None:
            return
        location = self._rows.location(row)
        self.processor.check_placeholders(tokens, self._numbers[row], location)
        if self.processor.token_id in trained:
            raise DataError(
                f"{location}: the assistant answers with an image, which models do not write; remove the row"
            )

    def more_tokens(self, row: int) -> int:
        """Return the tokens that the images of a row have beyond their placeholders."""
        return self._more.get(row, 0)

    def rows_with_images(self) -> Set[int]:
        """Return the rows that have images, of those whose `messages` were asked for."""
        return self._more.keys()

    def inputs(self, row: int, tokens: np.ndarray) -> tuple[np.ndarray, dict[str, Any]]:
        """Return the tokens of a row with those of its images, and its columns of images.

        The columns are the encoded images and what the model reads. A row without images has none.
        """
        if row not in self._more:
            return tokens, {}
        encoded, images = self._read(row)
        tokens, inputs = self.processor(tokens, images)
        return tokens, {IMAGE_DATA: {"images": encoded}, IMAGE_INPUTS: inputs}


def find_column(rows: "ParquetRows", key: str) -> str | None:
    """Return the column with images: that of `data.image_key`, or TRL's `image`; None: no row has any.

    Raises:
        DataError: A row has videos or audio.
    """
    for column in ("videos", "audios"):
        if (row := rows.first_filled(column)) is not None:
            raise DataError(f"{rows.location(row)} has {column}, which are not read; remove the column")
    columns = dict.fromkeys((key, TRL_COLUMN))
    return next((column for column in columns if rows.first_filled(column) is not None), None)


def read_images(
    rows: "ParquetRows", row: int, column: str, *, max_images: int
) -> tuple[list[bytes], list["Image.Image"]]:
    """Return the images of a row, encoded and decoded.

    Raises:
        DataError: It has too many, or one that is not read; the message names file and row.
    """
    location = rows.location(row)
    values = image_list(rows[row].get(column), location, max_images=max_images)
    folder = os.path.dirname(os.path.expanduser(location.rpartition(" row ")[0]))
    encoded = [encoded_image(value, location, folder=folder) for value in values]
    return encoded, [row_images.decoded_image(image, location) for image in encoded]


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
    if len(value) > row_images.MAX_BYTES:
        raise DataError(
            f"{location}: an image has {len(value)} bytes, at most {row_images.MAX_BYTES} are read; compress it"
        )
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
        if os.path.getsize(file) > row_images.MAX_BYTES:
            raise DataError(
                f"{location}: the image {path!r:.100} has more than {row_images.MAX_BYTES} bytes; compress it"
            )
        return Path(file).read_bytes()
    except DataError:  # also a ValueError
        raise
    except (OSError, ValueError) as error:
        raise DataError(f"{location}: the image {path!r:.100} cannot be read: {error}") from error


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


def messages_with_data(messages: list[dict], images: Sequence["Image.Image"], location: str) -> list[dict]:
    """Return the messages with their images in OpenAI's parts, as requests to other models have them."""
    urls = iter(f"data:image/png;base64,{base64.b64encode(row_images.as_encoded(image)).decode()}" for image in images)
    return [
        {**message, "content": [_openai_part(part, urls) for part in message["content"]]}
        for message in messages_with_images(messages, len(images), location)
    ]


def _openai_part(part: dict[str, Any], urls: Iterator[str]) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": next(urls)}} if part["type"] == "image" else part


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


def check_tokens(tokens: int, limit: int, location: str, *, key: str = "data.max_prompt_length") -> None:
    """Raise DataError for a row with images that is too long: truncation would cut images."""
    if tokens > limit:
        raise DataError(
            f"{location}: a row with images has {tokens} tokens, more than {key}={limit}, and is not cut; raise it, "
            "leave longer rows out (data.filter_overlong_prompts, or data.truncation=filter), or lower max_pixels in "
            "data.mm_processor_kwargs"
        )
