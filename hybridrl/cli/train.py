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
from typing import Any

import numpy as np

from hybridrl.cli.data.inspection import PROGRAMS, own_names, program_of, row_tokens
from hybridrl.cli.data.tasks import TASKS, data_file, task_file
from hybridrl.cli.plan import (
    BFLOAT16,
    MIN_SPEED_UP,
    USABLE,
    PlannedDevice,
    bfloat16_speed_up,
    expected_step,
    read_shape,
    word,
)
from hybridrl.config import PPOConfig, load_config, model_folder
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
from hybridrl.workers.rollout.sampling.sampler import SamplingParams, row_seeds, sequence_keys

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


def train(arguments: argparse.Namespace) -> None:
    """Run `hybridrl train`; the training takes the place of this process."""
    found = this_machine()
    words = command_words(arguments, found)
    command = [sys.executable, "-m", *words]
    show(f"python -m {shlex.join(words)}\n")
    if words[0] == "hybridrl.main_ppo":
        show_error(_expected(words[1:], found))
    if not arguments.print:
        os.execv(command[0], command)


def _expected(words: list[str], found: ThisMachine) -> str:
    """Return the machine and the expected seconds of a step, see `hybridrl plan`."""
    config = load_config(PPOConfig, words, program="hybridrl train", config_name="ppo_trainer")
    device = PlannedDevice(str(found), found.device, found.memory, is_here=True)
    line = "" if config is None else expected_step(config, device)
    return f"{found}{line}" if line else ""


def command_words(arguments: argparse.Namespace, found: ThisMachine) -> list[str]:
    """Return the module of the program and its settings.

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
    if module == "main_ppo":  # a wrong word is refused before answers are sampled
        load_config(PPOConfig, [PRESET, *arguments.settings], program="hybridrl train", config_name="ppo_trainer")
    chosen = _ppo_settings(about, given) if module == "main_ppo" else _supervised_settings(about, module)
    values = {**files, **chosen, **_record_settings(arguments, validates="data.val_files" in files)}
    words = [*(f"{key}={word(value)}" for key, value in values.items()), *own.split(), *arguments.settings]
    if module == "main_ppo":
        words = _planned([PRESET, *words], found)
    return [f"hybridrl.{module}", *words]


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


def _ppo_settings(about: _About, given: Mapping[str, str]) -> dict[str, Any]:
    """Return settings of GRPO. given: The user's own, as texts."""
    shape, positions = read_shape(about.folder), _positions(about.folder)
    prompt = _rounded(about.length, positions - ROUND_TO)
    gpus = about.machine.gpus
    fast = BFLOAT16 if _is_faster_in_bfloat16(about.machine) else {}
    response = max(1, min(MAX_RESPONSE if gpus else CPU_RESPONSE, positions - prompt))
    if not given.keys() & {RESPONSE_LENGTH, *OTHER_ANSWERS}:
        dtype = fast.get("actor_rollout_ref.rollout.dtype", "auto")
        response = _response_length(about, dtype=dtype, prompt=prompt, limit=response)
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
    return chosen | fast | ({"trainer.n_gpus_per_node": gpus} if gpus > 1 else {} if gpus else on_cpu)


def _is_faster_in_bfloat16(machine: ThisMachine) -> bool:
    return not machine.gpus and machine.bfloat16 != "" and bfloat16_speed_up() >= MIN_SPEED_UP


def _response_length(about: _About, *, dtype: str, prompt: int, limit: int) -> int:
    """Return the tokens that responses may have, by where sampled answers end; says what it saw.

    Twice what nearly all of them have, because answers may get longer in training; `limit` if many do not end.
    """
    prompts = [row for row in about.rows if 0 < len(row) <= prompt][:NUM_ANSWERS]
    if not prompts:
        return limit
    special, device = load_special_tokens(about.folder), resolve_device("auto")
    setup = RolloutSetup(
        about.folder, RolloutConfig(dtype=dtype), special.eos_ids, special.pad_id, prompt, limit, device
    )
    keys = sequence_keys(row_seeds(0, len(prompts)), 1)
    found = make_rollout("hf", setup).generate_tokens(prompts, keys, SamplingParams(limit))
    lengths = [length for length in found.mask.sum(-1).tolist() if length < limit]
    seen = f"{len(lengths)} of {len(prompts)} sampled answers end before token {limit}"
    if len(lengths) < ENDING_SHARE * len(prompts):
        show_error(f"{seen}\n")
        return limit
    most = int(np.percentile(lengths, ANSWER_PERCENTILE))
    show_error(f"{seen}, {ANSWER_PERCENTILE} % of these before token {most + 1}\n")
    return _rounded(2 * most, limit)


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
    config = load_config(PPOConfig, words, program="hybridrl train", config_name="ppo_trainer")
    if config is None:  # --cfg job has shown the settings
        raise ConfigError("--cfg: add it to the command that `hybridrl train --print` prints")
    validate_config(config)
    devices = Devices(read_shape=read_shape, device=found.device, memory=found.memory, budget=USABLE * found.memory)
    best = next((candidate for candidate in candidates(config, devices) if not candidate.problem), None)
    if best is None:
        raise ConfigError(
            "the job does not fit into this machine's memory; `hybridrl plan` with the same settings says what it "
            "needs. Take a smaller model, or shorter responses (data.max_response_length)"
        )
    given = {word.partition("=")[0] for word in words}
    preset = load_config(PPOConfig, words[:1], program="hybridrl train", config_name="ppo_trainer")
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
