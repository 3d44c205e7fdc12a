"""Reward managers other than the default one: `batch` and `dapo`.

Shapes: B rows.
"""

from typing import Any

import torch

from hybridrl.errors import ConfigError
from hybridrl.rewards.function_address import BATCH_ARGUMENTS, SAMPLE_ARGUMENTS
from hybridrl.rewards.manager import RewardManager
from hybridrl.rewards.process import CallResult
from hybridrl.rewards.sample_score import SampleScore


class BatchRewardManager(RewardManager):
    """Scores a batch with one call of the reward function.

    The call is `compute_score(data_sources=, solution_strs=, ground_truths=, extra_infos=, **kwargs)`. It returns one
    number or dict per sample. The time limit applies to the one call. If it fails, every sample of the batch fails.
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
        values = result.value if isinstance(result.value, list) else [result.value]  # an array of one is a number
        if len(values) != len(samples):
            wanted = f"a batch function must return {len(samples)} scores, one per sample"
            reason = f"{wanted}; it returned {result.value!r:.80}"
            return [CallResult(failure="error", reason=reason)] * len(samples)
        return [CallResult(value=value) for value in values]


class DAPORewardManager(RewardManager):
    """The naive manager with a penalty near the length limit (arXiv 2503.14476, "soft overlong punishment").

    With l = overlong_buffer.len: score + min(-(length - (max_response_length - l)) / l * penalty_factor, 0). Adds
    `overlong_reward` (the penalty) and `overlong` (whether there was one) to extra. Applied only if
    overlong_buffer.enable. As in verl, the score without the penalty becomes `acc` if the function returns no more.
    """

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        buffer, limit = self.overlong_buffer, self.max_response_length
        if buffer is not None and buffer.enable and not (limit is not None and 0 < buffer.len <= limit):
            raise ConfigError(f"overlong_buffer.len={buffer.len}: must be between 1 and max_response_length={limit}")

    def adjust(self, scores: list[SampleScore], lengths_B: torch.Tensor) -> list[SampleScore]:
        buffer, limit = self.overlong_buffer, self.max_response_length
        scored = [score.with_accuracy() for score in scores]
        if buffer is None or not buffer.enable or limit is None:
            return scored
        excess_B = (lengths_B - (limit - buffer.len)).double()
        penalties_B = (-excess_B / buffer.len * buffer.penalty_factor).clamp(max=0)
        return [score.with_penalty(penalty) for score, penalty in zip(scored, penalties_B.tolist(), strict=True)]
