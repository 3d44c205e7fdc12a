"""Images in the content of chat messages: OpenAI's and Anthropic's parts, and images of Python functions.

Agent loops and the endpoint use it. A content becomes one text, in which the text that the chat template writes for an
image stands in place of each image. So everything that compares, renders and continues conversations of texts works for
images. Nothing is fetched: an image is in the content, as base64 or as an object.
"""

import base64
import binascii
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from hybridrl.algos.partition.row_images import RowImages
from hybridrl.errors import DataError
from hybridrl.workers.images.decoding import MAX_BYTES, as_encoded, decoded_image
from hybridrl.workers.images.processor import ImageProcessor

WHERE = "messages"
TEXTS = ("text", "input_text")


def content_text(content: Any, processor: ImageProcessor | None) -> tuple[str, list[bytes]]:
    """Return the text of a content, and its encoded images in order.

    Args:
        content: A text, or a list of parts; a part may be an image of Pillow.
        processor: Of the model; None: it reads text only.

    Raises:
        DataError: A part is neither text nor image, or the model reads no images.
    """
    if isinstance(content, str):
        return content, []
    texts, found = [], list[bytes]()
    for part in content if isinstance(content, list | tuple) else [content]:
        if isinstance(part, str):
            texts.append(part)
        elif isinstance(part, Mapping) and part.get("type") in TEXTS and isinstance(part.get("text"), str):
            texts.append(part["text"])
        elif (encoded := image_of(part)) is not None:
            if processor is None:
                raise DataError(f"{WHERE}: a part is an image, and this model reads text only")
            found.append(encoded)
            texts.append(processor.text)
        else:
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            raise DataError(f"{WHERE}: a part of the type {kind!r} is neither a text nor an image")
    return "".join(texts), found


def image_of(part: Any) -> bytes | None:
    """Return the encoded image of a part of a content; None: it is no image.

    Raises:
        DataError: It is an address, or no base64.
    """
    if hasattr(part, "tobitmap"):  # an image of Pillow
        return as_encoded(part)
    if not isinstance(part, Mapping):
        return None
    if part.get("type") == "image" and isinstance(part.get("source"), Mapping):  # Anthropic's
        source = part["source"]
        if source.get("type") != "base64":
            raise DataError(f"{WHERE}: an image of the source {source.get('type')!r}; give base64, nothing is fetched")
        return _decoded(source.get("data"))
    if part.get("type") == "image":  # of a Python function
        image: Any = part.get("image")
        return as_encoded(image) if hasattr(image, "tobitmap") else image if isinstance(image, bytes) else None
    if part.get("type") not in ("image_url", "input_image"):  # OpenAI's
        return None
    url = part.get("image_url")
    url = url.get("url") if isinstance(url, Mapping) else url
    head, found, data = url.partition(";base64,") if isinstance(url, str) else ("", "", "")
    if not found or not head.startswith("data:image/"):
        raise DataError(f"{WHERE}: the image {str(url)[:40]!r} is no data:image/...;base64 address; nothing is fetched")
    return _decoded(data)


def _decoded(data: Any) -> bytes:
    if not isinstance(data, str) or len(data) > MAX_BYTES * 4 // 3 + 4:
        raise DataError(f"{WHERE}: an image is no base64 text of at most {MAX_BYTES} bytes")
    try:
        return base64.b64decode(data, validate=True)
    except (binascii.Error, ValueError) as error:
        raise DataError(f"{WHERE}: an image is no base64 text ({error})") from error


def with_images(
    tokens: list[int], encoded: Sequence[bytes], processor: ImageProcessor | None, *, num_before: int = 0
) -> tuple[list[int], RowImages | None]:
    """Return tokens with those of their images, and the images.

    Args:
        tokens: Of text with one placeholder per image.
        encoded: The images.
        processor: Of the model; None: it reads text only.
        num_before: Images of the conversation before these tokens.

    Raises:
        DataError: An image is not read, or the text has another number of placeholders.
    """
    if processor is None:
        return tokens, None
    processor.check_placeholders(tokens, len(encoded), WHERE)
    if num_before + len(encoded) > processor.max_images:
        raise DataError(
            f"{WHERE}: {num_before + len(encoded)} images in one conversation, more than "
            f"data.max_images_per_prompt={processor.max_images}"
        )
    if not encoded:
        return tokens, None
    found, images = processor(np.array(tokens), [decoded_image(image, WHERE) for image in encoded])
    return found.tolist(), images
