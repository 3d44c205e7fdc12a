"""`hybridrl eval TASK MODEL`: how often a model answers right, with confidence intervals and all samples.

For a model it runs the validation of `main_ppo` (`trainer.val_only`) and counts what it writes, so prompts, sampling
and scores are those of training. For a URL it sends the prompts to the endpoint, and scores the answers likewise.
"""

import argparse
import asyncio
import functools
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hybridrl import main_ppo
from hybridrl.cli.data.tasks import data_file
from hybridrl.cli.models.export import model_directory
from hybridrl.config import PPOConfig, load_config
from hybridrl.driver.terminal import show
from hybridrl.errors import ConfigError
from hybridrl.evaluation.endpoint import EndpointResponse, find_model, respond_all
from hybridrl.evaluation.estimates import grouped, table
from hybridrl.evaluation.output_files import prepare_folder
from hybridrl.evaluation.scoring import report, sample_of, score_processes, warn_of_failures, write_lines
from hybridrl.rewards.process_pool import ScoreProcessPool
from hybridrl.rewards.sample_score import SampleScore, read_score
from hybridrl.trainer import data
from hybridrl.trainer.data.parquet import ParquetRows
from hybridrl.trainer.data.prompt_dataset import as_messages

BATCH = 64  # prompts generated at once, each followed by a line of progress
UNKNOWN = "unknown"  # data source of a row without one
LENGTH = 1024  # tokens of prompt and of response, where the model has room for both


def evaluate(arguments: argparse.Namespace) -> int:
    """Run `hybridrl eval`, and return the exit code: 1 if no response has a score."""
    for name in ("n", "concurrency"):
        if getattr(arguments, name) < 1:
            raise ConfigError(f"--{name}={getattr(arguments, name)}: must be 1 or more")
    folder = Path(arguments.output or f"outputs/eval/{Path(arguments.task).stem}")
    if any((folder / "samples").glob("*.jsonl")):
        raise ConfigError(f"--output {folder}: has samples already; choose another directory")
    if "://" in arguments.model:
        return _evaluate_endpoint(arguments, folder)
    own = {word.partition("=")[0].lstrip("+") for word in arguments.settings}
    if taken := sorted(own & {"trainer.validation_data_dir", "trainer.default_local_dir"}):
        raise ConfigError(f"{taken[0]}: an evaluation writes to --output; leave the setting out")
    file = data_file(arguments.task)
    with model_directory(arguments.model, trust_remote_code=False) as model:
        code = main_ppo.main([*run_settings(file, model, folder, arguments.n), *arguments.settings])
    path = folder / "samples" / "0.jsonl"
    if code or not path.exists():  # --cfg job has shown the settings
        return code
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    scored = [row for row in rows if row["score"] is not None]
    warn_of_failures(rows)
    settings = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    sampled, limits = _sampling_line(**settings["actor_rollout_ref"]["rollout"]["val_kwargs"]), settings["data"]
    lengths = f"prompts of at most {limits['max_prompt_length']} tokens, responses of {limits['max_response_length']}"
    show("\n".join([*table(arguments.task, grouped(scored)), f"{sampled}; {lengths}", f"samples: {path}\n"]))
    return 0 if scored else 1


def _sampling_line(*, do_sample: bool, temperature: float, top_p: float, **_: Any) -> str:
    return f"temperature {temperature:g}, top_p {top_p:g}" if do_sample else "greedy"


def run_settings(file: str, model: str, folder: Path, n: int) -> list[str]:
    """Return the settings of a validation in this process; more of `main_ppo` may follow them."""
    length = default_length(model)
    return [
        "--config-name=local_debug",
        f"data.train_files={file}",
        f"data.val_files={file}",
        f"data.max_prompt_length={length}",
        f"data.max_response_length={length}",
        f"data.val_batch_size={BATCH}",
        f"actor_rollout_ref.model.path={model}",
        f"actor_rollout_ref.rollout.val_kwargs.n={n}",
        f"actor_rollout_ref.rollout.val_kwargs.do_sample={str(n > 1).lower()}",
        "trainer.val_only=true",
        "trainer.resume_mode=disable",
        f"trainer.validation_data_dir={folder / 'samples'}",
        f"trainer.default_local_dir={folder}",
    ]


