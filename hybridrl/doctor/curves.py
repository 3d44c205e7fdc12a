"""`Curves`: the metrics of a run, as rules ask for them."""

import math
import statistics
from collections.abc import Sequence

from hybridrl.view.readers.metrics import MetricHistory

SHARE = 0.2  # of the run: its beginning, and its end
MIN_STEPS = 10  # before which nothing is said about a curve


class Curves:
    """The metrics of a run; values of names that were not logged are nan."""

    def __init__(self, history: MetricHistory) -> None:
        self._history = history
        self.last_step = history.last_step or 0

    def values(self, name: str) -> Sequence[float]:
        """Return the finite values of a metric, by step."""
        return self._history.series(name)[1]

    def series(self, name: str) -> tuple[Sequence[int], Sequence[float]]:
        """Return steps and finite values of a metric."""
        return self._history.series(name)

    def names(self, prefix: str) -> list[str]:
        """Return the metrics whose names begin so."""
        return [entry["name"] for entry in self._history.names() if entry["name"].startswith(prefix)]

    def start(self, name: str) -> float:
        """Return the median of the first three values, before a policy can have changed much."""
        values = self.values(name)[:3]
        return statistics.median(values) if values else math.nan

    def begin(self, name: str) -> float:
        """Return the median of the first values."""
        values = self.values(name)
        return statistics.median(values[: _part(values)]) if values else math.nan

    def end(self, name: str) -> float:
        """Return the median of the last values."""
        values = self.values(name)
        return statistics.median(values[-_part(values) :]) if values else math.nan

    def mean_end(self, name: str) -> float:
        """Return the mean of the last values, where single steps count."""
        values = self.values(name)
        return statistics.fmean(values[-_part(values) :]) if values else math.nan

    def spread(self, name: str) -> float:
        """Return the difference of the largest and the smallest value."""
        values = self.values(name)
        return max(values) - min(values) if values else math.nan


def _part(values: Sequence[float]) -> int:
    return max(1, round(SHARE * len(values)))
