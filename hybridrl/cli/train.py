"""`hybridrl train DATA MODEL`: a training run in one line. Chooses program and settings, prints the command, runs it.

The command is an ordinary one of `main_ppo`, `main_sft` or `main_dpo`, which replaces this process. What it does not
choose has the preset's value; settings of the user follow and replace its own.
"""

import argparse
import os
import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from hybridrl.cli.data.inspection import PROGRAMS, own_names, program_of, row_tokens
from hybridrl.cli.data.tasks import TASKS, data_file, task_file
from hybridrl.cli.plan import (
    BFLOAT16,
    MIN_SPEED_UP,
    USABLE,
    PlannedDevice,
    bfloat16_speed_up,
    expected_sft_step,
    expected_step,
    read_shape,
    shape_reader,
    word,
)
from hybridrl.config import PPOConfig, SFTConfig, load_config, model_folder
from hybridrl.config.introspection import value_at
from hybridrl.config.schema.rollout import RolloutConfig
from hybridrl.driver.terminal import show, show_error
from hybridrl.errors import ConfigError
from hybridrl.main_ppo import validate_config
from hybridrl.planning.choices import MAX_TOKENS, Devices, candidates
from hybridrl.planning.machine import ThisMachine, this_machine
from hybridrl.trainer.data.parquet import ParquetRows
from hybridrl.trainer.data.tokenizer import load_tokenizer
from hybridrl.workers.process_setup import resolve_device
from hybridrl.workers.rollout.base import RolloutSetup, load_special_tokens, make_rollout
from hybridrl.workers.rollout.sampling.sampler import SamplingParams, default_seeds, sequence_keys

PRESET = "--config-name=grpo_trainer"
MEASURED_ROWS = 2000  # whose lengths are looked at; longer prompts among the others are left out
PERCENTILE, MAX_EXCESS = 99, 1.5  # of lengths; the longest row counts if it is at most so many times that
NUM_ANSWERS, ANSWER_PERCENTILE = 16, 95  # that are sampled to see where answers end
ENDING_SHARE = 0.75  # of the answers that must end by themselves
RESPONSE_LENGTH = "data.max_response_length"
OTHER_ANSWERS = ("actor_rollout_ref.rollout.mode", "actor_rollout_ref.rollout.stop", "--cfg")  # not those sampled here
ROUND_TO = 32  # tokens
MAX_RESPONSE, CPU_RESPONSE = 1024, 256
UNLIMITED = 4096  # positions of a model that has no limit
GPU_BATCH = 256  # prompts of a step
CPU_BATCHES = ((0, 32), (30e6, 8))  # from this number of parameters on
SFT_BATCH = 64
LEARNING_RATES = ((0, 3e-4), (30e6, 5e-5), (300e6, 5e-6), (1e9, 1e-6))  # from this number of parameters on
SFT_LEARNING_RATES = ((0, 1e-3), (30e6, 1e-4), (300e6, 2e-5), (1e9, 1e-5))
VALIDATED = 256  # prompts of a known task's test split
FREQUENCY = 20  # steps between two validations, and between two checkpoints

Config = TypeVar("Config", PPOConfig, SFTConfig)


def train(arguments: argparse.Namespace) -> None:
    """Run `hybridrl train`; the training takes the place of this process."""
    found = this_machine()
    run = chosen_run(arguments, found)
    command = [sys.executable, "-m", *run.words]
    show(f"python -m {shlex.join(run.words)}\n")
    show_error(_expected(run, found))
    if not arguments.print:
        os.execv(command[0], command)


@dataclass(frozen=True)
class ChosenRun:
    """A program and its settings.

    Attributes:
        words: The module, and the settings.
        tokens: Mean tokens of a prompt or conversation; of pairs, of their prompts.
        response: Mean tokens of sampled answers; 0: none were sampled.
    """

    words: list[str]
    tokens: int
    response: int = 0


def _expected(run: ChosenRun, found: ThisMachine) -> str:
    """Return the machine and the expected seconds of a step, see `hybridrl plan`; "" for pairs."""
    (module, *words), line = run.words, ""
    device = PlannedDevice(str(found), found.device, found.memory, is_here=True)
    if module == "hybridrl.main_ppo":
        line = expected_step(_load(PPOConfig, words), device, prompt=run.tokens, response=run.response)
    if module == "hybridrl.main_sft":
        line = expected_sft_step(_load(SFTConfig, words), device, tokens=run.tokens)
    return f"{found}{line}" if line else ""


