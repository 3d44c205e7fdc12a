"""Draw pictures of shapes, and ask for their colour, kind or number.

The answer is only in the picture.

    python -m examples.vision.make_data --out DIRECTORY

It writes `train.parquet`, `test.parquet`, and `swapped.parquet`: the test with every picture moved to another row. A
policy that looks at pictures does no better than chance there.
"""

import argparse
import io
import os
import random
from typing import Any

from PIL import Image, ImageDraw

from hybridrl.trainer.data.row_files import prompt_table, write_table

SIDE = 32  # pixels: four tokens
COLOURS = {"red": (220, 30, 30), "green": (30, 170, 60), "blue": (40, 70, 230), "yellow": (240, 210, 40)}
SHAPES = ("circle", "square", "triangle", "cross")
COUNTS = ("one", "two", "three", "four")
ANSWERS = {"colour": tuple(COLOURS), "shape": SHAPES, "count": COUNTS}
QUESTIONS = {"colour": "Which colour ?", "shape": "Which shape ?", "count": "How many ?"}


def draw(colour: str, shape: str, number: int, drawn: random.Random) -> Image.Image:
    """Return a picture of one to four equal shapes.

    Each is in a quarter of its own; one alone is large.
    """
    picture = Image.new("RGB", (SIDE, SIDE), tuple(drawn.randint(0, 40) for _ in range(3)))
    quarters = drawn.sample([(0, 0), (1, 0), (0, 1), (1, 1)], number)
    for column, row in quarters:
        size = drawn.randint(10, 13)
        left = column * SIDE // 2 + drawn.randint(1, SIDE // 2 - size - 1)
        top = row * SIDE // 2 + drawn.randint(1, SIDE // 2 - size - 1)
        _draw_shape(ImageDraw.Draw(picture), shape, (left, top, left + size, top + size), COLOURS[colour])
    return picture


def _draw_shape(canvas: ImageDraw.ImageDraw, shape: str, box: tuple[int, ...], fill: tuple[int, ...]) -> None:
    left, top, right, bottom = box
    if shape == "circle":
        canvas.ellipse(box, fill)
    elif shape == "square":
        canvas.rectangle(box, fill)
    elif shape == "triangle":
        canvas.polygon([((left + right) // 2, top), (left, bottom), (right, bottom)], fill)
    else:
        middle, centre = (left + right) // 2, (top + bottom) // 2
        canvas.rectangle((middle - 1, top, middle + 1, bottom), fill)
        canvas.rectangle((left, centre - 1, right, centre + 1), fill)


def make_rows(number: int, *, seed: int, kinds: tuple[str, ...]) -> list[dict[str, Any]]:
    """Return rows in verl's format, the kinds of question in turn."""
    drawn, rows = random.Random(seed), []
    for index in range(number):
        truth = {
            "colour": drawn.choice(tuple(COLOURS)),
            "shape": drawn.choice(SHAPES),
            "count": drawn.choice(COUNTS),
        }
        picture = draw(truth["colour"], truth["shape"], COUNTS.index(truth["count"]) + 1, drawn)
        kind = kinds[index % len(kinds)]
        rows.append(
            {
                "prompt": [{"role": "user", "content": f"<image>{QUESTIONS[kind]}"}],
                "images": [{"bytes": as_png(picture), "path": None}],
                "data_source": f"shapes/{kind}",
                "ground_truth": truth[kind],
            }
        )
    return rows


def as_png(picture: Image.Image) -> bytes:
    """Return the picture as a file has it."""
    with io.BytesIO() as stream:
        picture.save(stream, format="PNG")
        return stream.getvalue()


def swapped(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows, each with the picture of the next row of its kind."""
    kinds = [row["data_source"] for row in rows]
    following = {
        i: next((j for j in [*range(i + 1, len(rows)), *range(i)] if kinds[j] == kinds[i]), i) for i in range(len(rows))
    }
    return [{**row, "images": rows[following[i]]["images"]} for i, row in enumerate(rows)]


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> float:
    """Return 1 if the first word of the answer is right, else 0."""
    words = solution_str.split()
    return float(bool(words) and words[0] == ground_truth)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", required=True, help="directory of the files")
    parser.add_argument("--kinds", nargs="+", default=tuple(QUESTIONS), choices=tuple(QUESTIONS))
    parser.add_argument("--train", type=int, default=6000, help="training rows")
    parser.add_argument("--test", type=int, default=600, help="test rows")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    kinds = tuple(arguments.kinds)
    test = make_rows(arguments.test, seed=arguments.seed + 1000, kinds=kinds)
    files = {
        "train": make_rows(arguments.train, seed=arguments.seed, kinds=kinds),
        "test": test,
        "swapped": [{**row, "data_source": f"{row['data_source']}, swapped"} for row in swapped(test)],
    }
    for name, rows in files.items():
        write_table(prompt_table(rows), os.path.join(arguments.out, f"{name}.parquet"))


if __name__ == "__main__":
    main()
