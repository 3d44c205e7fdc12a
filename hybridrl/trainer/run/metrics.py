"""Reduce the metrics of an update, or of several batches, to one value each, for every trainer."""

from collections.abc import Mapping, Sequence

import numpy as np


def mean_metrics(updates: Mapping[str, Sequence]) -> dict[str, float]:
    """Return the mean over an update's optimizer steps; the last value for learning rate and counts.

    Args:
        updates: Metric name -> values, possibly nested by rank, as worker groups collect them.
    """
    columns = {name: np.asarray(values, dtype=np.float64).ravel() for name, values in updates.items()}
    return {
        name: float(values[-1] if name.endswith(("/lr", "/num_updates")) else values.mean())
        for name, values in columns.items()
    }


def mean_over_batches(batches: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the mean of each metric over the batches that have it."""
    names = dict.fromkeys(name for metrics in batches for name in metrics)
    return {name: float(np.mean([metrics[name] for metrics in batches if name in metrics])) for name in names}
