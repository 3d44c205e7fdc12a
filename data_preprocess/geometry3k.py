"""Geometry3K, problems about a figure, to parquet with images, as verl's `geo3k.py` writes it.

    python -m data_preprocess.geometry3k --local_dir ~/data/geo3k [--data_source FILE|DIRECTORY|NAME]

writes `train.parquet`, `validation.parquet` and `test.parquet` (the splits that the source has). A row of a JSON-lines
file has `problem`, `answer` and `images`: paths relative to that file.
"""

import io
import sys
from pathlib import Path
from typing import Any

from data_preprocess.command import convert, rl_row
from data_preprocess.raw import RawDataError, RawRow

DATA_SOURCE = "hiyouga/geometry3k"
INSTRUCTION = (
    "You FIRST think about the reasoning process as an internal monologue and then provide the final answer. The "
    r"reasoning process MUST BE enclosed within <think> </think> tags. The final answer MUST BE put in \boxed{}."
)


def to_row(raw: RawRow, *, split: str, index: int) -> dict:
    problem, answer = raw["problem"], raw["answer"]
    row = rl_row(
        data_source=DATA_SOURCE,
        question=f"{problem} {INSTRUCTION}",
        ability="math",
        reward_model={"style": "rule", "ground_truth": answer},
        extra_info={"split": split, "index": index, "answer": answer, "question": problem},
    )
    return row | {"images": [{"bytes": encoded(image, raw.location), "path": None} for image in raw["images"]]}


def encoded(image: Any, location: str) -> bytes:
    """Return an image as the bytes of a file.

    An image of Pillow becomes a PNG; a file is returned as it is.
    """
    if isinstance(image, str):
        try:
            return (Path(location.rpartition(" line ")[0]).parent / image).read_bytes()
        except OSError as error:
            raise RawDataError(f"{location}: the image {image!r} cannot be read: {error.strerror}") from error
    with io.BytesIO() as stream:
        image.save(stream, format="PNG")
        return stream.getvalue()


def main(argv: list[str] | None = None) -> int:
    return convert(argv, to_row, description=__doc__, stem="geo3k", hub_name=DATA_SOURCE)


if __name__ == "__main__":
    sys.exit(main())
