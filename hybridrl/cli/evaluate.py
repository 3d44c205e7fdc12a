"""`hybridrl eval TASK MODEL`: how often a model answers right, with confidence intervals and all samples.

Runs the validation of `main_ppo` (`trainer.val_only`) and counts what it writes, so prompts, sampling and scores are
those of training.
"""

import argparse
import importlib
import json
import math
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hybridrl.errors import ConfigError
from hybridrl.trainer.ppo.metrics import majority_vote, pass_at_k

TASKS = {"gsm8k": "gsm8k", "math": "math_dataset", "arithmetic": "arithmetic"}  # task -> script of data_preprocess
DATA = Path("~/data")
SEED = 42  # of majority voting's resamples
Z_95 = 1.959964  # normal distribution, two sides


@dataclass(frozen=True)
class Estimate:
    """A mean over prompts, and half of its 95 % confidence interval; nan for a single prompt."""

    name: str
    mean: float
    half_width: float


def evaluate(arguments: argparse.Namespace) -> int:
    """Run `hybridrl eval`, and return the exit code of the validation."""
    from hybridrl import main_ppo
    from hybridrl.cli.models import model_directory

    if arguments.n < 1:
        raise ConfigError(f"--n={arguments.n}: must be 1 or more")
    if "://" in arguments.model:
        raise ConfigError(
            f"{arguments.model}: an endpoint is not evaluated by this command; give a model's directory or hub name, "
            "or a checkpoint, or point lm-eval or inspect-ai at the endpoint"
        )
    folder = Path(arguments.output or f"outputs/eval/{Path(arguments.task).stem}")
    if (folder / "samples").exists():
        raise ConfigError(f"--output {folder}: has samples already; choose another directory")
    file = task_file(arguments.task)
    with model_directory(arguments.model, trust_remote_code=False) as model:
        code = main_ppo.main([*run_settings(file, model, folder, arguments.n), *arguments.settings])
    if code == 0:
        rows = [json.loads(line) for line in (folder / "samples" / "0.jsonl").read_text(encoding="utf-8").splitlines()]
        sys.stdout.write("\n".join(table(arguments.task, rows)) + f"\nsamples: {folder / 'samples' / '0.jsonl'}\n")
    return code


def task_file(task: str) -> str:
    """Return the parquet file of a task; makes that of a known task the first time.

    Raises:
        ConfigError: There is no such task or file, or its data could not be made.
    """
    if task not in TASKS:
        if Path(task).is_file():
            return task
        raise ConfigError(f"TASK {task}: no such file; give a parquet file, or one of {', '.join(TASKS)}")
    folder = (DATA / task).expanduser()
    if not (folder / "test.parquet").is_file():
        script = f"data_preprocess.{TASKS[task]}"
        if importlib.import_module(script).main(["--local_dir", str(folder)]):
            raise ConfigError(
                f"TASK {task}: its data could not be made; run `python -m {script} --local_dir {folder}`, with "
                "--data_source for a copy of your own"
            )
    return str(folder / "test.parquet")


def run_settings(file: str, model: str, folder: Path, n: int) -> list[str]:
    """Return the settings of a validation in this process; more of `main_ppo` may follow them."""
    return [
        "--config-name=local_debug",
        f"data.train_files={file}",
        f"data.val_files={file}",
        "data.max_prompt_length=1024",
        "data.max_response_length=1024",
        f"actor_rollout_ref.model.path={model}",
        f"actor_rollout_ref.rollout.val_kwargs.n={n}",
        f"actor_rollout_ref.rollout.val_kwargs.do_sample={str(n > 1).lower()}",
        "trainer.val_only=true",
        f"trainer.validation_data_dir={folder / 'samples'}",
        f"trainer.default_local_dir={folder}",
    ]


def table(task: str, rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return lines with the estimates of a task's samples."""
    by_prompt = grouped(rows)
    lines = [f"{task}: {len(by_prompt)} prompts, {len(rows)} samples"]
    for estimate in estimates(by_prompt):
        lines.append(f"  {estimate.name:12} {estimate.mean:7.4f} ± {estimate.half_width:.4f}")
    return lines


def grouped(rows: Iterable[Mapping[str, Any]]) -> list[list[Mapping[str, Any]]]:
    """Return the samples of each prompt; a sample's id begins with that of its prompt."""
    found: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        found.setdefault(row["id"].rpartition(":")[0], []).append(row)
    return [*found.values()]


def estimates(by_prompt: Sequence[Sequence[Mapping[str, Any]]]) -> Iterator[Estimate]:
    """Yield the mean score (avg@n), pass@k for k = 1, 2, 4, ... n, and maj@n.

    pass@k needs scores of 0 or 1, maj@n the answers (`pred`). Every one is a mean over prompts of an estimate per
    prompt, so the interval is that of a mean of independent prompts.
    """
    num = min(len(rows) for rows in by_prompt)
    scores = [[float(row.get("acc", row["score"])) for row in rows] for rows in by_prompt]
    yield _mean(f"avg@{num}", [float(np.mean(values)) for values in scores])
    if {value for values in scores for value in values} <= {0.0, 1.0}:
        for k in _powers_of_two(num):
            yield _mean(f"pass@{k}", [pass_at_k(len(values), int(sum(values)), k) for values in scores])
    if num > 1 and all("pred" in row for rows in by_prompt for row in rows):
        voted = [
            majority_vote(np.array(values), [row["pred"] for row in rows], num, seed=SEED)[0]
            for values, rows in zip(scores, by_prompt, strict=True)
        ]
        yield _mean(f"maj@{num}", voted)


def _powers_of_two(limit: int) -> list[int]:
    powers = [2**exponent for exponent in range(limit.bit_length()) if 2**exponent < limit]
    return [*powers, limit]


def _mean(name: str, values: Sequence[float]) -> Estimate:
    spread = float(np.std(values, ddof=1)) if len(values) > 1 else math.nan
    return Estimate(name, float(np.mean(values)), Z_95 * spread / math.sqrt(len(values)))
