"""Growth per hour of what is measured of processes that are replaced now and then.

A process that is restarted begins anew, so its values may jump. The fit therefore has one slope for all incarnations
and one intercept for each of them. Pure functions.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

SECONDS_PER_HOUR = 3600.0
NUM_ERRORS = 2.0  # a slope within so many standard errors of 0 is none
MAX_CORRELATION = 0.98  # of neighbouring residuals: beyond, the error of the slope has no meaning


@dataclass(frozen=True)
class Slope:
    """A common slope of several series.

    Attributes:
        per_hour: Change of the quantity in an hour.
        error: Standard error of `per_hour`.
        mean: Of all values.
        num_incarnations: Number of series.
        seconds: Their durations together.
    """

    per_hour: float
    error: float
    mean: float
    num_incarnations: int
    seconds: float

    def verdict(self, bound: float) -> str:
        """Return "flat", "falls" or "GROWS".

        Args:
            bound: Change per hour that does not count, whatever its error is.
        """
        if abs(self.per_hour) <= max(bound, NUM_ERRORS * self.error):
            return "flat"
        return "GROWS" if self.per_hour > 0 else "falls"


def fit_slope(series: Sequence[tuple[Sequence[float], Sequence[float]]]) -> Slope | None:
    """Return the least-squares slope with one intercept per series; None if there are too few values.

    With deviations from the means of each series, b = sum(dt dy) / sum(dt^2) and
    error^2 = sum(r^2) / (n - k - 1) / sum(dt^2) for n values in k series. Neighbouring residuals r are correlated, so
    the error is multiplied by sqrt((1 + c) / (1 - c)) with their correlation c at lag one, if it is positive
    (effective sample size of an autoregressive process of order one, as in Santer et al. 2000,
    doi:10.1029/1999JD901105).

    Args:
        series: Times in seconds and values, of one incarnation each. Those of fewer than three values are left out.
    """
    used = [(np.asarray(times, float), np.asarray(values, float)) for times, values in series if len(times) > 2]
    num_values = sum(len(times) for times, _ in used)
    deviations = [times - times.mean() for times, _ in used]
    spread = sum(float(dt @ dt) for dt in deviations)
    freedom = num_values - len(used) - 1
    if freedom < 1 or spread == 0.0:
        return None
    changes = [values - values.mean() for _, values in used]
    slope = sum(float(dt @ dy) for dt, dy in zip(deviations, changes, strict=True)) / spread
    residuals = [dy - slope * dt for dt, dy in zip(deviations, changes, strict=True)]
    squares = sum(float(r @ r) for r in residuals)
    error = (squares / freedom / spread) ** 0.5
    neighbours = sum(float(r[1:] @ r[:-1]) for r in residuals)
    correlation = min(max(neighbours / squares, 0.0), MAX_CORRELATION) if squares > 0 else 0.0
    return Slope(
        per_hour=slope * SECONDS_PER_HOUR,
        error=error * ((1 + correlation) / (1 - correlation)) ** 0.5 * SECONDS_PER_HOUR,
        mean=sum(float(values.sum()) for _, values in used) / num_values,
        num_incarnations=len(used),
        seconds=sum(float(times[-1] - times[0]) for times, _ in used),
    )


def steps_per_second(reached: Sequence[float], *, start: float, end: float) -> float:
    """Return how many steps were completed for the first time in an interval, per second.

    Args:
        reached: Seconds at which steps 1, 2, ... were complete for the first time.
        start, end: The interval, in seconds.
    """
    return sum(start < at <= end for at in reached) / (end - start)


def median_step_s(reached: Sequence[float], *, start: float, end: float) -> float:
    """Return the median time between two completed steps in an interval: a fault hardly changes it. Units: seconds."""
    gaps = [later - earlier for earlier, later in pairwise(reached) if start <= earlier and later <= end]
    return float(np.median(gaps)) if gaps else float("nan")