def chosen_run(arguments: argparse.Namespace, found: ThisMachine) -> ChosenRun:
    """Return the program that reads the data, with settings for these rows, the model and the machine.

    Raises:
        ConfigError: There is no such task or file, or no program reads its columns.
        DataError: A row cannot be used.
    """
    files = _files(arguments.data, arguments.data_source)
    rows = ParquetRows(files["data.train_files"])
    named = own_names(arguments.settings)
    program = program_of(rows.columns(), named)
    if program is None:
        known = "; ".join(f"{', '.join(known.needs)} ({known.name})" for known in PROGRAMS)
        raise ConfigError(
            f"DATA {arguments.data}: no program reads its columns {', '.join(rows.columns())}; needed are {known}. "
            "Name yours in the same command: data.prompt_key=COLUMN data.ground_truth_key=COLUMN"
        )
    folder = model_folder(arguments.model, key="MODEL")
    tokenizer = load_tokenizer(folder, key="MODEL")
    key = program.needs[0]
    found_rows = row_tokens(rows, named.get(key, key), tokenizer, is_prompt=key == "prompt", limit=MEASURED_ROWS)
    about = _About(arguments.model, folder, [*found_rows], len(rows), found)
    module, _, own = program.name.replace(" or main_rm", "").partition(" ")
    given = {name: value for name, _, value in (text.partition("=") for text in arguments.settings)}
    response = 0
    if module == "main_ppo":
        _load(PPOConfig, [PRESET, *arguments.settings])  # a wrong word is refused before answers are sampled
        chosen, response = _ppo_settings(about, given)
    else:
        chosen = _supervised_settings(about, module)
    values = {**files, **chosen, **_record_settings(arguments, validates="data.val_files" in files)}
    words = [*(f"{key}={word(value)}" for key, value in values.items()), *own.split(), *arguments.settings]
    if module == "main_ppo":
        words = _planned([PRESET, *words], found)
    return ChosenRun([f"hybridrl.{module}", *words], about.mean, response)


def _load(schema: type[Config], words: list[str]) -> Config:
    name = "ppo_trainer" if schema is PPOConfig else "sft_trainer"
    config = load_config(schema, words, program="hybridrl train", config_name=name)
    if config is None:  # --cfg job has shown the settings
        raise ConfigError("--cfg: add it to the command that `hybridrl train --print` prints")
    return config


def _record_settings(arguments: argparse.Namespace, *, validates: bool) -> dict[str, Any]:
    """Return the run's name, and when it validates and commits."""
    name = f"{Path(arguments.data).stem}-{Path(arguments.model).name}".replace(":", "-")
    validation = {"data.val_max_samples": VALIDATED, "trainer.test_freq": FREQUENCY} if validates else {}
    return {"trainer.experiment_name": name, "trainer.save_freq": FREQUENCY, **validation}


def _files(data: str, source: str | None) -> dict[str, str]:
    """Return the settings of the data; a known task's files are made the first time, from `source` if given."""
    if data in TASKS:
        return {"data.train_files": task_file(data, "train", source), "data.val_files": task_file(data, "test", source)}
    return {"data.train_files": data_file(data, kind="DATA")}


@dataclass(frozen=True)
class _About:
    model: str  # as the user names it
    folder: str  # with its files; a name of the hub is the same
    rows: list[list[int]]  # tokens of the measured prompts or conversations
    num_rows: int
    machine: ThisMachine

    @property
    def length(self) -> int:
        """The tokens of the longest row, but for few that are much longer than the others."""
        lengths = [*map(len, self.rows)] or [1]
        most = int(np.percentile(lengths, PERCENTILE))
        return max(lengths) if max(lengths) <= MAX_EXCESS * most else most

    @property
    def mean(self) -> int:
        """The mean tokens of the rows that are not left out."""
        lengths = [len(row) for row in self.rows if len(row) <= self.length]
        return max(1, round(float(np.mean(lengths)))) if lengths else 1


def _ppo_settings(about: _About, given: Mapping[str, str]) -> tuple[dict[str, Any], int]:
    """Return settings of GRPO, and the mean tokens of sampled answers. given: The user's own, as texts."""
    shape, positions = read_shape(about.folder), _positions(about.folder)
    prompt = _rounded(about.length, positions - ROUND_TO)
    gpus = about.machine.gpus
    fast = BFLOAT16 if _is_faster_in_bfloat16(about.machine) else {}
    response, mean = max(1, min(MAX_RESPONSE if gpus else CPU_RESPONSE, positions - prompt)), 0
    if not given.keys() & {RESPONSE_LENGTH, *OTHER_ANSWERS}:
        dtype = fast.get("actor_rollout_ref.rollout.dtype", "auto")
        response, mean = _response_length(about, dtype=dtype, prompt=prompt, limit=response)
    batch = min(GPU_BATCH if gpus else int(_by_size(CPU_BATCHES, shape.params)), about.num_rows)
    chosen = {
        "data.train_batch_size": batch,
        "data.max_prompt_length": prompt,
        RESPONSE_LENGTH: response,
        "data.filter_overlong_prompts": True,
        "actor_rollout_ref.model.path": about.model,
        "actor_rollout_ref.actor.ppo_mini_batch_size": batch,
        "actor_rollout_ref.actor.optim.lr": _by_size(LEARNING_RATES, shape.params),
        "actor_rollout_ref.rollout.name": "vllm" if gpus and find_spec("vllm") else "hf",
    }
    on_cpu = {"actor_rollout_ref.actor.use_prefix_grouper": True, "trainer.backend": "local"}
    return chosen | fast | ({"trainer.n_gpus_per_node": gpus} if gpus > 1 else {} if gpus else on_cpu), mean


