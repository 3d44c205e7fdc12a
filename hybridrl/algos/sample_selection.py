"""Selection of the scored samples that a step trains on.

These are k of the n samples of each prompt, or rows drawn again by reward.

Shape letters: G groups, N samples of each, k of them chosen, B rows. Scores of invalid samples are not read. An invalid
sample is chosen only if its group has fewer than k valid ones.
"""

from collections.abc import Callable

import numpy as np

from hybridrl.errors import DataError

EQUAL = 1e-12  # relative difference below which two variances are equal
MAX_WEIGHT, OTHER_WEIGHT = 0.4, 0.1  # of max_random: those of verl
MIN_WEIGHT = 1e-8  # every valid row can be drawn, also if all scores are 0


def max_variance(scores_GN: np.ndarray, valid_GN: np.ndarray, *, k: int, seed: int = 0) -> np.ndarray:
    """Choose the k samples of each group whose scores have the largest variance: PODS, arXiv:2504.13818.

        S = argmax over |S| = k of Var(R_i, i in S)

    S consists of the i highest and the k - i lowest scores for some i (theorem 1 of the paper), so k + 1 sets are
    compared. Of equal variances the one with more high scores wins, and of equal scores the earlier sample.

    Returns:
        Positions in the group, ascending, (G, k) int64.
    """
    return _each_group(scores_GN, valid_GN, k, lambda scores_M: _max_variance(scores_M, k))


def max_reward(scores_GN: np.ndarray, valid_GN: np.ndarray, *, k: int, seed: int = 0) -> np.ndarray:
    """Choose the k samples of each group with the highest scores: best of n, arXiv:2112.09332.

    Of equal scores the earlier sample wins. Returns positions as `max_variance`.
    """
    return _each_group(scores_GN, valid_GN, k, lambda scores_M: np.argsort(-scores_M, kind="stable")[:k])


def at_random(scores_GN: np.ndarray, valid_GN: np.ndarray, *, k: int, seed: int = 0) -> np.ndarray:
    """Choose k samples of each group with equal probability, the baseline of arXiv:2504.13818.

    Returns positions as `max_variance`.
    """
    generator = np.random.default_rng(seed)
    return _each_group(scores_GN, valid_GN, k, lambda scores_M: generator.permutation(len(scores_M))[:k])


SELECTIONS: dict[str, Callable[..., np.ndarray]] = {
    "max_variance": max_variance,
    "max_reward": max_reward,
    "random": at_random,
}


def _max_variance(scores_M: np.ndarray, k: int) -> np.ndarray:
    ascending_M, descending_M = np.argsort(scores_M, kind="stable"), np.argsort(-scores_M, kind="stable")
    best, chosen = -1.0, descending_M[:k]
    for num_high in range(k, -1, -1):
        high = descending_M[:num_high]
        low = ascending_M[~np.isin(ascending_M, high)][: k - num_high]
        candidate = np.concatenate([high, low])
        variance = float(np.var(scores_M[candidate]))
        if variance > best * (1 + EQUAL):
            best, chosen = variance, candidate
    return chosen


def _each_group(
    scores_GN: np.ndarray, valid_GN: np.ndarray, k: int, choose: Callable[[np.ndarray], np.ndarray]
) -> np.ndarray:
    """Return `choose` of the valid scores of each group, filled up with invalid samples."""
    chosen_Gk = np.empty((len(scores_GN), k), dtype=np.int64)
    for group, (scores_N, valid_N) in enumerate(zip(scores_GN.astype(np.float64), valid_GN.astype(bool), strict=True)):
        places, rest = np.flatnonzero(valid_N), np.flatnonzero(~valid_N)
        if len(places) > k:
            places = places[choose(scores_N[places])]
        chosen_Gk[group] = np.sort(np.concatenate([places, rest])[:k])
    return chosen_Gk


def pf_ppo_weights(scores_B: np.ndarray, *, method: str, weight_pow: float = 2.0) -> np.ndarray:
    """Return the unnormalised probability (B,) float64 with which PF-PPO draws each row, arXiv:2409.06957.

        pow         abs(R_i) ^ weight_pow
        max_min     1 for the highest and the lowest score of the batch, else 0
        max_random  0.4 for the highest score, else 0.1

    and 1e-8 more. These are the methods of verl. A reward model is most reliable for its highest and lowest scores; the
    paper ranks the samples of each prompt, verl and this function those of the batch.

    Args:
        scores_B: Scores of valid rows.
        method: `pow`, `max_min` or `max_random`.
        weight_pow: Exponent of `pow`.

    Raises:
        DataError: A power exceeds float64.
    """
    scores_B = scores_B.astype(np.float64)
    is_max_B = scores_B == scores_B.max(initial=-np.inf)
    if method == "pow":
        with np.errstate(over="ignore"):
            weights_B = np.abs(scores_B) ** weight_pow
        if not np.isfinite(weights_B.sum()):
            raise DataError(
                f"algorithm.pf_ppo.weight_pow={weight_pow:g}: scores up to {np.abs(scores_B).max():g} to this power "
                "exceed float64; choose a smaller power or scale the scores"
            )
    elif method == "max_min":
        weights_B = (is_max_B | (scores_B == scores_B.min(initial=np.inf))).astype(np.float64)
    else:
        weights_B = np.where(is_max_B, MAX_WEIGHT, OTHER_WEIGHT)
    return weights_B + MIN_WEIGHT


def draw_rows(weights_B: np.ndarray, *, seed: int) -> np.ndarray:
    """Return B rows drawn with replacement, (B,) int64.

    The probability of a row is its share of the weights.
    """
    if not len(weights_B):
        return np.zeros(0, dtype=np.int64)
    return np.random.default_rng(seed).choice(len(weights_B), size=len(weights_B), p=weights_B / weights_B.sum())
