"""From a batch of responses to a reward tensor: decode, call the reward function in killable processes, put scores on
last tokens.

A sample whose score could not be had is data, not a crash and not a 0: it is marked invalid, counted, and named in the
log. Kinds of manager stand in `REWARD_MANAGERS`. Not here: how calls are limited in time (`processes`), and the reward
model (`workers.reward_model`). Where the batch has its `rm_scores`, a function of the user's gets them and decides;
without one they are the reward, except in validation, where a row is scored by rule unless its own `reward_model.style`
is "model". Shapes: B rows, R response tokens.
"""

import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from hybridrl.config.schema.workers import OverlongBufferConfig
from hybridrl.data_plane.batch import DataProto
from hybridrl.errors import ConfigError, DataError
from hybridrl.rewards.function_address import BATCH_ARGUMENTS, SAMPLE_ARGUMENTS, ScoreFunction
from hybridrl.rewards.process import CallResult
from hybridrl.rewards.process_pool import ScoreProcesses
from hybridrl.rewards.sample_score import SampleScore, read_score

logger = logging.getLogger(__name__)

DEFAULT_FUNCTION = ("reward_score", "default_compute_score")
MAX_NAMED = 3  # reasons named in the log per batch, with a sample each; the metrics count them all


@dataclass(frozen=True)
class RewardOutput:
    """Rewards of a batch.

    reward_tensor: (B, R) float32, the score on the last valid response token, zero elsewhere and in rows that are not
    valid. valid: (B,) bool, False where there is no score; those rows must be masked out of the loss. extra: one entry
    per row of whatever else the reward function returned; None where a row has no such key.
    """

    reward_tensor: torch.Tensor
    valid: torch.Tensor
    extra: dict[str, list]
    metrics: dict[str, float]