def default_length(model: str) -> int:
    """Return the tokens of the longest prompt and of the longest response.

    That is half of the model's positions, at most 1024. A model whose config cannot be read gets 1024; loading it then
    says what is wrong.
    """
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(model)
    except Exception:  # its code believes the files; `main_ppo` reads them again and names the mistake
        return LENGTH
    positions = getattr(config.get_text_config(), "max_position_embeddings", None)
    return LENGTH if positions is None else max(1, min(LENGTH, positions // 2))


# -- an endpoint


def _evaluate_endpoint(arguments: argparse.Namespace, folder: Path) -> int:
    sampled = f"actor_rollout_ref.rollout.val_kwargs.do_sample={str(arguments.n > 1).lower()}"
    words = [f"data.max_response_length={LENGTH}", sampled, *arguments.settings]
    config = load_config(
        PPOConfig, ["--config-name=local_debug", *words], program="hybridrl eval", config_name="ppo_trainer"
    )
    if config is None:  # --cfg job has shown the settings
        return 0
    found = find_model(arguments.model, name=arguments.model_name, key_variable=arguments.key_variable)
    model, file, output = asyncio.run(found), data_file(arguments.task), str(folder / "samples" / "0.jsonl")
    rows = ParquetRows(file)
    rows.require(config.data.prompt_key, "data.prompt_key")
    if config.data.ground_truth_key is not None:
        rows.require(config.data.ground_truth_key, "data.ground_truth_key")
    for name in ("reward_model", "extra_info"):
        rows.require_mappings(name)
    num = len(rows) if config.data.val_max_samples < 0 else min(config.data.val_max_samples, len(rows))
    if not num:
        raise ConfigError(f"TASK {arguments.task}: {file} has no rows")
    requests = _requests(config, rows, num=num, n=arguments.n)
    prepare_folder(output, "--output")
    on_done = functools.partial(_show_progress, len(requests))
    sources = (rows[row].get("data_source") or UNKNOWN for row in range(num))
    with score_processes(sources, config.custom_reward_function, config.reward_model) as pool:
        responding = respond_all(model, requests, max_open=arguments.concurrency, on_done=on_done)
        samples = _scored(pool, config, rows, asyncio.run(responding), n=arguments.n)
    write_lines(output, samples)
    code = report(samples)
    shown = _sampling_line(**asdict(config.actor_rollout_ref.rollout.val_kwargs))
    lengths = f"responses of at most {config.data.max_response_length} tokens"
    show(f"model: {model.name} at {model.url}\n{shown}; {lengths}\nsamples: {output}\n")
    return code


def _requests(
    config: PPOConfig, rows: ParquetRows, *, num: int, n: int
) -> list[tuple[list[dict[str, Any]], dict[str, Any]]]:
    """Return n requests for each of the first `num` rows; those of a row are adjacent."""
    found = []
    column = data.find_column(rows, config.data.image_key)
    for row in range(num):
        messages = as_messages(rows[row][config.data.prompt_key], rows.location(row))
        if column is not None:
            limit = config.data.max_images_per_prompt
            _, images = data.read_images(rows, row, column, max_images=limit)
            messages = data.messages_with_data(messages, images, rows.location(row)) if images else messages
        found += [(messages, _parameters(config, seed=row * n + sample)) for sample in range(n)]
    return found


def _show_progress(total: int, done: int) -> None:
    if sys.stderr.isatty() or done == total:
        sys.stderr.write(f"\r{done} of {total} responses" + ("\n" if done == total else ""))
        sys.stderr.flush()


def _parameters(config: PPOConfig, *, seed: int) -> dict[str, Any]:
    """Return how to sample: as the validation of a model does with these settings."""
    chosen = config.actor_rollout_ref.rollout.val_kwargs
    sampled = {"temperature": chosen.temperature, "top_p": chosen.top_p, "seed": config.trainer.seed + seed}
    sampled |= {"top_k": chosen.top_k} if chosen.top_k > 0 else {}  # not every endpoint knows it
    return {"max_tokens": config.data.max_response_length, **(sampled if chosen.do_sample else {"temperature": 0})}


def _scored(
    pool: ScoreProcessPool, config: PPOConfig, rows: ParquetRows, responses: list[EndpointResponse], *, n: int
) -> list[dict[str, Any]]:
    """Return a record of each response with its score; one that could not be had has a reason."""
    calls, key = [], config.data.ground_truth_key
    for number, response in enumerate(responses):
        columns = rows[number // n]
        calls.append(
            {
                "data_source": columns.get("data_source") or UNKNOWN,
                "solution_str": response.text,
                "ground_truth": columns[key] if key else (columns.get("reward_model") or {}).get("ground_truth"),
                "extra_info": columns.get("extra_info") or {},
            }
        )
    there = [number for number, response in enumerate(responses) if not response.reason]
    scores = map(read_score, pool.map([calls[number] for number in there]))
    by_number = dict(zip(there, scores, strict=True))
    samples = []
    for number, (call, response) in enumerate(zip(calls, responses, strict=True)):
        missing = SampleScore(failure="error", reason=response.reason)
        record = sample_of(f"{number // n}:{number % n}", call, by_number.get(number, missing))
        samples.append({**record, "finish_reason": response.finish_reason})
    return samples
