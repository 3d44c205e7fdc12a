"""`Slowness`: a process that regularly takes longer than its peers for the same method is named, once, with figures.

What is compared is the time from a call's begin to its end in its process. In a method that meets its peers in a
collective all take as long as the slowest, and nobody is slow; a machine that is slow shows there as one that all wait
for, which stacks tell (`hangs.py`).
"""

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from hybridrl.master.health.process_record import CALLS, Presence
from hybridrl.master.state.events import Noticed, label_of

SLOW, WELL_AGAIN = 1.5, 1.2  # times the median of the peers
LEAST_S = 0.5  # less than this between two medians is no reason to say anything


@dataclass(frozen=True)
class Slow:
    """median_s: of the process's last calls; peers_s: of those of its peers."""

    slot: str
    method: str
    median_s: float
    peers_s: float
    num_peers: int

    @property
    def ratio(self) -> float:
        return self.median_s / self.peers_s if self.peers_s else float("inf")


def compare(seconds: Mapping[str, Mapping[str, Sequence[float]]]) -> list[Slow]:
    """Return every process against its peers.

    seconds: slot -> method -> of its last calls, of which there have to be `CALLS`.
    """
    medians: dict[tuple[str, str], dict[str, float]] = {}
    for slot, methods in seconds.items():
        for method, calls in methods.items():
            if len(calls) >= CALLS:
                medians.setdefault((label_of(slot), method), {})[slot] = median(calls)
    found = []
    for (_, method), by_slot in medians.items():
        ordered = sorted(by_slot.values())
        for slot, own in by_slot.items():
            place = bisect_left(ordered, own)
            if peers := ordered[:place] + ordered[place + 1 :]:
                found.append(
                    Slow(slot, method, own, (peers[len(peers) // 2] + peers[(len(peers) - 1) // 2]) / 2, len(peers))
                )
    return found


class Slowness:
    """Remembers who was told of, until it is as fast as the others again."""

    def __init__(self) -> None:
        self._told: set[tuple[str, str]] = set()

    def look(self, presences: Iterable["Presence"]) -> list[Noticed]:
        """Return who is slow now and was not when it was last looked at."""
        return self.news(compare({presence.slot: presence.ended for presence in presences}))

    def news(self, compared: Iterable[Slow]) -> list[Noticed]:
        notices = []
        for one in compared:
            key = (one.slot, one.method)
            if one.ratio < WELL_AGAIN:
                self._told.discard(key)
            elif one.ratio > SLOW and one.median_s - one.peers_s > LEAST_S and key not in self._told:
                self._told.add(key)
                notices.append(Noticed(one.slot, _in_words(one)))
        return notices


def _in_words(one: Slow) -> str:
    peers = "its peer" if one.num_peers == 1 else f"its {one.num_peers} peers"
    return (
        f"it is slow: {one.method} took {one.median_s:.2f} s (median of its last {CALLS} calls), and "
        f"{one.peers_s:.2f} s for {peers}, "
        f"{one.ratio:.1f} times as long; look at its device and its machine, and whether something else runs there"
    )
