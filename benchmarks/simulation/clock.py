"""Virtual time of a simulated run: `VirtualClock`, and references to results that are ready later.

The driver is one thread, and every process executes its calls in submission order. So the start of a call is known when
it is submitted, and no event loop is needed: a submission computes when the result is ready, and a wait moves the clock
there.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class TimedRef:
    """A result, and the time in seconds at which a real one would be ready."""

    value: Any
    ready_s: float


class VirtualClock:
    """Time of the driver and of the devices of a simulated run, in seconds.

    Attributes:
        now_s: The driver's time.
        free_s: Device -> time at which it has done everything that was submitted to it.
        busy_s: Device -> seconds in which it worked.
        workers_cpu_s: Real CPU seconds that the calling thread spent as a worker, which a cluster's driver does not.
    """

    def __init__(self) -> None:
        self.now_s = 0.0
        self.free_s: dict[tuple[int, int], float] = {}
        self.busy_s: dict[tuple[int, int], float] = {}
        self.workers_cpu_s = 0.0
        self._arguments_ready_s: float | None = None

    @contextlib.contextmanager
    def in_worker(self) -> Iterator[None]:
        """Within the block, fetching a result delays the call that reads it, and not the driver."""
        self._arguments_ready_s = 0.0
        try:
            yield
        finally:
            self._arguments_ready_s = None

    @property
    def arguments_ready_s(self) -> float:
        """Time at which all results are ready that the present call has read."""
        assert self._arguments_ready_s is not None, "only a call has arguments"
        return self._arguments_ready_s

    def fetch(self, references: list[Any]) -> list[Any]:
        """Return the values of references, after waiting for all of them."""
        timed = [reference for reference in references if isinstance(reference, TimedRef)]
        ready_s = max((reference.ready_s for reference in timed), default=0.0)
        if self._arguments_ready_s is None:
            self.now_s = max(self.now_s, ready_s)
        else:
            self._arguments_ready_s = max(self._arguments_ready_s, ready_s)
        return [reference.value if isinstance(reference, TimedRef) else reference for reference in references]

    def occupy(self, device: tuple[int, int], *, start_s: float, seconds: float) -> float:
        """Let a device work for this long, and return its end."""
        self.busy_s[device] = self.busy_s.get(device, 0.0) + seconds
        self.free_s[device] = start_s + seconds
        return self.free_s[device]

    def free_from(self, device: tuple[int, int]) -> float:
        """Return when a device can start a call that is submitted now and has its arguments."""
        return max(self.now_s, self.free_s.get(device, 0.0), self.arguments_ready_s)
