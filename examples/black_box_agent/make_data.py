"""Write questions about small files that an agent answers with shell commands.

    python -m examples.black_box_agent.make_data --local_dir data/black_box_agent

A question is "Tell me the largest number in b.". The agent finds files of numbers in its directory, runs a command, and
submits what the command printed. The questions of the test are in no other file.

The demonstrations are imperfect on purpose: some follow the words, some look for the largest number, some guess. So
supervised fine-tuning teaches the two turns of an episode. Only the reward tells which command the words ask for.
"""

import itertools
import random
import sys
from collections.abc import Callable
from pathlib import Path

from data_preprocess.command import make_parser, rl_row, run_command, write_parquet

DATA_SOURCE = "environment"
BEGIN = ("Give me", "Tell me", "Find", "Submit")
# Words -> the command that they ask for.
WORDS = {
    "the largest number": "sort -n {file} | tail -1",
    "the biggest number": "sort -n {file} | tail -1",
    "the smallest number": "sort -n {file} | head -1",
    "the least number": "sort -n {file} | head -1",
    "the first number": "head -1 {file}",
    "the number at the top": "head -1 {file}",
    "the last number": "tail -1 {file}",
    "the number at the end": "tail -1 {file}",
    "the count of numbers": "grep -c . {file}",
    "how many numbers there are": "grep -c . {file}",
}
RESULTS: dict[str, Callable[[list[int]], int]] = {
    "sort -n {file} | tail -1": max,
    "sort -n {file} | head -1": min,
    "head -1 {file}": lambda numbers: numbers[0],
    "tail -1 {file}": lambda numbers: numbers[-1],
    "grep -c . {file}": len,
}
FILES = "abc"
DEMONSTRATORS = {"follows": 0.3, "looks for the largest": 0.4, "guesses": 0.3}
SYSTEM, TOOL = "Use bash.", "bash(command): Execute a bash command"  # as the agent and the chat template show them
SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT; echo {result}"

Question = tuple[str, str, str]  # the words, the command they ask for, the file


def all_questions() -> list[Question]:
    """Return every question once."""
    combined = itertools.product(BEGIN, WORDS.items(), FILES)
    return [(f"{begin} {words} in {file}.", command, file) for begin, (words, command), file in combined]


def make_files(rng: random.Random) -> dict[str, list[int]]:
    """Return the numbers of each file; no two files are of the same length."""
    lengths = rng.sample(range(3, 8), len(FILES))
    return {name: [rng.randint(10, 99) for _ in range(length)] for name, length in zip(FILES, lengths, strict=True)}


def write_call(command: str) -> str:
    """Return a turn of the policy that calls the agent's tool."""
    return f'<tool_call>\n{{"name": "bash", "arguments": {{"command": "{command}"}}}}\n</tool_call>'


def demonstrate(question: Question, rng: random.Random) -> list[dict[str, str]]:
    """Return the conversation of one of the demonstrators."""
    words, command, file = question
    who = rng.choices(list(DEMONSTRATORS), weights=list(DEMONSTRATORS.values()))[0]
    if who == "looks for the largest":
        command = "sort -n {file} | tail -1"
    if who == "guesses":
        command, file = rng.choice(list(RESULTS)), rng.choice(FILES)
    result = RESULTS[command](make_files(rng)[file])
    turns = [("tools", TOOL), ("system", SYSTEM), ("user", words)]
    turns += [("assistant", write_call(command.format(file=file))), ("tool", f"{result}\n")]
    turns += [("assistant", write_call(SUBMIT.format(result=result)))]
    return [{"role": role, "content": content} for role, content in turns]


def row(question: Question, rng: random.Random, *, split: str, index: int) -> dict:
    """Return a row: the question, the files of its episode, and the number to submit."""
    words, command, file = question
    files = make_files(rng)
    written = {name: "".join(f"{number}\n" for number in numbers) for name, numbers in files.items()}
    return rl_row(
        data_source=DATA_SOURCE,
        question=words,
        ability="shell",
        reward_model={"style": "rule", "ground_truth": str(RESULTS[command](files[file]))},
        extra_info={"split": split, "index": index, "files": written},
    )


def write_all(directory: Path, *, seed: int, num_train: int, num_test: int, num_demonstrations: int) -> None:
    """Write `train`, `test`, and `sft_train`; questions of `test` are in no other file."""
    rng = random.Random(seed)
    questions = all_questions()
    rng.shuffle(questions)
    held_out, seen = questions[:num_test], questions[num_test:]
    for split, chosen in (("test", held_out), ("train", rng.choices(seen, k=num_train))):
        rows = [row(question, rng, split=split, index=index) for index, question in enumerate(chosen)]
        write_parquet(rows, directory / f"{split}.parquet")
    shown = [{"messages": demonstrate(question, rng)} for question in rng.choices(seen, k=num_demonstrations)]
    write_parquet(shown, directory / "sft_train.parquet")


def main(argv: list[str] | None = None) -> int:
    parser = make_parser(__doc__ or "", default_dir="data/black_box_agent")
    parser.add_argument("--seed", type=int, default=1, help="seed of the rows (default: 1)")
    parser.add_argument("--num_train", type=int, default=1024, help="rows of train.parquet (default: 1024)")
    parser.add_argument("--num_test", type=int, default=32, help="rows of test.parquet (default: 32)")
    parser.add_argument("--num_demonstrations", type=int, default=8192, help="rows of sft_train.parquet")
    args = parser.parse_args(argv)
    sizes = {name: getattr(args, name) for name in ("seed", "num_train", "num_test", "num_demonstrations")}
    return run_command(lambda: write_all(Path(args.local_dir), **sizes))


if __name__ == "__main__":
    sys.exit(main())
