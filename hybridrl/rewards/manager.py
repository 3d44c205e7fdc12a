"""Turn a batch of responses into a reward tensor.

Decode the responses, call the reward function, and put the scores on the last tokens.

The trainer calls a manager in the driver process. `Scorer` is the contract of a manager. Not here: time limits
(`process_pool`) and the reward model (`workers.reward_model`).

A sample without a score is data, not a crash and not a 0: it is marked invalid, counted, and named in the log.

A batch may have a reward model's `rm_scores`. A custom function receives them and decides. Without a custom function
they are the reward. Validation is the exception: the built-in function scores a row unless the row's
`reward_model.style` is "model".

Shapes: B rows, R response tokens.
"""

import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

import reward_score
from hybridrl.config.reward_limits import RewardLimits
from hybridrl.config.schema.workers import OverlongBufferConfig
from hybridrl.data_plane.batch import DataProto
from hybridrl.errors import ConfigError, DataError
from hybridrl.rewards.function_address import SAMPLE_ARGUMENTS, FunctionAddress
from hybridrl.rewards.process import CallResult, LoadFailure
from hybridrl.rewards.process_pool import ScoreProcessPool
from hybridrl.rewards.sample_score import SampleScore, read_score

logger = logging.getLogger(__name__)

AGENT_REWARD = "agent_reward"  # column: what an agent says itself, (B,) of numbers or None
BRANCHES = "branches"  # column: further rows of the sample, (B,) of lists of dicts as `AgentLoopOutput` has them
LEFT_OUT = "left_out"  # column: whether the agent loop of a sample has failed, (B,) of bools
MAX_NAMED = 3  # reasons logged per batch, with a sample each; the metrics count all


@dataclass(frozen=True)
class RewardOutput:
    """Rewards of a batch.

    Attributes:
        reward_tensor: (B, R) float32, the score on the last token that the policy sampled, zero elsewhere and in
            invalid rows.
        valid: (B,) bool, False where there is no score; these rows must be masked out of the loss.
        extra: One list entry per row for every other key that the function returned; None where a row has no such key.
        metrics: Time, and ratios of failed samples.
    """

    reward_tensor: torch.Tensor
    valid: torch.Tensor
    extra: dict[str, list]
    metrics: dict[str, float]


class Scorer(Protocol):
    """What the driver needs of a reward manager. `reward_model.reward_manager` names a class or has its import path.

    `RewardManager` is the implementation to derive from: override `run_calls` or `adjust`. A class of another origin
    has these members and a constructor with the arguments of `RewardManager`. The driver constructs one manager for
    training and one for validation, and calls each from one thread.

    Attributes:
        arguments: Names of the keyword arguments of the reward function: SAMPLE_ARGUMENTS or BATCH_ARGUMENTS.
    """

    arguments: tuple[str, ...]

    def __call__(self, data: DataProto, return_dict: bool = False) -> RewardOutput | dict[str, Any]:
        """Return the rewards of a batch; a sample without a score is marked invalid, never scored 0."""

    def check_function(self) -> LoadFailure | None:
        """Return why the reward function cannot be used, or None. Called once, before anything else starts."""

    def close(self) -> None:
        """Release processes and files. Called once."""


def source_problem(data_source: Any, function: FunctionAddress) -> str | None:
    """Return why the built-in function, with its sandbox, cannot score rows of a data source, or None."""
    if not isinstance(data_source, str) or not reward_score.has_score_function(data_source):
        return reward_score.unknown_source_text(data_source)
    runner = function.kwargs.get("sandbox")
    if not reward_score.runs_programs(data_source) or runner is None:
        return None
    try:
        logger.info("programs of data_source=%s run in a sandbox: %s", data_source, runner.check())
    except ConfigError as error:
        return f"data_source={data_source!r} runs programs of the policy, and {error}"
    return None


