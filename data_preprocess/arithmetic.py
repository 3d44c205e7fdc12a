"""Word problems for the quick start.

Small enough to learn from scratch, with something left for rewards to teach.

    python -m data_preprocess.arithmetic --local_dir data/arithmetic

writes prompts for reinforcement learning (`train.parquet`, `test.parquet`) and conversations for supervised fine-tuning
(`sft_train.parquet`, `sft_val.parquet`). All questions differ, so no training sees a question of `test.parquet`.

The demonstrations are imperfect on purpose. Three simulated annotators write them in GSM8K's format (`<<3*4=12>>
<<12+5=17>> #### 17`). The careful one is right. The adder adds all numbers. The guesser's calculation is valid but
random. Fine-tuning on them teaches the format, the arithmetic and a bad habit. Only the reward tells which calculation
the words ask for.

This is not a benchmark: problems come from a few dozen sentences and small numbers.
"""

import argparse
import itertools
import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from data_preprocess.command import make_parser, rl_row, run_command, write_parquet
from data_preprocess.raw import RawDataError

DATA_SOURCE = "hybridrl/arithmetic"
NAMES = (
    "Ann",
    "Ben",
    "Cleo",
    "Dan",
    "Eva",
    "Finn",
    "Gus",
    "Ida",
    "Jo",
    "Kim",
    "Leo",
    "Mia",
    "Ned",
    "Ola",
    "Pia",
    "Tom",
)
ITEMS = ("apples", "beads", "books", "cakes", "cards", "coins", "cups", "eggs")
ITEMS += ("hats", "kites", "maps", "nuts", "pens", "plums", "shells", "toys")
SMALLEST, LARGEST = 2, 6
LARGEST_RESULT = 60
MAX_DRAWS = 1000  # per template, before it counts as used up
ANNOTATORS = {"careful": 0.25, "adder": 0.5, "guesser": 0.25}

# Text of a problem and its solution plan. A step names its operands: the problem's numbers a, b, c, and x, the previous
# result.
TEMPLATES = (
    ("{name} has {a} {item} and buys {b} more. How many {item} does {name} have now?", "a+b"),
    ("{other} has {a} {item}. {name} has {b} more than {other}. How many {item} does {name} have?", "a+b"),
    ("{name} finds {a} {item}, then {b}, then {c} more. How many {item} does {name} find?", "a+b x+c"),
    ("{name} has {a} {item} and gives {b} away. How many {item} are left?", "a-b"),
    ("{other} has {a} {item}. {name} has {b} fewer than {other}. How many {item} does {name} have?", "a-b"),
    ("{name} buys {a} boxes of {b} {item}. How many {item} is that?", "a*b"),
    ("{name} sells {a} {item} for {b} dollars each. How many dollars does {name} get?", "a*b"),
    ("{other} has {a} {item}. {name} has {b} times as many. How many {item} does {name} have?", "a*b"),
    ("{name} makes {a} {item} per day. How many {item} does {name} make in {b} days?", "a*b"),
    ("{other} has {a} {item}. {name} has {b} times as many. How many {item} do they have together?", "a*b x+a"),
    ("{other} has {a} {item}. {name} has {b} more than {other}. How many {item} do they have together?", "a+b x+a"),
    ("{name} buys {a} boxes of {b} {item} and gives {c} away. How many {item} are left?", "a*b x-c"),
    ("{name} buys {a} boxes of {b} {item} and finds {c} more. How many {item} does {name} have now?", "a*b x+c"),
    ("{name} sells {a} {item} for {b} dollars each and spends {c} dollars. How many dollars are left?", "a*b x-c"),
    ("{name} earns {a} dollars per day for {b} days and spends {c}. How many dollars are left?", "a*b x-c"),
    (
        "{other} has {a} {item}. {name} has {b} times as many and loses {c}. How many {item} does {name} have?",
        "a*b x-c",
    ),
    ("{name} has {a} {item}, gives {b} away and buys {c}. How many {item} does {name} have now?", "a-b x+c"),
    ("{name} has {a} {item}, buys {b} and loses {c}. How many {item} does {name} have now?", "a+b x-c"),
    ("{name} packs {a} red and {b} blue {item} in each of {c} bags. How many {item} is that?", "a+b x*c"),
    (
        "{name} has {a} {item}, gives {b} away and sells the rest for {c} dollars each. How many dollars "
        "does {name} get?",
        "a-b x*c",
    ),
    ("{name} has {a} boxes with {b} bags of {c} {item} each. How many {item} is that?", "a*b x*c"),
)


@dataclass(frozen=True)
class Problem:
    """A question, its numbers in reading order, and the steps of its solution.

    A step is (left, sign, right).
    """

    question: str
    numbers: tuple[int, ...]
    steps: tuple[tuple[int, str, int], ...]


def compute(left: int, sign: str, right: int) -> int:
    return {"+": left + right, "-": left - right, "*": left * right}[sign]


def write_solution(steps: tuple[tuple[int, str, int], ...]) -> str:
    """Return the steps in GSM8K's format, with the last result as the answer."""
    calculations = " ".join(f"<<{left}{sign}{right}={compute(left, sign, right)}>>" for left, sign, right in steps)
    return f"{calculations} #### {compute(*steps[-1])}"


