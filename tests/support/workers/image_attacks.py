"""Images that attackers or accidents put into data, and the refusal of each; not a test file."""

import io
import struct
import zlib
from typing import Any

from PIL import Image

from tests.support.workers.image_cases import picture


def encoded(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    with io.BytesIO() as stream:
        image.save(stream, format=kind, **options)
        return stream.getvalue()


def png_of_size(width: int, height: int) -> bytes:
    """Return a PNG whose header says this size; its data are a few bytes."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(bytes(100))) + chunk(b"IEND", b"")
    )


FRAMES = [picture(i) for i in range(3)]
ATTACKS = {
    "a decompression bomb": (png_of_size(30_000, 30_000), "damaged or too large|larger than"),
    "a smaller bomb": (png_of_size(9_000, 9_000), "9000x9000 pixels is larger than"),
    "1x1": (encoded(picture(1, width=1, height=1)), "1x1 pixels has a side of fewer than 4"),
    "20,000x1": (encoded(picture(1, width=20_000, height=1)), "20000x1 pixels has a side of fewer than 4"),
    "20,000x4": (encoded(picture(1, width=20_000, height=4)), "more than 200 times as long as wide"),
    "animated": (encoded(FRAMES[0], "GIF", save_all=True, append_images=FRAMES[1:]), "has 3 frames"),
    "CMYK": (encoded(picture(1).convert("CMYK"), "JPEG"), "colour model CMYK; convert it to RGB"),
    "truncated": (encoded(picture(1, width=200, height=200))[:4000], "is damaged"),
    "truncated JPEG": (encoded(picture(1, width=200, height=200), "JPEG")[:4000], "is damaged"),
    "wrong bytes": (bytes(range(256)), "are no image; formats are PNG"),
    "nothing": (b"", "an image is b''"),
    "SVG": (b"<svg xmlns='http://www.w3.org/2000/svg' width='9' height='9'/>", "are no image; formats are PNG"),
    "TIFF": (encoded(picture(1), "TIFF"), "are no image; formats are PNG"),
}