class RewardManager:
    """Scores each sample with one call of the reward function.

    The call is `compute_score(data_source=, solution_str=, ground_truth=, extra_info=, **kwargs)`. With a reward model,
    `extra_info["rm_score"]` is its score of the row.

    Args:
        tokenizer: Decodes responses.
        num_examine: Samples of each data source to log, once.
        compute_score: A function (sync or async), a `FunctionAddress`, or None for
            `reward_score.default_compute_score`. It returns a number, or a dict with a number under "score".
        reward_fn_key: Column with the data source.
        kwargs: Fixed keyword arguments of every call.
        num_processes, timeout_s, limits: See `ScoreProcessPool`.
        max_response_length, overlong_buffer: Used by `dapo`.
        validate: This manager scores validation.
    """

    arguments = SAMPLE_ARGUMENTS

    def __init__(
        self,
        tokenizer: Any,
        num_examine: int = 0,
        compute_score: Callable | FunctionAddress | None = None,
        reward_fn_key: str = "data_source",
        *,
        kwargs: Mapping[str, Any] | None = None,
        num_processes: int = 1,
        timeout_s: float = 10.0,
        max_response_length: int | None = None,
        overlong_buffer: OverlongBufferConfig | None = None,
        validate: bool = False,
        limits: RewardLimits | None = None,
    ):
        self.tokenizer, self.num_examine, self.reward_fn_key = tokenizer, num_examine, reward_fn_key
        self.max_response_length, self.overlong_buffer = max_response_length, overlong_buffer
        self._num_logged: Counter[str] = Counter()
        function = FunctionAddress.of(compute_score, kwargs=kwargs, arguments=self.arguments)
        self._built_in, self._validate = function.is_built_in, validate
        self.processes = ScoreProcessPool(function, num_processes=num_processes, timeout_s=timeout_s, limits=limits)

    def __call__(self, data: DataProto, return_dict: bool = False) -> RewardOutput | dict[str, Any]:
        """Return the rewards of a batch with `responses` and `attention_mask`; with `return_dict`, under verl's names.

        The batch may have `rm_scores` (B, R); see the module docstring. Raises DataError if a column is missing.
        """
        start = time.monotonic()
        use_model_scores = self._built_in and not self._validate and "rm_scores" in data.batch
        output = model_output(data.batch["rm_scores"]) if use_model_scores else self._rule_output(data)
        output.metrics["reward/time_s"] = time.monotonic() - start
        if return_dict:
            return {
                "reward_tensor": output.reward_tensor,
                "reward_valid": output.valid,
                "reward_extra_info": output.extra,
            }
        return output

    def check_function(self) -> LoadFailure | None:
        """Return why no score process can load the reward function, or None."""
        return self.processes.check()

    def needs_ground_truth(self, data_source: str) -> bool:
        """Return whether rows of this data source are compared with a ground truth: by all built-in functions."""
        return self._built_in and data_source != "environment"

    def check_source(self, data_source: str) -> str | None:
        """Return why no row of this data source can be scored, or None.

        A custom function decides for itself. A source whose rows need a sandbox has one program run in it.
        """
        return source_problem(data_source, self.processes.function) if self._built_in else None

    def close(self) -> None:
        """Stop the score processes; the next call starts new ones."""
        self.processes.close()

    def run_calls(self, samples: list[dict[str, Any]]) -> list[CallResult]:
        """Return the result of one call per sample. Override it to call the function differently."""
        return self.processes.map(samples)

    def adjust(self, scores: list[SampleScore], lengths_B: torch.Tensor) -> list[SampleScore]:
        """Return the scores after corrections that need more than one text. `lengths_B`: response lengths in tokens."""
        return scores

    def _rule_output(self, data: DataProto) -> RewardOutput:
        lengths_B = response_lengths(data)
        samples = self._samples(data, lengths_B)
        scores = self._scores(samples, lengths_B, by_model=self._model_scores(data))
        self._log_examples(data, samples, scores=scores)
        log_failures(scores, samples=samples, indices=data.non_tensor_batch.get("index"))
        valid_B = torch.tensor([score.valid for score in scores], dtype=torch.bool)
        values_B = torch.tensor([score.value for score in scores], dtype=torch.float32)
        reward_tensor = at_last_token(values_B, reward_positions(data), width=data.batch["responses"].shape[1])
        metrics = failure_metrics([score.failure for score in scores])
        return RewardOutput(reward_tensor, valid_B, collect_extra(scores), metrics)

    def _model_scores(self, data: DataProto) -> dict[int, SampleScore]:
        """Return the reward model's score of every row that only the model can score.

        These are the rows of style "model", unless a custom function is set.
        """
        if not self._built_in or "rm_scores" not in data.batch:
            return {}
        results = [CallResult(value=score) for score in data.batch["rm_scores"].sum(-1).tolist()]
        styles = [model.get("style") for model in data.non_tensor_batch["reward_model"]]
        return {
            row: read_score(result)
            for row, (result, style) in enumerate(zip(results, styles, strict=True))
            if style == "model"
        }

    def _scores(
        self, samples: list[dict[str, Any]], lengths_B: torch.Tensor, *, by_model: Mapping[int, SampleScore]
    ) -> list[SampleScore]:
        """Return each row's score: the function's, unless the reward model has scored the row."""
        rows = [row for row in range(len(samples)) if row not in by_model]
        results = self.run_calls([samples[row] for row in rows]) if rows else []
        if self._built_in:
            results = self._blamed([samples[row] for row in rows], results)
        by_function = self.adjust([read_score(result) for result in results], lengths_B[rows])
        scores = {**by_model, **dict(zip(rows, by_function, strict=True))}
        return [scores[row] for row in range(len(samples))]

    def _blamed(self, samples: list[dict[str, Any]], results: list[CallResult]) -> list[CallResult]:
        """Return the results, with an empty response's for each one that makes a built-in function fail.

        Else a policy would learn to be left out, or to get 0 where a wrong answer has -1. To blame is a response with
        which the function fails twice, though it scores a harmless one. Programs have limits of their own:
        `reward_score.code` blames them.
        """
        named = enumerate(zip(samples, results, strict=True))
        failed = [row for row, (s, r) in named if r.failure and not reward_score.runs_programs(str(s["data_source"]))]
        if not failed:
            return results
        harmless = [{**samples[row], "solution_str": reward_score.HARMLESS_RESPONSE} for row in failed]
        again = self.run_calls([*(samples[row] for row in failed), *harmless])
        results = [*results]
        for row, second, other in zip(failed, again[: len(failed)], again[len(failed) :], strict=True):
            results[row] = second
            if second.failure and not other.failure:
                logger.warning("sample %d counts as empty, it makes the function fail: %s", row, second.reason)
                [results[row]] = self.run_calls([{**samples[row], "solution_str": ""}])
        return results

    def _samples(self, data: DataProto, lengths_B: torch.Tensor) -> list[dict[str, Any]]:
        """Return each row's arguments for the reward function."""
        columns, rows = data.non_tensor_batch, len(data)
        for name in (self.reward_fn_key, "reward_model"):
            if name not in columns:
                raise DataError(
                    f"the batch has no column {name!r}, needed for the reward; it has {', '.join(columns) or 'none'}"
                )
        texts = decode(self.tokenizer, data.batch["responses"], lengths_B)
        infos = list(columns["extra_info"]) if "extra_info" in columns else [{} for _ in range(rows)]
        if "rm_scores" in data.batch:
            model_scores = data.batch["rm_scores"].sum(-1).tolist()
            infos = [{**(info or {}), "rm_score": score} for info, score in zip(infos, model_scores, strict=True)]
        truths = [model.get("ground_truth") for model in columns["reward_model"]]
        parts = zip(columns[self.reward_fn_key], texts, truths, infos, strict=True)
        return [dict(zip(SAMPLE_ARGUMENTS, part, strict=True)) for part in parts]

    def _log_examples(self, data: DataProto, samples: list[dict[str, Any]], *, scores: list[SampleScore]) -> None:
        """Log the first `num_examine` samples of every data source."""
        for row, (sample, score) in enumerate(zip(samples, scores, strict=True)):
            source = str(sample["data_source"])
            if self._num_logged[source] < self.num_examine:
                self._num_logged[source] += 1
                logger.info(
                    "sample of %s: prompt %r, response %r, ground truth %r, score %s",
                    *(source, self._prompt(data, row), sample["solution_str"], sample["ground_truth"]),
                    score.value if score.valid else None,
                )

    def _prompt(self, data: DataProto, row: int) -> str | None:
        if "prompts" not in data.batch:
            return None
        ids = data.batch["prompts"][row]
        return self.tokenizer.decode(
            ids[data.batch["attention_mask"][row, : len(ids)].bool()].tolist(), skip_special_tokens=True
        )


