"""GRPO from a script or a notebook: a model, a reward function and rows.

    from hybridrl import GRPOTrainer

    def reward(solution_str, ground_truth, **_):
        return float(solution_str.strip() == ground_truth)

    rows = [{"prompt": "2 + 3 =", "ground_truth": "5"}, {"prompt": "4 + 4 =", "ground_truth": "8"}]
    trainer = GRPOTrainer(model="my-model", reward_fn=reward, train_dataset=rows)
    trainer.train()
    trainer.save_model("my-better-model")

`GRPOTrainer` writes the rows to files and runs `main_ppo` in the calling process, without Ray. So a run from Python has
the files, the checks and the settings of one from the command line. To change the algorithm itself, derive from
`RayPPOTrainer`.
"""

import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from hybridrl import cli, main_ppo
from hybridrl.config import PPOConfig
from hybridrl.config.load import compose_settings
from hybridrl.driver.program import set_up_logging
from hybridrl.errors import CheckpointError, ConfigError
from hybridrl.trainer import run as run_files
from hybridrl.trainer.data.row_files import prompt_table, write_table
from hybridrl.trainer.run.tracking import METRICS_FILE, read_metrics

PRESET = "grpo_trainer"
BATCH_SIZE = 32  # prompts of a step, unless there are fewer rows; a step then takes seconds on a CPU
DEFAULTS = {
    "actor_rollout_ref.rollout.name": "hf",
    "trainer.backend": "local",
    "trainer.logger": ["console", "jsonl"],
    "trainer.save_freq": 100,
}
VALIDATION_STEPS = 100  # between two validations
Rows = Iterable[Mapping[str, Any] | str | os.PathLike] | str | os.PathLike


class GRPOTrainer:
    """Train a model by GRPO (arXiv:2402.03300), or by what `settings` choose.

    Args:
        model: Directory, Hugging Face name or GGUF file of a causal language model.
        reward_fn: Called for each response in a process of its own, with the keyword arguments `data_source`,
            `solution_str`, `ground_truth` and `extra_info`; returns a number, or a dict with a number under "score".
            None takes the built-in function of the rows' `data_source`.
        train_dataset: Rows with `prompt`, a text or a list of messages, and `ground_truth`; other columns reach the
            reward function in `extra_info`. A list of dicts, a Hugging Face dataset, or paths of parquet files in the
            format of docs/data.md.
        eval_dataset: The same, for validation: at the start, every 100 steps and at the end.
        output_dir: Directory of the run. A second `train` with the same directory resumes from its newest checkpoint.
        settings: Settings of `main_ppo` by their dotted names. They replace `DEFAULTS` and the preset `grpo_trainer`.

    Raises:
        ConfigError: A setting is unknown or has a wrong value; one line for each.
        DataError: A row has no prompt, or a column has values of several types.
    """

    def __init__(
        self,
        model: str | os.PathLike,
        reward_fn: Callable[..., Any] | None = None,
        train_dataset: Rows | None = None,
        eval_dataset: Rows | None = None,
        *,
        output_dir: str | os.PathLike = "outputs/grpo",
        settings: Mapping[str, Any] | None = None,
    ):
        if train_dataset is None:
            raise ConfigError(
                "train_dataset=None: give rows, for instance [{'prompt': '2 + 3 =', 'ground_truth': '5'}]"
            )
        if reward_fn is not None and not callable(reward_fn):
            raise ConfigError(f"reward_fn={reward_fn!r}: give a function, or None for the built-in ones")
        set_up_logging()
        self.reward_fn, self.output_dir = reward_fn, os.fspath(output_dir)
        self._tables: dict[str, Any] = {}  # path -> rows that `train` writes
        chosen = {
            **DEFAULTS,
            "actor_rollout_ref.model.path": os.fspath(model),
            "trainer.default_local_dir": self.output_dir,
            "data.train_files": self._files("train", train_dataset),
            "data.val_files": [] if eval_dataset is None else self._files("val", eval_dataset),
            "trainer.test_freq": -1 if eval_dataset is None else VALIDATION_STEPS,
            "data.train_batch_size": min([BATCH_SIZE, *(len(rows) for rows in self._tables.values())]),
            **(settings or {}),
        }
        chosen.setdefault("actor_rollout_ref.actor.ppo_mini_batch_size", chosen["data.train_batch_size"])
        self.config: PPOConfig = compose_settings(PPOConfig, chosen, config_name=PRESET)

    def train(self) -> list[dict[str, float]]:
        """Train, and return the metrics of every step, which are also in `output_dir`/metrics.jsonl."""
        with run_files.prepared_run_directory(self.config.trainer) as directory:
            for path, rows in self._tables.items():
                write_table(rows, path)
            main_ppo.validate_config(self.config)
            run_files.warn_about_disabled_outputs(self.config)
            workers = main_ppo.worker_classes(self.config)
            pools = main_ppo.resource_pools(self.config, workers)
            main_ppo.run(self.config, workers, pools, compute_score=self.reward_fn)
        metrics = os.path.join(directory, METRICS_FILE)
        return read_metrics(metrics) if os.path.exists(metrics) else []

    def save_model(self, directory: str | os.PathLike) -> None:
        """Write the policy of the newest checkpoint as a Hugging Face model to a new directory."""
        newest = run_files.newest_checkpoint_of_run(self.config.trainer)
        if newest is None:
            raise CheckpointError(f"{self.output_dir} has no checkpoint; call train() with trainer.save_freq above 0")
        cli.export_checkpoint(newest, os.fspath(directory))

    def _files(self, name: str, rows: Rows) -> list[str]:
        """Return the files of these rows; `train` writes those that are not in files yet."""
        if isinstance(rows, str | os.PathLike):
            return [os.fspath(rows)]
        listed: list[Any] = list(rows)
        if listed and all(isinstance(row, str | os.PathLike) for row in listed):
            return [os.fspath(path) for path in listed]
        path = os.path.join(self.output_dir, "data", f"{name}.parquet")
        self._tables[path] = prompt_table(listed)
        return [path]
