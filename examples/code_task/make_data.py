"""Descriptions of small functions, for a tiny model that learns to write them.

    python -m examples.code_task.make_data --local_dir data/code_task

A question is "Return the product of a and c, plus 4."; the answer is a block of code with `f(a, b, c)`. A row's tests
are calls of `f` with what they return, as APPS has them (`fn_name`). No two questions are the same.

The demonstrations are imperfect on purpose: some follow the words, some add whatever the words say, some guess. So
supervised fine-tuning teaches to write programs that run, and only the tests tell which program the words ask for.
"""

import itertools
import json
import random
import sys
from pathlib import Path

from data_preprocess.command import make_parser, rl_row, run_command, write_parquet

DATA_SOURCE = "hybridrl/programs"
FIRST = {
    "the sum of {x} and {y}": "{x} + {y}",
    "the product of {x} and {y}": "{x} * {y}",
    "{x} minus {y}": "{x} - {y}",
    "the larger of {x} and {y}": "max({x}, {y})",
    "the smaller of {x} and {y}": "min({x}, {y})",
}
SECOND = {"plus": "+", "minus": "-", "times": "*"}
BEGIN = ("Return", "Give me", "I need")
LETTERS = "abc"
NUM_CASES = 3
DEMONSTRATORS = {"follows": 0.3, "adds": 0.4, "guesses": 0.3}


def all_questions() -> list[tuple[str, str, str, str]]:
    """Return every question as its words, the pattern of its first term, its sign, and its last operand."""
    found = []
    for begin, (words, pattern), (second, sign) in itertools.product(BEGIN, FIRST.items(), SECOND.items()):
        for x, y in itertools.permutations(LETTERS, 2):
            for last in (*LETTERS, *map(str, range(1, 10))):
                question = f"{begin} {words.format(x=x, y=y)}, {second} {last}."
                found.append((question, pattern.format(x=x, y=y), sign, last))
    return found


def write_program(first: str, sign: str, last: str) -> str:
    """Return the answer to a question."""
    return f"```python\ndef f(a, b, c):\n    return ({first}) {sign} {last}\n```"


def demonstrate(first: str, sign: str, last: str, rng: random.Random) -> str:
    """Return the answer that one of the demonstrators writes."""
    who = rng.choices(list(DEMONSTRATORS), weights=list(DEMONSTRATORS.values()))[0]
    x, y = [letter for letter in first.replace("max", "").replace("min", "") if letter in LETTERS]
    if who == "adds":
        first, sign = f"{x} + {y}", "+"
    if who == "guesses":
        first, sign = rng.choice(list(FIRST.values())).format(x=x, y=y), rng.choice(list(SECOND.values()))
    return write_program(first, sign, last)


def make_tests(first: str, sign: str, last: str, rng: random.Random) -> str:
    """Return calls of the function and what they return, as JSON."""
    inputs = [[rng.randint(-9, 9) for _ in LETTERS] for _ in range(NUM_CASES)]
    outputs = [eval(f"({first}) {sign} {last}", dict(zip(LETTERS, values, strict=True))) for values in inputs]
    return json.dumps({"fn_name": "f", "inputs": inputs, "outputs": outputs})


def write_all(directory: Path, *, seed: int, num_test: int, num_demonstrations: int) -> None:
    """Write `train`, `test`, and `sft_train`; questions of `test` are in no other file."""
    rng = random.Random(seed)
    questions = all_questions()
    rng.shuffle(questions)
    for name, part in (("test", questions[:num_test]), ("train", questions[num_test:])):
        rows = [
            rl_row(
                data_source=DATA_SOURCE,
                question=question,
                ability="code",
                reward_model={"style": "rule", "ground_truth": make_tests(*answer, rng)},
                extra_info={"split": name, "index": index, "answer": write_program(*answer)},
            )
            for index, (question, *answer) in enumerate(part)
        ]
        write_parquet(rows, directory / f"{name}.parquet")
    demonstrations = []
    for question, *answer in rng.choices(questions[num_test:], k=num_demonstrations):
        content = demonstrate(*answer, rng)
        demonstrations.append(
            {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": content}]}
        )
    write_parquet(demonstrations, directory / "sft_train.parquet")


def main(argv: list[str] | None = None) -> int:
    parser = make_parser(__doc__, default_dir="~/data/code_task")
    parser.add_argument("--seed", type=int, default=1, help="seed of the rows (default: 1)")
    parser.add_argument("--num_test", type=int, default=100, help="rows of test.parquet (default: 100)")
    parser.add_argument("--num_demonstrations", type=int, default=20000, help="rows of sft_train.parquet")
    args = parser.parse_args(argv)
    directory = Path(args.local_dir).expanduser()
    sizes = {"num_test": args.num_test, "num_demonstrations": args.num_demonstrations}
    return run_command(lambda: write_all(directory, seed=args.seed, **sizes))


if __name__ == "__main__":
    sys.exit(main())
