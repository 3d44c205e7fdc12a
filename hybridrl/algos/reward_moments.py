"""Running mean and standard deviation of scores, to normalise rewards.

Shape letters: B rows, T response tokens.
"""

from collections.abc import Mapping

import torch

from hybridrl.algos.shapes import check_same_shape

STD_EPS = 1e-8
"""A smaller standard deviation counts as 1: the scores so far are all equal."""


class RewardMoments:
    """Mean and variance of all scores so far, in float64.

    They are updated by whole batches (Chan et al. 1979, Stanford STAN-CS-79-773), so the order of rows changes nothing.
    The driver keeps one per run. Its state belongs to snapshots and checkpoints.
    """

    def __init__(self) -> None:
        self.count, self.mean, self.sum_of_squares = 0, 0.0, 0.0  # squares of distances to the mean

    @property
    def std(self) -> float:
        """The unbiased standard deviation; 1 for fewer than two scores, and if all are equal."""
        std = (self.sum_of_squares / max(1, self.count - 1)) ** 0.5
        return float(std) if std > STD_EPS else 1.0

    def update(self, scores_N: torch.Tensor) -> None:
        """Add scores (N,)."""
        if not len(scores_N):
            return
        scores_N = scores_N.double()
        mean = float(scores_N.mean())
        shift, total = mean - self.mean, self.count + len(scores_N)
        self.sum_of_squares += float(((scores_N - mean) ** 2).sum()) + shift**2 * self.count * len(scores_N) / total
        self.mean += shift * len(scores_N) / total
        self.count = total

    def normalise(self, scores_BT: torch.Tensor, mask_BT: torch.Tensor) -> torch.Tensor:
        """Return token rewards (B, T) that sum to (R - mean) / std in each row.

        A row without a token gets 0.

        r_t = score_t / std - 1[t is the last token on the mask] mean / std
        """
        check_same_shape(token_level_scores=scores_BT, response_mask=mask_BT)
        mask_BT = mask_BT.bool()
        places_T = torch.arange(mask_BT.shape[1], device=mask_BT.device)
        last_B1 = torch.where(mask_BT, places_T, -1).amax(1, keepdim=True)
        is_last_BT = mask_BT & (places_T == last_B1)
        return torch.where(mask_BT, scores_BT / self.std, 0) - is_last_BT.to(scores_BT.dtype) * (self.mean / self.std)

    def state_dict(self) -> dict[str, float]:
        """Return the moments."""
        return {"count": self.count, "mean": self.mean, "sum_of_squares": self.sum_of_squares}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Set the moments to those of a `state_dict`."""
        self.count = int(state["count"])
        self.mean, self.sum_of_squares = state["mean"], state["sum_of_squares"]

    def save(self, directory: str) -> dict[str, float]:
        """Return the moments, for a checkpoint; writes no file."""
        return self.state_dict()

    def load(self, directory: str, state: Mapping[str, float] | None) -> None:
        """Set the moments to those of a checkpoint; a checkpoint without any starts anew."""
        self.load_state_dict(state or RewardMoments().state_dict())
