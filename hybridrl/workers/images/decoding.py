"""Decode an untrusted image after its size, colours and frames have been checked."""

import io
from typing import TYPE_CHECKING

from hybridrl.errors import DataError, reason_of

if TYPE_CHECKING:
    from PIL import Image

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
MODES = frozenset({"1", "L", "LA", "P", "PA", "RGB", "RGBA"})
MAX_BYTES = 50_000_000  # of an encoded image
MAX_PIXELS = 50_000_000  # 150 MB as RGB; a photograph of a phone has 12 to 50 million
MIN_SIDE = 4  # pixels: an image of fewer shows nothing, and is often the rest of a failed download
MAX_RATIO = 200  # of the sides, the limit of Qwen's image processors
SHOWN_SIDE = 256  # pixels of the longer side of a copy for people


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
    # Decoders of damaged files raise anything: OSError, ValueError, SyntaxError, struct.error.
    except Exception as error:
        raise DataError(f"{location}: an image is damaged or too large: {reason_of(error):.200}") from error


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


def small_copy(encoded: bytes) -> bytes:
    """Return an image as a JPEG for people, of at most `SHOWN_SIDE` pixels a side."""
    image = decoded_image(encoded, "an image of a sample")
    image.thumbnail((SHOWN_SIDE, SHOWN_SIDE))
    with io.BytesIO() as stream:
        image.save(stream, format="JPEG", quality=80)
        return stream.getvalue()
