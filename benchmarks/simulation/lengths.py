"""Lengths of simulated responses: log-normal; the samples of a prompt share a part of the variance.

A length depends on the seed of its prompt and the number of the sample alone, as a real response does. So it is the
same in every schedule and on every number of devices.
"""

import math
from dataclasses import dataclass

import torch

from hybridrl.workers.rollout.sampling.sampler import sequence_keys, uniforms


@dataclass(frozen=True)
class Lengths:
    """Distribution of response lengths in tokens.

    The defaults have a 75th percentile of 900 tokens; the longest of 8192 responses is 28 times the median.

    Attributes:
        median: Median.
        sigma: Standard deviation of the logarithm.
        cap: Longest response; longer ones are cut, as `data.max_response_length` does.
        shared: Share of the logarithm's variance that is the prompt's, 0 to 1.
    """

    median: float = 490.0
    sigma: float = 0.9
    cap: int = 16_384
    shared: float = 0.5

    def draw(self, seeds: torch.Tensor, n: int) -> torch.Tensor:
        """Return the lengths (B * n,) int64, at least 1, of n adjacent responses to each prompt.

        Args:
            seeds: Of the prompts, (B,) int64.
            n: Responses per prompt.
        """
        of_prompt = _normal(uniforms(sequence_keys(seeds, 1), 1)).repeat_interleave(n)
        own = _normal(uniforms(sequence_keys(seeds, n), 2))
        score = math.sqrt(self.shared) * of_prompt + math.sqrt(1 - self.shared) * own
        return (self.median * (self.sigma * score).exp()).round().clamp(1, self.cap).long()

    def statistics(self, num: int = 8192, *, seed: int = 0) -> dict[str, float]:
        """Return mean, median, 75th percentile and maximum of `num` independent responses."""
        seeds = torch.arange(num) + seed * num
        drawn = self.draw(seeds, 1).double()
        quantiles = drawn.quantile(torch.tensor([0.5, 0.75], dtype=torch.float64))
        return {
            "mean": float(drawn.mean()),
            "median": float(quantiles[0]),
            "p75": float(quantiles[1]),
            "max": float(drawn.max()),
        }


def _normal(uniform: torch.Tensor) -> torch.Tensor:
    """Return standard normal numbers (S,) float64 for uniform ones in [0, 1)."""
    return math.sqrt(2) * torch.erfinv((2 * uniform - 1).clamp(-1 + 2**-52, 1 - 2**-52))