def response_lengths(data: DataProto) -> torch.Tensor:
    """Return the number of valid response tokens per row, (B,) int64, from the last R columns of `attention_mask`."""
    width = data.batch["responses"].shape[1]
    mask_BL = data.batch["attention_mask"]
    return mask_BL[:, mask_BL.shape[1] - width :].sum(-1)


def decode(tokenizer: Any, responses_BR: torch.Tensor, lengths_B: torch.Tensor) -> list[str]:
    """Return the text of the first `lengths_B` tokens of each row, without special tokens."""
    rows = [ids[:length] for ids, length in zip(responses_BR.tolist(), lengths_B.tolist(), strict=True)]
    # transformers decodes [] to one empty text
    return tokenizer.batch_decode(rows, skip_special_tokens=True) if rows else []


def reward_positions(data: DataProto) -> torch.Tensor:
    """Return the position of each row's reward in the response, (B,) int64; -1 for a row without tokens.

    It is the last token on `response_mask`, which the policy sampled. Estimators read no reward elsewhere, and a
    response of an agent may end with the environment's tokens. A row without such a token, and a batch without the
    column, have it on the last valid token.
    """
    last_valid_B = response_lengths(data).cpu() - 1
    if "response_mask" not in data.batch:
        return last_valid_B
    sampled_BR = data.batch["response_mask"].cpu().bool()
    last_sampled_B = torch.where(sampled_BR, torch.arange(sampled_BR.shape[1]), -1).amax(-1)
    return torch.where(last_sampled_B < 0, last_valid_B, last_sampled_B)