class RewardManager:
    """Scores each sample with one call `compute_score(data_source=, solution_str=, ground_truth=, extra_info=,
    **kwargs)`.

    compute_score: a function (sync or async), a `ScoreFunction`, or None for `reward_score.default_compute_score`; it
    returns a number, or a dict with a number under "score". num_examine: samples of each data source to write to the
    log, once. reward_fn_key: column that names the data source. num_processes, timeout_s: see `ScoreProcesses`.
    max_response_length, overlong_buffer: used by `dapo`. validate: this manager scores validation. With a reward model,
    `extra_info["rm_score"]` is its score of the row.
    """

    arguments = SAMPLE_ARGUMENTS

    def __init__(
        self,
        tokenizer: Any,
        num_examine: int = 0,
        compute_score: Callable | ScoreFunction | None = None,
        reward_fn_key: str = "data_source",
        *,
        kwargs: Mapping[str, Any] | None = None,
        num_processes: int = 1,
        timeout_s: float = 10.0,
        max_response_length: int | None = None,
        overlong_buffer: OverlongBufferConfig | None = None,
        validate: bool = False,
    ):
        self.tokenizer, self.num_examine, self.reward_fn_key = tokenizer, num_examine, reward_fn_key
        self.max_response_length, self.overlong_buffer = max_response_length, overlong_buffer
        self._examined: Counter[str] = Counter()
        function = self._address(compute_score, kwargs=kwargs)
        self._built_in, self._validate = (function.path, function.name) == DEFAULT_FUNCTION, validate
        self.processes = ScoreProcesses(function, num_processes=num_processes, timeout_s=timeout_s)

    def __call__(self, data: DataProto, return_dict: bool = False) -> RewardOutput | dict[str, Any]:
        """Return the rewards of a batch with `responses` and `attention_mask`; with `return_dict` under verl's names.

        A batch may have `rm_scores` (B, R), see the module's own words. Raises DataError if a column is missing.
        """
        start = time.monotonic()
        decided = self._built_in and not self._validate and "rm_scores" in data.batch
        output = model_output(data.batch["rm_scores"]) if decided else self._rule_output(data)
        output.metrics["reward/time_s"] = time.monotonic() - start
        if return_dict:
            return {
                "reward_tensor": output.reward_tensor,
                "reward_valid": output.valid,
                "reward_extra_info": output.extra,
            }
        return output

    def close(self) -> None:
        """End the score processes; the next call starts new ones."""
        self.processes.close()

    def run_calls(self, samples: list[dict[str, Any]]) -> list[CallResult]:
        """Return what the function returned for each sample.

        A kind of manager that calls differently overrides this.
        """
        return self.processes.map(samples)

    def adjust(self, scores: list[SampleScore], lengths_B: torch.Tensor) -> list[SampleScore]:
        """Return the scores after what depends on more than one text.

        Nothing here; `lengths_B` are response lengths in tokens.
        """
        return scores

    def _address(
        self, compute_score: Callable | ScoreFunction | None, *, kwargs: Mapping[str, Any] | None
    ) -> ScoreFunction:
        if isinstance(compute_score, ScoreFunction):
            return (
                compute_score if kwargs is None else replace(compute_score, kwargs={**compute_score.kwargs, **kwargs})
            )
        if compute_score is not None:
            return ScoreFunction.of(compute_score, kwargs=kwargs, arguments=self.arguments)
        if self.arguments != SAMPLE_ARGUMENTS:
            wanted = f"compute_score({', '.join(self.arguments)})"
            raise ConfigError(
                f"compute_score=None: {type(self).__name__} needs a {wanted}; the built-in one takes one sample"
            )
        path, name = DEFAULT_FUNCTION
        return ScoreFunction(path, name, kwargs=dict(kwargs or {}))

    def _rule_output(self, data: DataProto) -> RewardOutput:
        lengths_B = response_lengths(data)
        samples = self._samples(data, lengths_B)
        scores = self._scores(samples, lengths_B, by_model=self._model_scores(data))
        self._examine(data, samples, scores=scores)
        log_failures(scores, samples=samples, indices=data.non_tensor_batch.get("index"))
        valid_B = torch.tensor([score.valid for score in scores], dtype=torch.bool)
        values_B = torch.tensor([score.value for score in scores], dtype=torch.float32)
        reward_tensor = at_last_token(values_B, lengths_B, width=data.batch["responses"].shape[1])
        return RewardOutput(reward_tensor, valid_B, gather_extra(scores), failure_metrics(scores))

    def _model_scores(self, data: DataProto) -> dict[int, SampleScore]:
        """Return the reward model's score of every row that it alone can judge: no function of the
        user's, and no rule.
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
        """Return each row's score: the function's, unless the reward model has judged the row."""
        rows = [row for row in range(len(samples)) if row not in by_model]
        results = self.run_calls([samples[row] for row in rows]) if rows else []
        by_function = self.adjust([read_score(result) for result in results], lengths_B[rows])
        scores = {**by_model, **dict(zip(rows, by_function, strict=True))}
        return [scores[row] for row in range(len(samples))]

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
            judged = data.batch["rm_scores"].sum(-1).tolist()
            infos = [{**(info or {}), "rm_score": score} for info, score in zip(infos, judged, strict=True)]
        truths = [model.get("ground_truth") for model in columns["reward_model"]]
        parts = zip(columns[self.reward_fn_key], texts, truths, infos, strict=True)
        return [dict(zip(SAMPLE_ARGUMENTS, part, strict=True)) for part in parts]

    def _examine(self, data: DataProto, samples: list[dict[str, Any]], *, scores: list[SampleScore]) -> None:
        """Write the first samples of every data source to the log."""
        for row, (sample, score) in enumerate(zip(samples, scores, strict=True)):
            source = str(sample["data_source"])
            if self._examined[source] < self.num_examine:
                self._examined[source] += 1
                text, truth, value = (
                    sample["solution_str"],
                    sample["ground_truth"],
                    score.value if score.valid else None,
                )
                prompt = self._prompt(data, row)
                logger.info(
                    "sample of %s: prompt %r, response %r, ground truth %r, score %s",
                    source,
                    prompt,
                    text,
                    truth,
                    value,
                )

    def _prompt(self, data: DataProto, row: int) -> str | None:
        if "prompts" not in data.batch:
            return None
        ids = data.batch["prompts"][row]
        return self.tokenizer.decode(
            ids[data.batch["attention_mask"][row, : len(ids)].bool()].tolist(), skip_special_tokens=True
        )


class BatchRewardManager(RewardManager):
    """Scores a whole batch with one call `compute_score(data_sources=, solution_strs=, ground_truths=, extra_infos=,
    **kwargs)`.

    The function returns one number or dict per sample. The time limit is that of the one call; if it fails, every
    sample of the batch has.
    """

    arguments = BATCH_ARGUMENTS

    def run_calls(self, samples: list[dict[str, Any]]) -> list[CallResult]:
        columns = {
            plural: [sample[single] for sample in samples]
            for plural, single in zip(BATCH_ARGUMENTS, SAMPLE_ARGUMENTS, strict=True)
        }
        (result,) = self.processes.map([columns])
        if result.failure is not None:
            return [result] * len(samples)
        try:
            values = list(result.value)
        except TypeError:
            values = []
        if len(values) != len(samples):
            reason = (
                f"a batch function must return {len(samples)} scores, one per sample; it returned {short(result.value)}"
            )
            return [CallResult(failure="error", reason=reason)] * len(samples)
        return [CallResult(value=value) for value in values]


class DAPORewardManager(RewardManager):
    """The naive manager, and a penalty for responses that come near the length limit (arXiv 2503.14476, "soft overlong
    punishment").

    With l = overlong_buffer.len: score + min(-(length - (max_response_length - l)) / l * penalty_factor, 0). Adds
    `overlong_reward` (the penalty) and `overlong` (whether there was one) to extra. Not applied unless
    overlong_buffer.enable.
    """

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        buffer, limit = self.overlong_buffer, self.max_response_length
        if buffer is not None and buffer.enable and not (limit is not None and 0 < buffer.len <= limit):
            raise ConfigError(f"overlong_buffer.len={buffer.len}: must be between 1 and max_response_length={limit}")

    def adjust(self, scores: list[SampleScore], lengths_B: torch.Tensor) -> list[SampleScore]:
        buffer = self.overlong_buffer
        if buffer is None or not buffer.enable:
            return scores
        excess_B = (lengths_B - (self.max_response_length - buffer.len)).double()
        penalties_B = (-excess_B / buffer.len * buffer.penalty_factor).clamp(max=0)
        return [score.plus(penalty) for score, penalty in zip(scores, penalties_B.tolist(), strict=True)]


REWARD_MANAGERS: dict[str, type[RewardManager]] = {
    "naive": RewardManager,
    "batch": BatchRewardManager,
    "dapo": DAPORewardManager,
}
"""Kinds of manager by their name in `reward_model.reward_manager`."""


def response_lengths(data: DataProto) -> torch.Tensor:
    """Return the number of valid response tokens of each row, (B,) int64, from the response's columns of
    `attention_mask`.
    """
    width = data.batch["responses"].shape[1]
    mask_BL = data.batch["attention_mask"]
    return mask_BL[:, mask_BL.shape[1] - width :].sum(-1)


def decode(tokenizer: Any, responses_BR: torch.Tensor, lengths_B: torch.Tensor) -> list[str]:
    """Return the texts of the first `lengths_B` tokens of each row, without special tokens."""
    rows = [ids[:length] for ids, length in zip(responses_BR.tolist(), lengths_B.tolist(), strict=True)]
    return (
        tokenizer.batch_decode(rows, skip_special_tokens=True) if rows else []
    )  # transformers reads [] as one empty text


def at_last_token(values_B: torch.Tensor, lengths_B: torch.Tensor, *, width: int) -> torch.Tensor:
    """Return (B, width) float32 with each value at its row's last valid position; a row of length 0 has no place for
    it.
    """
    is_last_BR = torch.arange(width) == lengths_B.cpu().unsqueeze(-1) - 1
    return torch.where(is_last_BR, values_B.unsqueeze(-1), 0.0)


def model_output(rm_scores_BR: torch.Tensor) -> RewardOutput:
    """Return a reward model's scores as they are; rows with a NaN or an infinity are not valid."""
    valid_B = rm_scores_BR.isfinite().all(-1)
    reward_tensor = torch.where(valid_B.unsqueeze(-1), rm_scores_BR, 0).float()
    failed = int((~valid_B).sum())
    return RewardOutput(reward_tensor, valid_B, {}, ratios(timeouts=0, errors=failed, rows=len(valid_B)))


def failure_metrics(scores: list[SampleScore]) -> dict[str, float]:
    """Return how many samples have no score, and why."""
    kinds = Counter(score.failure for score in scores)
    return ratios(timeouts=kinds["timeout"], errors=kinds["error"], rows=len(scores))


def ratios(*, timeouts: int, errors: int, rows: int) -> dict[str, float]:
    """Return the failure metrics from counts."""
    return {
        "reward/timeout_ratio": timeouts / max(rows, 1),
        "reward/error_ratio": errors / max(rows, 1),
        "reward/num_failed": float(timeouts + errors),
    }


def gather_extra(scores: list[SampleScore]) -> dict[str, list]:
    """Return the extra values of all rows as columns, None where a row has none."""
    names = dict.fromkeys(name for score in scores for name in score.extra)
    return {name: [score.extra.get(name) for score in scores] for name in names}


def log_failures(scores: list[SampleScore], *, samples: list[dict[str, Any]], indices: Sequence | None) -> None:
    """Name failed samples in the log, one line for each of the first few reasons."""
    indices = range(len(scores)) if indices is None else indices
    failed = [row for row, score in enumerate(scores) if not score.valid]
    first_of_reason = {scores[row].reason: row for row in reversed(failed)}
    for row in sorted(first_of_reason.values())[:MAX_NAMED]:
        source, reason = samples[row]["data_source"], scores[row].reason
        logger.warning("no reward for data_source=%s index=%s, the sample is masked: %s", source, indices[row], reason)
    if failed:
        logger.warning("no reward for %d of %d samples", len(failed), len(scores))


def short(value: Any, limit: int = 80) -> str:
    """Return a value as text of bounded length."""
    text = repr(value)
    return text if len(text) <= limit else f"{text[:limit]}..."
