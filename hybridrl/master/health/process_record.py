"""`Presence`: one process of a job, as the master sees it through heartbeats."""

from collections import deque
from dataclasses import dataclass, field
from typing import Any

from hybridrl.master.health.heartbeat_server import Connection
from hybridrl.master.health.kernel_process import ProcessWatch

CALLS = 10  # the last ones of each method that are kept, and compared with those of peers
SIZES, SIZES_EVERY_S = 7, 10.0  # growth is told over the last minute


@dataclass(eq=False)
class Presence:
    """One process, as the master sees it.

    heard: when it last spoke; closed: when its connection ended (0: it is there).
    """

    slot: str
    name: str
    pid: int
    node: str
    machine: str
    heard: float
    connection: Connection | None = None
    closed: float = 0.0
    watch: ProcessWatch | None = None
    beat: dict[str, Any] = field(default_factory=dict)
    idle_since: float = 0.0
    is_silent: bool = False
    looked: float = 0.0  # when it was last looked at from outside
    host: str = ""
    ended: dict[str, deque[float]] = field(default_factory=dict)  # method -> seconds of its last calls
    sizes: deque[tuple[float, int]] = field(
        default_factory=lambda: deque(maxlen=SIZES)
    )  # when it had so many bytes of its own

    @property
    def private(self) -> int:
        """Bytes of memory that only this process holds, as far as it has told."""
        return self.beat.get("private", 0)

    @property
    def growth(self) -> int:
        """Bytes that it has more than `grown_in_s` ago."""
        return self.private - self.sizes[0][1] if self.sizes else 0

    @property
    def grown_in_s(self) -> float:
        return self.heard - self.sizes[0][0] if self.sizes else 0.0

    def take_beat(self, beat: dict[str, Any]) -> None:
        """Keep what a heartbeat says."""
        self.beat = beat
        for method, seconds in beat.get("ended", {}).items():
            self.ended.setdefault(method, deque(maxlen=CALLS)).extend(seconds)
        if not self.sizes or self.heard - self.sizes[-1][0] > SIZES_EVERY_S:
            self.sizes.append((self.heard, self.private))