def _is_faster_in_bfloat16(machine: ThisMachine) -> bool:
    return not machine.gpus and machine.bfloat16 != "" and bfloat16_speed_up() >= MIN_SPEED_UP


def _response_length(about: _About, *, dtype: str, prompt: int, limit: int) -> tuple[int, int]:
    """Sample answers; return how long responses may be, and how long answers are on average.

    Twice what nearly all of them have, because answers may get longer in training; `limit` if many do not end.
    """
    prompts = [row for row in about.rows if 0 < len(row) <= prompt][:NUM_ANSWERS]
    if not prompts:
        return limit, 0
    special, device = load_special_tokens(about.folder), resolve_device("auto")
    setup = RolloutSetup(
        about.folder, RolloutConfig(dtype=dtype), special.eos_ids, special.pad_id, prompt, limit, device
    )
    keys = sequence_keys(default_seeds(0, len(prompts)), 1)
    found = make_rollout("hf", setup).generate_tokens(prompts, keys, SamplingParams(limit))
    sampled = found.mask.sum(-1).tolist()
    lengths, mean = [length for length in sampled if length < limit], round(sum(sampled) / len(sampled))
    seen = f"{len(lengths)} of {len(prompts)} sampled answers end before token {limit}"
    if len(lengths) < ENDING_SHARE * len(prompts):
        show_error(f"{seen}\n")
        return limit, mean
    most = int(np.percentile(lengths, ANSWER_PERCENTILE))
    show_error(f"{seen}, {ANSWER_PERCENTILE} % of these before token {most + 1}\n")
    return _rounded(2 * most, limit), mean


def _supervised_settings(about: _About, module: str) -> dict[str, Any]:
    """Return settings of supervised fine-tuning, or of preferences."""
    positions = _positions(about.folder)
    # Pairs have a response beside the prompt that was measured.
    wanted = about.length if module == "main_sft" else about.length + MAX_RESPONSE
    gpus, length = about.machine.gpus, _rounded(wanted, positions)
    chosen = {
        "data.train_batch_size": min(SFT_BATCH, about.num_rows),
        "data.max_length": length,
        "data.truncation": "filter",
        "model.path": about.model,
        "optim.lr": _by_size(SFT_LEARNING_RATES, read_shape(about.folder).params) / (1 if module == "main_sft" else 10),
    }
    on_cpu = {"data.max_token_len_per_gpu": max(MAX_TOKENS["cpu"], length), "trainer.backend": "local"}
    on_cpu |= {"fsdp_config.dtype": "bfloat16"} if _is_faster_in_bfloat16(about.machine) else {}
    return chosen | ({"trainer.n_gpus_per_node": gpus} if gpus > 1 else {} if gpus else on_cpu)


def _planned(words: list[str], found: ThisMachine) -> list[str]:
    """Return the words with the micro-batches and offloads that fit; the user's words stay the last."""
    config = _load(PPOConfig, words)
    validate_config(config)
    devices = Devices(
        read_shape=shape_reader(config), device=found.device, memory=found.memory, budget=USABLE * found.memory
    )
    best = next((candidate for candidate in candidates(config, devices) if not candidate.problem), None)
    if best is None:
        raise ConfigError(
            "the job does not fit into this machine's memory; `hybridrl plan` with the same settings says what it "
            "needs. Take a smaller model, or shorter responses (data.max_response_length)"
        )
    given = {word.partition("=")[0] for word in words}
    preset = _load(PPOConfig, words[:1])
    changes = {name: value for name, value in best.changes.items() if name not in given}
    return [*words, *(f"{name}={word(value)}" for name, value in changes.items() if value_at(preset, name) != value)]


def _positions(model: str) -> int:
    from transformers import AutoConfig

    found = getattr(AutoConfig.from_pretrained(model).get_text_config(), "max_position_embeddings", None)
    return found or UNLIMITED


def _rounded(length: int, limit: int) -> int:
    """Return the next multiple of `ROUND_TO`, at most `limit`."""
    return max(1, min(-(-length // ROUND_TO) * ROUND_TO, limit))


def _by_size(table: tuple[tuple[float, float], ...], params: float) -> float:
    return next(rate for least, rate in reversed(table) if params >= least)
