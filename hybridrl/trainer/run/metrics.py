"""Metrics of every trainer: means over an update or over batches, and names of utilization metrics."""

from collections.abc import Mapping, Sequence

import numpy as np

MFU_NAMES = {
    "gen": "rollout",
    "old_log_prob": "actor_infer",
    "ref": "ref",
    "values": "critic_infer",
    "update_critic": "critic",
    "update_actor": "actor",
    "reference": "ref",
    "update": "update",
}
"""Stage -> last part of its metric `perf/mfu/*`. Those that verl has are named as there."""

COUNTS = ("/num_failed", "/samples_left_out")  # ends of names of metrics that count samples


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
    """Return the mean of each metric over the batches that have it; of numbers of samples the sum."""
    names = dict.fromkeys(name for metrics in batches for name in metrics)
    values = {name: [metrics[name] for metrics in batches if name in metrics] for name in names}
    return {name: float((np.sum if name.endswith(COUNTS) else np.mean)(found)) for name, found in values.items()}
