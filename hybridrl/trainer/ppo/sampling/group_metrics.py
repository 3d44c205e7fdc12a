"""Metrics of the groups that a training step generates, under the names of the validation's.

Computed from all generated samples, before groups are filtered: they show progress that `critic/score/mean` hides then.
The n samples of a group are all there is, so nothing is resampled: best@n and maj@n are those of the group itself.
Shapes: S rows, n adjacent ones per group, G groups.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from hybridrl.protocol import DataProto
from hybridrl.trainer.ppo.metrics import pass_at_k, sample_sizes

NUMBERS = (int, float, np.number, np.bool_)


def group_metrics(batch: DataProto, extra: Mapping[str, Sequence[Any]], *, n: int) -> dict[str, float]:
    """Return `train-core/{data_source}/{acc or reward}/...` and `train-aux/...`; empty for groups of one.

    `mean@n`, `best@n/mean`, `worst@n/mean`, with the column `pred` also `maj@n/mean`, and for 0/1 values the unbiased
    `pass@k` for k = 2, 4, ... and n. Only groups whose samples all have a valid reward count.

    Args:
        batch: Scored samples.
        extra: The reward function's other columns; `acc` replaces the reward, `pred` has the answers of the vote.
        n: Samples per group.
    """
    if n == 1 or "data_source" not in batch.non_tensor_batch:
        return {}
    valid_S, accuracies = batch.batch["reward_valid"].bool().numpy(), extra.get("acc", ())
    known = [value for value, is_valid in zip(accuracies, valid_S, strict=False) if is_valid]
    name = "acc" if known and all(isinstance(value, NUMBERS) for value in known) else "reward"
    scores = accuracies if name == "acc" else batch.batch["token_level_scores"].sum(-1).tolist()
    values_S = np.array([score if is_valid else np.nan for score, is_valid in zip(scores, valid_S, strict=True)], float)
    values, votes = values_S.reshape(-1, n), np.asarray(extra.get("pred", [None] * len(batch)), dtype=object)
    complete = np.isfinite(values).all(1)
    sources = batch.non_tensor_batch["data_source"][::n].astype(str)
    metrics: dict[str, float] = {}
    for source in dict.fromkeys(sources[complete].tolist()):
        chosen = np.flatnonzero(complete & (sources == source))
        answers = votes.reshape(-1, n)[chosen] if "pred" in extra else None
        for metric, value in _of_source(values[chosen], answers).items():
            is_core = metric in (f"mean@{n}", f"best@{n}/mean", f"maj@{n}/mean")
            metrics[f"{'train-core' if is_core else 'train-aux'}/{source}/{name}/{metric}"] = value
    return metrics


def _of_source(values: np.ndarray, answers: np.ndarray | None) -> dict[str, float]:
    """Return the metrics of groups with these values and answers, both (G, n)."""
    n = values.shape[1]
    metrics = {
        f"mean@{n}": values.mean(),
        f"best@{n}/mean": values.max(1).mean(),
        f"worst@{n}/mean": values.min(1).mean(),
    }
    if answers is not None:
        metrics[f"maj@{n}/mean"] = np.mean([_majority(*group) for group in zip(values, answers, strict=True)])
    if np.isin(values, (0.0, 1.0)).all():
        num_correct = values.sum(1).astype(int)
        for k in sample_sizes(n):
            metrics[f"pass@{k}"] = np.mean([pass_at_k(n, int(correct), k) for correct in num_correct])
    return {name: float(value) for name, value in metrics.items()}


def _majority(values: np.ndarray, answers: np.ndarray) -> float:
    """Return the value of the most frequent answer; of equally frequent ones the first, as in the validation."""
    texts = [str(answer) for answer in answers]
    return float(values[texts.index(Counter(texts).most_common(1)[0][0])])
