r"""MATH, competition mathematics with the answer in a `\boxed{}`, to parquet.

    python -m data_preprocess.math_dataset --local_dir ~/data/math [--data_source FILE|DIRECTORY|NAME]

writes `train.parquet` and `test.parquet` (the splits that the source has), scored by mathematical equality.
"""

import sys

from data_preprocess.command import convert, rl_row
from data_preprocess.raw import RawDataError, RawRow

DATA_SOURCE = "DigitalLearningGmbH/MATH-lighteval"
INSTRUCTION = r"Let's think step by step and output the final answer within \boxed{}."
BOX = r"\boxed"


def last_boxed(solution: str, location: str) -> str:
    r"""Return the content of the last `\boxed{...}` (braces may nest) or `\boxed x`."""
    _, found, rest = solution.rpartition(BOX)
    if not found:
        raise RawDataError(f"{location}: column 'solution' has no \\boxed answer")
    rest = rest.lstrip()
    if not rest.startswith("{"):
        words = rest.partition("$")[0].split()
        if not words:
            raise RawDataError(f"{location}: column 'solution' has an empty \\boxed")
        return words[0]
    depth = 0
    for end, character in enumerate(rest):
        depth += {"{": 1, "}": -1}.get(character, 0)
        if depth == 0:
            return rest[1:end]
    raise RawDataError(f"{location}: column 'solution' has a \\boxed{{ that is never closed")


def to_row(raw: RawRow, *, split: str, index: int) -> dict:
    problem, solution = raw["problem"], raw["solution"]
    return rl_row(
        data_source=DATA_SOURCE,
        question=f"{problem} {INSTRUCTION}",
        ability="math",
        reward_model={"style": "rule", "ground_truth": last_boxed(solution, raw.location)},
        extra_info={"split": split, "index": index, "answer": solution, "question": problem},
    )


def main(argv: list[str] | None = None) -> int:
    return convert(argv, to_row, description=__doc__, stem="math", hub_name=DATA_SOURCE)


if __name__ == "__main__":
    sys.exit(main())
