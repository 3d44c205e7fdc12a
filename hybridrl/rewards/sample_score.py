"""One sample's score, or the reason why there is none.

Reads a reward function's result as a number and extra values.
"""

import math
import numbers
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from hybridrl.rewards.process import CallResult

FLOAT32_MAX = 3.4028234663852886e38


@dataclass(frozen=True)
class SampleScore:
    """`value` counts only if `failure` is None; otherwise it is 0 and the sample must be masked."""

    value: float = 0.0
    extra: dict[str, Any] = field(default_factory=dict)
    failure: Literal["timeout", "error"] | None = None
    reason: str = ""

    @property
    def valid(self) -> bool:
        return self.failure is None

    def with_accuracy(self) -> "SampleScore":
        """Return this score with its value as the extra value `acc`.

        An invalid score, or one with extra values, is returned as it is.
        """
        return self if self.extra or not self.valid else replace(self, extra={"acc": self.value})

    def with_penalty(self, penalty: float) -> "SampleScore":
        """Return this score with a length penalty (at most 0) added and recorded; a failed sample stays failed."""
        extra = {**self.extra, "overlong_reward": penalty, "overlong": penalty < 0}
        return replace(self, value=self.value + penalty if self.valid else 0.0, extra=extra)


def read_score(result: CallResult) -> SampleScore:
    """Return the score in a call's result: a finite number, or a dict with one under "score".

    The other keys of a dict are extra values.
    """
    if result.failure is not None:
        return SampleScore(failure=result.failure, reason=result.reason)
    value, extra = result.value, {}
    if isinstance(value, dict):
        if "score" not in value:
            return failed_score(f'it returned a dict without "score", only {", ".join(map(str, value)) or "nothing"}')
        extra = {name: entry for name, entry in value.items() if name != "score"}
        value = value["score"]
    number = as_number(value)
    if number is None:
        return failed_score(f"it returned a {type(value).__name__}, not a number")
    if not is_reward(number):
        return failed_score(f"it returned {number}" + (", more than float32 can hold" if math.isfinite(number) else ""))
    return SampleScore(value=number, extra=extra)


def is_reward(number: float) -> bool:
    """Return whether float32, which rewards are trained in, holds the number."""
    return abs(number) <= FLOAT32_MAX


def as_number(value: Any) -> float | None:
    """Return a value as a float, or None if it is no number.

    Numbers are Python's, numpy's, bools, and arrays or tensors of one element. One that no float holds is infinite.
    """
    if getattr(value, "shape", None) is not None and math.prod(value.shape) == 1:
        value = value.item()
    if not isinstance(value, numbers.Real):
        return None
    try:
        return float(value)
    except OverflowError:
        return math.inf


def failed_score(reason: str) -> SampleScore:
    """Return a failed sample."""
    return SampleScore(failure="error", reason=reason)
