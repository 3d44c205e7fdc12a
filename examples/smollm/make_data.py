"""Make word problems of one calculation for SmolLM2, in the words of a person.

    python -m examples.smollm.make_data --local_dir data/smollm --seed 1

writes `train.parquet` and `test.parquet` in the format of `data_preprocess`. No question of one is in the other.
`reward.py` beside this file scores the answers. Problems of two calculations are left out: of their answers about one
in sixteen is right, so that most groups of eight samples have equal rewards and teach nothing.
"""

import itertools
import random
import sys
from pathlib import Path

from data_preprocess.arithmetic import Problem, compute, distinct_problems
from data_preprocess.command import make_parser, rl_row, run_command, write_parquet

DATA_SOURCE = "word_problems"
# A response has 48 tokens: room for a sentence and a number.
INSTRUCTION = "Think in one short sentence, then write the answer."
SIZES = {"test": 128, "train": 1024}


def to_row(problem: Problem, *, split: str, index: int) -> dict:
    """Return the prompt and the right answer in verl's format."""
    return rl_row(
        data_source=DATA_SOURCE,
        question=f"{problem.question} {INSTRUCTION}",
        ability="math",
        reward_model={"style": "rule", "ground_truth": str(compute(*problem.steps[-1]))},
        extra_info={"split": split, "index": index, "question": problem.question},
    )


def write_all(directory: Path, seed: int) -> None:
    problems = (problem for problem in distinct_problems(random.Random(seed)) if len(problem.steps) == 1)
    for split, size in SIZES.items():
        rows = [
            to_row(problem, split=split, index=index) for index, problem in enumerate(itertools.islice(problems, size))
        ]
        write_parquet(rows, directory / f"{split}.parquet")


def main(argv: list[str] | None = None) -> int:
    parser = make_parser(__doc__, default_dir="~/data/smollm")
    parser.add_argument("--seed", type=int, default=1, help="seed of the problems (default: 1)")
    args = parser.parse_args(argv)
    return run_command(lambda: write_all(Path(args.local_dir).expanduser(), args.seed))


if __name__ == "__main__":
    sys.exit(main())
