"""Task directories of the package `harbor` to parquet: one row for each, for `examples/harbor`.

    python -m data_preprocess.harbor TASKS OUT.parquet [--name harbor] [--done done]

TASKS is the directory that the adapter's `tasks` names. A task directory has `task.toml` and `instruction.md`. Rows
name tasks: the environment shows the instruction. Tasks of several steps are left out, and named.
"""

import argparse
import sys
import tomllib
from pathlib import Path

from data_preprocess.command import rl_row, run_command, write_parquet
from data_preprocess.raw import RawDataError

RULES = (
    "You work in a shell of Linux. Each of your turns is one command; you then see what it printed. "
    "When the task is solved, answer with the one word {done}."
)


def find_tasks(folder: Path) -> tuple[list[str], list[str]]:
    """Return the tasks below a directory, by relative path in order, and those of several steps.

    Raises:
        RawDataError: There is no task, or a `task.toml` cannot be read.
    """
    found, left_out = [], []
    for path in sorted(folder.rglob("task.toml")):
        try:
            config = tomllib.loads(path.read_text(encoding="utf-8"))
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise RawDataError(f"{path}: {error}") from error
        has_one_step = not config.get("steps") and (path.parent / "instruction.md").is_file()
        (found if has_one_step else left_out).append(path.parent.relative_to(folder).as_posix())
    if not found:
        raise RawDataError(f"{folder} has no directory with a task.toml and an instruction.md")
    return found, left_out


def to_row(task: str, *, name: str, done: str, index: int) -> dict:
    """Return the row of a task, for the environment `name`."""
    row = rl_row(
        data_source="environment",
        question="",
        ability="terminal",
        reward_model={"style": "rule", "ground_truth": ""},
        extra_info={"index": index, "interaction_kwargs": {"name": name, "task": task}},
    )
    return row | {"prompt": [{"role": "system", "content": RULES.format(done=done)}], "agent_name": "environment_agent"}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tasks", type=Path, help="directory that has the task directories")
    parser.add_argument("out", type=Path, help="parquet file to write")
    parser.add_argument("--name", default="harbor", help="of the environment in environments.yaml (default: harbor)")
    parser.add_argument("--done", default="done", help="`done` of its config: the turn that ends an episode")
    args = parser.parse_args(argv)

    def work() -> None:
        found, left_out = find_tasks(args.tasks.expanduser())
        rows = [to_row(task, name=args.name, done=args.done, index=index) for index, task in enumerate(found)]
        write_parquet(rows, args.out.expanduser())
        if left_out:
            print(f"left out, without one instruction.md for the task: {', '.join(left_out)}")

    return run_command(work)


if __name__ == "__main__":
    sys.exit(main())
