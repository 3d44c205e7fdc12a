"""`ProcessRecord`: state of one process of a job, as the master sees it.

Used by the monitor and its detectors.
"""

from collections import deque
from dataclasses import dataclass, field
from typing import Any

from hybridrl.master.health.heartbeat_server import Connection
from hybridrl.master.health.kernel_process import PidfdWatch

NUM_CALLS = 10  # latest durations kept per method; stragglers are found by comparing them with those of peers
MAX_SIZES, SIZE_PERIOD_S = 7, 10.0  # memory samples: growth is reported over the last minute


@dataclass(eq=False)
class ProcessRecord:
    """One process, as its heartbeats and its connection show it.

    Times are seconds of `time.monotonic()`.

    Attributes:
        last_message_at: When it sent its last message.
        disconnected_at: When its connection ended. 0: it is connected.
        probed_at: When the monitor last asked for its kernel state.
        beat: The content of its last heartbeat.
        call_seconds: Method -> durations of its last calls.
        sizes: (time, bytes of memory that only this process holds), oldest first.
    """

    slot: str
    name: str
    pid: int
    node: str
    machine: str
    last_message_at: float
    connection: Connection | None = None
    disconnected_at: float = 0.0
    pidfd_watch: PidfdWatch | None = None
    beat: dict[str, Any] = field(default_factory=dict)
    idle_since: float = 0.0
    is_silent: bool = False
    probed_at: float = 0.0
    host: str = ""
    call_seconds: dict[str, deque[float]] = field(default_factory=dict)
    sizes: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=MAX_SIZES))

    @property
    def private(self) -> int:
        """Bytes of memory that only this process holds, by its last heartbeat."""
        return self.beat.get("private", 0)

    @property
    def growth(self) -> int:
        """Bytes that `private` grew by within `growth_window_s`."""
        return self.private - self.sizes[0][1] if self.sizes else 0

    @property
    def growth_window_s(self) -> float:
        return self.last_message_at - self.sizes[0][0] if self.sizes else 0.0

    def update(self, beat: dict[str, Any]) -> None:
        """Store the content of a heartbeat."""
        self.beat = beat
        for method, seconds in beat.get("ended", {}).items():
            self.call_seconds.setdefault(method, deque(maxlen=NUM_CALLS)).extend(seconds)
        if not self.sizes or self.last_message_at - self.sizes[-1][0] > SIZE_PERIOD_S:
            self.sizes.append((self.last_message_at, self.private))
