"""Scores of responses by reward functions, in processes with a time limit. Runs in the driver.

A response without a score is left out and counted, never scored 0.
"""

import contextlib
import json
import logging
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from hybridrl.config.reward_limits import RewardLimits
from hybridrl.config.schema.generation import EvaluationConfig, ScoringConfig
from hybridrl.config.schema.ppo import CustomRewardConfig
from hybridrl.config.schema.workers import RewardModelConfig
from hybridrl.driver.terminal import show
from hybridrl.errors import ConfigError, DataError
from hybridrl.evaluation.estimates import estimates, grouped, table
from hybridrl.evaluation.output_files import prepare_folder
from hybridrl.rewards.function_address import SAMPLE_ARGUMENTS, FunctionAddress
from hybridrl.rewards.load import describe_failure, program_runner
from hybridrl.rewards.manager import source_problem
from hybridrl.rewards.process_pool import ScoreProcessPool
from hybridrl.rewards.sample_score import SampleScore, read_score
from hybridrl.system.atomic_write import atomic_write
from hybridrl.trainer.data.parquet import ParquetRows

logger = logging.getLogger(__name__)
MAX_PROCESSES = 32  # by default; more would need the memory of a machine
MAX_REASONS = 3  # of responses without a score, shown
Call = dict[str, Any]  # arguments of a reward function


def score_file(config: EvaluationConfig) -> int:
    """Score the responses in `data.path`, print estimates per data source, and return the exit code.

    Raises:
        ConfigError: The reward function cannot be used.
        DataError: A column is missing, or a row has no responses.
    """
    rows = ParquetRows(config.data.path)
    for key in ("response_key", "data_source_key"):
        rows.require(getattr(config.data, key), f"data.{key}")
    if config.data.output_path is not None:
        prepare_folder(config.data.output_path, "data.output_path")
    calls = [call for row in range(len(rows)) for call in _calls(rows, row, config)]
    scores = score_calls([call for _, call in calls], config.custom_reward_function, config.reward_model)
    samples = [sample_of(name, call, score) for (name, call), score in zip(calls, scores, strict=True)]
    if config.data.output_path is not None:
        write_lines(config.data.output_path, samples)
    return report(samples)


def score_calls(calls: Sequence[Call], custom: CustomRewardConfig, scoring: ScoringConfig) -> list[SampleScore]:
    """Return the score of each call. Raises ConfigError, see `score_processes`."""
    with score_processes((call["data_source"] for call in calls), custom, scoring) as pool:
        return [read_score(result) for result in pool.map(calls)]


@contextlib.contextmanager
def score_processes(
    sources: Iterable[Any], custom: CustomRewardConfig, scoring: ScoringConfig | RewardModelConfig
) -> Iterator[ScoreProcessPool]:
    """Have processes that score by the custom function, or by those of these data sources.

    Raises:
        ConfigError: The function cannot be loaded, or a data source has no function, or no sandbox for its programs.
    """
    num_processes = scoring.num_processes or min(MAX_PROCESSES, os.cpu_count() or 1)
    if custom.path is not None:
        function = FunctionAddress(custom.path, custom.name, kwargs=dict(custom.kwargs))
    else:
        runner = program_runner(scoring.sandbox_fusion, scoring.timeout_s, num_processes=num_processes)
        function = FunctionAddress.of(None, kwargs={"sandbox": runner, **custom.kwargs})
        for source in dict.fromkeys(sources):
            if (problem := source_problem(source, function)) is not None:
                raise ConfigError(problem)
    pool = ScoreProcessPool(
        function, num_processes=num_processes, timeout_s=scoring.timeout_s, limits=RewardLimits.of(scoring.limits)
    )
    try:
        if custom.path is not None and (failure := pool.check()) is not None:
            raise ConfigError(describe_failure(custom, failure, function))
        yield pool
    finally:
        pool.close()


def sample_of(name: str, call: Call, score: SampleScore) -> dict[str, Any]:
    """Return a scored response as a record; the id `name` begins with that of its prompt, followed by a colon."""
    record = {"id": name, "data_source": call["data_source"], "output": call["solution_str"]}
    record |= {"gts": call["ground_truth"], "score": score.value if score.valid else None}
    return record | score.extra | ({} if score.valid else {"failure": score.failure, "reason": score.reason})


def report(samples: Sequence[Mapping[str, Any]]) -> int:
    """Print the estimates of scored samples per data source, and return 0; 1 if no sample has a score.

    The last line is a JSON object with verl's names: {"test_score/DATA_SOURCE": mean}.
    """
    scored = [sample for sample in samples if sample["score"] is not None]
    means = {}
    for source in dict.fromkeys(sample["data_source"] for sample in scored):
        by_prompt = grouped(sample for sample in scored if sample["data_source"] == source)
        show("\n".join(table(source, by_prompt)) + "\n")
        means[f"test_score/{source}"] = next(estimates(by_prompt)).mean
    warn_of_failures(samples)
    show(f"{json.dumps(means)}\n")
    return 0 if scored else 1


def warn_of_failures(samples: Sequence[Mapping[str, Any]]) -> None:
    """Log how many samples have no score, and the most frequent reasons, where samples have them."""
    failed = [sample for sample in samples if sample["score"] is None]
    if failed:
        logger.warning("%d of %d responses have no score and are left out", len(failed), len(samples))
    reasons = Counter(sample["reason"] for sample in failed if "reason" in sample)
    for reason, count in reasons.most_common(MAX_REASONS):
        logger.warning("  %d times: %s", count, reason)


def write_lines(path: str, samples: Iterable[Mapping[str, Any]]) -> None:
    """Write records as JSON lines to a file that appears complete or not at all."""
    try:
        with atomic_write(path) as file:
            for sample in samples:
                file.write(json.dumps(sample, ensure_ascii=False, default=str) + "\n")
    except OSError as error:
        raise ConfigError(f"{path}: the samples cannot be written ({error.strerror}); choose another file") from error


def _calls(rows: ParquetRows, row: int, config: EvaluationConfig) -> Iterator[tuple[str, Call]]:
    """Yield the id and the call of each response of a row."""
    columns, keys = rows[row], config.data
    responses = columns[keys.response_key]
    responses = [responses] if isinstance(responses, str) else responses
    if not isinstance(responses, list) or not responses or not all(isinstance(text, str) for text in responses):
        raise DataError(
            f"{rows.location(row)}: column {keys.response_key!r} (data.response_key) must be a text or a list of texts"
        )
    model = columns.get(keys.reward_model_key) or {}
    if not isinstance(model, dict):
        raise DataError(
            f"{rows.location(row)}: column {keys.reward_model_key!r} (data.reward_model_key) must be a mapping such as "
            "{'ground_truth': '4'}"
        )
    about = columns[keys.data_source_key], model.get("ground_truth"), columns.get("extra_info") or {}
    for number, text in enumerate(responses):
        values = (about[0], text, about[1], about[2])
        yield f"{row}:{number}", dict(zip(SAMPLE_ARGUMENTS, values, strict=True))
