"""The tasks that commands know by a word, and `hybridrl data list`."""

import argparse
import importlib
from dataclasses import dataclass
from pathlib import Path

from hybridrl.config.schema.data import HubData
from hybridrl.driver.terminal import show
from hybridrl.errors import ConfigError

DATA = Path("~/data")
USUAL_SPLIT = "test"


@dataclass(frozen=True)
class KnownTask:
    """A task with a script of `data_preprocess`, which writes train.parquet and test.parquet.

    Attributes:
        script: The script's module.
        about: What the task is.
        source: Where the script gets the data from.
    """

    script: str
    about: str
    source: str


TASKS = {
    "gsm8k": KnownTask("data_preprocess.gsm8k", "grade-school word problems, answer a number", "hub: openai/gsm8k"),
    "math": KnownTask(
        "data_preprocess.math_dataset", "competition mathematics, answer in \\boxed{}", "hub: MATH-lighteval"
    ),
    "arithmetic": KnownTask("data_preprocess.arithmetic", "the quick start's word problems", "generated here"),
}
OTHERS = {  # scripts whose data have no task: they need a reward model, or are for preferences
    "data_preprocess.full_hh_rlhf": "conversations with a preferred and a rejected response (main_dpo, main_rm)",
    "data_preprocess.hellaswag": "sentence completion with four choices",
}


def list_tasks(arguments: argparse.Namespace) -> None:
    """Print the known tasks, where their data are, and how to make them."""
    lines = [f"{'task':12}{'data':44}{'source':22}made by"]
    for name, task in TASKS.items():
        folder = (DATA / name).expanduser()
        found = [split for split in ("train", "test") if (folder / f"{split}.parquet").is_file()]
        state = f"{DATA / name}: {', '.join(found)}" if found else "not made yet"
        lines.append(f"{name:12}{state:44}{task.source:22}python -m {task.script}")
        lines.append(f"{'':12}{task.about}")
    lines += [
        "",
        "hybridrl train and hybridrl eval make the data of a task when they first need them.",
        "Other scripts:",
    ]
    lines += [f"  python -m {script:32} {about}" for script, about in OTHERS.items()]
    lines += ["Each has --local_dir, and --data_source for a copy of your own: a .jsonl file, or a directory of them."]
    show("\n".join(lines) + "\n")


def data_file(data: str, *, kind: str = "TASK") -> str:
    """Return a known task's test split, or the name of a file or a dataset of the hub as it is.

    Raises:
        ConfigError: There is no such file; the message names the argument `kind`.
    """
    if data in TASKS:
        return task_file(data)
    if Path(data).is_file() or HubData.named(data) is not None:
        return data
    raise ConfigError(
        f"{kind} {data}: no such file; give a parquet or .jsonl file, a dataset ORG/NAME of the hub, or one of "
        f"{', '.join(TASKS)}"
    )


def task_file(task: str, split: str = USUAL_SPLIT, source: str | None = None) -> str:
    """Return the parquet file of a known task's split; its data are made the first time.

    Args:
        task: A name of `TASKS`.
        split: "train" or "test".
        source: A copy of the raw data, as `--data_source` of the script takes it; None: the script's own.

    Raises:
        ConfigError: The data could not be made.
    """
    folder = (DATA / task).expanduser()
    if not (folder / f"{split}.parquet").is_file():
        script, more = TASKS[task].script, ["--data_source", source] if source else []
        if importlib.import_module(script).main(["--local_dir", str(folder), *more]):
            raise ConfigError(
                f"TASK {task}: its data could not be made; run `python -m {script} --local_dir {folder}`, with "
                "--data_source for a copy of your own"
            )
    return str(folder / f"{split}.parquet")
