"""The metrics of a run, read from `metrics.jsonl` as it grows.

One column of doubles per metric: 10,000 steps of 100 metrics take 8 MB. A step that was logged twice, because the run
was resumed, counts once, with its later values.
"""

import math
from array import array
from collections.abc import Iterator
from typing import Any

from hybridrl.trainer.run.tracking import EVALUATED, METRICS_FILE, whole_entry
from hybridrl.view.readers.storage import Folder, LineTail, parsed

MAX_POINTS = 4000  # of one curve in an answer; of more, the extremes of each interval are sent
MAX_VALUES = 64_000_000  # of all metrics: 512 MB; later steps and metrics are left out


class MetricHistory:
    """The metrics of one run.

    Attributes:
        revision: Changes when earlier values have changed, so that clients must read them again.
    """

    def __init__(self, folder: Folder) -> None:
        self._tail = LineTail(folder, METRICS_FILE)
        self.revision = 0
        self._reset()

    def _reset(self) -> None:
        self.revision += 1
        self._steps = array("q")
        self._rows: dict[int, int] = {}  # step -> row
        self._columns: dict[str, array[float]] = {}  # nan: no finite value in that row
        self._num_not_finite: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._steps)

    @property
    def last_step(self) -> int | None:
        return max(self._steps, default=None)

    def update(self) -> None:
        """Read what the run has logged since the last call."""
        for _, line in self._tail.lines(on_replaced=self._reset):
            if (entry := whole_entry(parsed(line))) is not None:
                self._add(entry)

    def _add(self, entry: dict[str, Any]) -> None:
        step = int(entry.pop("step"))
        evaluated = entry.get(EVALUATED)
        if evaluated is not None and int(evaluated) != step:
            found = {name: value for name, value in entry.items() if name.startswith("val-")}
            self._set(int(evaluated), found)
            entry = {name: value for name, value in entry.items() if name not in found}
        self._set(step, entry)

    def _set(self, step: int, values: dict[str, Any]) -> None:
        new = values.keys() - self._columns.keys()
        if (len(self._columns) + len(new)) * (len(self._steps) + 1) > MAX_VALUES:
            return
        row = self._rows.setdefault(step, len(self._steps))
        if row == len(self._steps):
            self._steps.append(step)
        else:
            self.revision += 1
        for name, value in values.items():
            column = self._columns.setdefault(name, array("d"))
            column.extend([math.nan] * (row + 1 - len(column)))
            if math.isfinite(value):
                column[row] = value
            else:
                self._num_not_finite[name] = self._num_not_finite.get(name, 0) + 1

    def names(self) -> list[dict[str, Any]]:
        """Return, per metric, its name, its last finite value, and the number of values that are not finite."""
        return [
            {
                "name": name,
                "last": next((value for value in reversed(column) if not math.isnan(value)), None),
                "not_finite": self._num_not_finite.get(name, 0),
            }
            for name, column in sorted(self._columns.items())
        ]

    def series(self, name: str, *, since: int = 0, max_points: int = MAX_POINTS) -> tuple[list[int], list[float]]:
        """Return steps, ascending, and finite values of a metric.

        Args:
            name: The metric. An unknown one has no values.
            since: Rows to leave out, those that an earlier answer has.
            max_points: Most points. Of more, the smallest and the largest value of each interval are returned.
        """
        column = self._columns.get(name, array("d"))
        rows = [row for row in range(since, len(column)) if not math.isnan(column[row])]
        rows.sort(key=self._steps.__getitem__)
        if len(rows) > max_points:
            rows = list(_extremes(rows, column, max_points // 2))
        return [self._steps[row] for row in rows], [column[row] for row in rows]


def _extremes(rows: list[int], column: "array[float]", count: int) -> Iterator[int]:
    """Yield, for each of `count` intervals, the rows of its smallest and largest value, and the last row."""
    width = len(rows) / count
    for number in range(count):
        part = rows[round(number * width) : round((number + 1) * width)]
        low, high = min(part, key=column.__getitem__), max(part, key=column.__getitem__)
        yield from sorted({low, high}, key=part.index)
    if rows[-1] not in (low, high):
        yield rows[-1]