def resolve(plan: str, numbers: dict[str, int]) -> tuple[tuple[int, str, int], ...]:
    """Return a template's plan such as "a*b x+c" with numbers filled in."""
    steps: list[tuple[int, str, int]] = []
    for left, sign, right in plan.split():
        values = numbers | {"x": compute(*steps[-1]) if steps else 0}
        steps.append((values[left], sign, values[right]))
    return tuple(steps)


def in_range(steps: tuple[tuple[int, str, int], ...]) -> bool:
    return all(0 <= compute(*step) <= LARGEST_RESULT for step in steps)


def fill_in(words: str, plan: str, rng: random.Random) -> Problem:
    """Return a problem from one template, with every intermediate result between 0 and `LARGEST_RESULT`."""
    letters = [letter for letter in "abc" if f"{{{letter}}}" in words]
    while True:
        numbers = {letter: rng.randint(SMALLEST, LARGEST) for letter in letters}
        steps = resolve(plan, numbers)
        if in_range(steps):
            break
    name, other = rng.sample(NAMES, 2)
    question = words.format(name=name, other=other, item=rng.choice(ITEMS), **numbers)
    return Problem(question, tuple(numbers.values()), steps)


def distinct_problems(rng: random.Random) -> Iterator[Problem]:
    """Yield problems without end: every template equally often, no question twice.

    Raises:
        RawDataError: A template has (almost) no unused question left.
    """
    used: set[str] = set()
    while True:
        words, plan = rng.choice(TEMPLATES)
        candidates = (fill_in(words, plan, rng) for _ in range(MAX_DRAWS))
        problem = next((problem for problem in candidates if problem.question not in used), None)
        if problem is None:
            raise RawDataError(
                f"the templates do not give more than {len(used)} different problems; ask for fewer rows"
            )
        used.add(problem.question)
        yield problem


def guess_steps(numbers: tuple[int, ...], rng: random.Random) -> tuple[tuple[int, str, int], ...]:
    """Return a calculation that uses the numbers in order.

    Its signs are random and keep every result in range.
    """
    while True:
        plan = f"a{rng.choice('+-*')}b" + (f" x{rng.choice('+-*')}c" if len(numbers) == 3 else "")
        steps = resolve(plan, dict(zip("abc", numbers, strict=False)))
        if in_range(steps):
            return steps


def demonstrate(problem: Problem, annotator: str, rng: random.Random) -> str:
    """Return the solution that one annotator writes."""
    if annotator == "careful":
        return write_solution(problem.steps)
    if annotator == "adder":
        plan = "a+b x+c" if len(problem.numbers) == 3 else "a+b"
        return write_solution(resolve(plan, dict(zip("abc", problem.numbers, strict=False))))
    return write_solution(guess_steps(problem.numbers, rng))


def prompt_rows(problems: list[Problem], split: str) -> list[dict]:
    rows = []
    for index, problem in enumerate(problems):
        solution = write_solution(problem.steps)
        rows.append(
            rl_row(
                data_source=DATA_SOURCE,
                question=problem.question,
                ability="math",
                reward_model={"style": "rule", "ground_truth": str(compute(*problem.steps[-1]))},
                extra_info={"split": split, "index": index, "answer": solution, "question": problem.question},
            )
        )
    return rows


def conversation_rows(problems: list[Problem], rng: random.Random) -> list[dict]:
    rows = []
    for problem in problems:
        annotator = rng.choices(list(ANNOTATORS), weights=list(ANNOTATORS.values()))[0]
        messages = [
            {"role": "user", "content": problem.question},
            {"role": "assistant", "content": demonstrate(problem, annotator, rng)},
        ]
        rows.append({"messages": messages, "annotator": annotator})
    return rows


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a number of rows, at least 1")
    return int(text)


def write_all(args: argparse.Namespace) -> None:
    rng = random.Random(args.seed)
    problems = distinct_problems(rng)
    directory = Path(args.local_dir).expanduser()
    for name, count in (("test", args.num_test), ("train", args.num_train)):
        write_parquet(prompt_rows(list(itertools.islice(problems, count)), name), directory / f"{name}.parquet")
    for name, count in (("sft_val", args.num_sft_val), ("sft_train", args.num_sft_train)):
        write_parquet(conversation_rows(list(itertools.islice(problems, count)), rng), directory / f"{name}.parquet")


def main(argv: list[str] | None = None) -> int:
    parser = make_parser(__doc__, default_dir="~/data/arithmetic")
    parser.add_argument("--seed", type=int, default=1, help="seed of the problems and the annotators (default: 1)")
    for name, default in (("train", 8192), ("test", 512), ("sft_train", 30000), ("sft_val", 512)):
        parser.add_argument(
            f"--num_{name}", type=positive, default=default, help=f"rows of {name}.parquet (default: {default})"
        )
    args = parser.parse_args(argv)
    return run_command(lambda: write_all(args))


if __name__ == "__main__":
    sys.exit(main())