def at_last_token(values_B: torch.Tensor, positions_B: torch.Tensor, *, width: int) -> torch.Tensor:
    """Return (B, width) float32 with each value at its row's position; a row with position -1 stays zero."""
    is_last_BR = torch.arange(width) == positions_B.unsqueeze(-1)
    return torch.where(is_last_BR, values_B.unsqueeze(-1), 0.0)


def model_output(rm_scores_BR: torch.Tensor) -> RewardOutput:
    """Return a reward model's scores unchanged; rows with a NaN or an infinity are invalid."""
    valid_B = rm_scores_BR.isfinite().all(-1)
    reward_tensor = torch.where(valid_B.unsqueeze(-1), rm_scores_BR, 0).float()
    failures = [None if valid else "error" for valid in valid_B.tolist()]
    return RewardOutput(reward_tensor, valid_B, {}, failure_metrics(failures))


def failure_metrics(failures: Sequence[str | None]) -> dict[str, float]:
    """Return how many samples have no score, and why; None: a sample has one."""
    kinds, num_rows = Counter(failures), max(len(failures), 1)
    return {
        "reward/timeout_ratio": kinds["timeout"] / num_rows,
        "reward/error_ratio": kinds["error"] / num_rows,
        "reward/num_failed": float(kinds["timeout"] + kinds["error"]),
    }


def collect_extra(scores: list[SampleScore]) -> dict[str, list]:
    """Return the extra values of all rows as columns, None where a row has none."""
    names = dict.fromkeys(name for score in scores for name in score.extra)
    return {name: [score.extra.get(name) for score in scores] for name in names}


def log_failures(
    scores: list[SampleScore], *, samples: list[dict[str, Any]], indices: Sequence | np.ndarray | None
) -> None:
    """Log failed samples, one line for each of the first few reasons."""
    indices = range(len(scores)) if indices is None else indices
    failed = [row for row, score in enumerate(scores) if not score.valid]
    first_of_reason = {scores[row].reason: row for row in reversed(failed)}
    for row in sorted(first_of_reason.values())[:MAX_NAMED]:
        source, reason = samples[row]["data_source"], scores[row].reason
        logger.warning("no reward for data_source=%s index=%s, the sample is masked: %s", source, indices[row], reason)
    if failed:
        logger.warning("no reward for %d of %d samples; they are left out of the loss", len(failed), len(scores))
