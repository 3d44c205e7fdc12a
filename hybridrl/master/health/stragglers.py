"""`StragglerDetector`: names a process that regularly takes longer than its peers for the same method.

The compared time is the time inside the process, from the start of a call to its end. In a method that contains a
collective, all peers take as long as the slowest, so none of them is a straggler. There, stacks show the process that
the others wait for (`hang_detector.py`).
"""

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from hybridrl.master.health.process_record import NUM_CALLS, ProcessRecord
from hybridrl.master.state.events import WarningRaised, role_of_slot

SLOW_RATIO, RECOVERED_RATIO = 1.5, 1.2  # times the median of the peers
MIN_DIFFERENCE_S = 0.5  # a smaller difference between the medians is not reported


@dataclass(frozen=True)
class PeerComparison:
    """A process compared with its peers.

    Attributes:
        median_s: Median duration of the process's last calls, in seconds.
        peers_s: Median over its peers of the same figure.
    """

    slot: str
    method: str
    median_s: float
    peers_s: float
    num_peers: int

    @property
    def ratio(self) -> float:
        return self.median_s / self.peers_s if self.peers_s else float("inf")


def compare_with_peers(seconds: Mapping[str, Mapping[str, Sequence[float]]]) -> list[PeerComparison]:
    """Return a comparison for every process that has peers, per method.

    Args:
        seconds: Slot -> method -> durations of its last calls. Fewer than `NUM_CALLS` of them are not compared.
    """
    medians: dict[tuple[str, str], dict[str, float]] = {}
    for slot, methods in seconds.items():
        for method, calls in methods.items():
            if len(calls) >= NUM_CALLS:
                medians.setdefault((role_of_slot(slot), method), {})[slot] = median(calls)
    comparisons = []
    for (_, method), by_slot in medians.items():
        ordered = sorted(by_slot.values())
        for slot, own in by_slot.items():
            index = bisect_left(ordered, own)
            if peers := ordered[:index] + ordered[index + 1 :]:
                peers_s = (peers[len(peers) // 2] + peers[(len(peers) - 1) // 2]) / 2
                comparisons.append(PeerComparison(slot, method, own, peers_s, len(peers)))
    return comparisons


class StragglerDetector:
    """Reports each straggler once, and again only if it was as fast as its peers in between."""

    def __init__(self) -> None:
        self._reported: set[tuple[str, str]] = set()

    def check(self, processes: Iterable["ProcessRecord"]) -> list[WarningRaised]:
        """Return warnings about processes that became stragglers since the last check."""
        return self.new_findings(compare_with_peers({process.slot: process.call_seconds for process in processes}))

    def new_findings(self, comparisons: Iterable[PeerComparison]) -> list[WarningRaised]:
        warnings = []
        for one in comparisons:
            key = (one.slot, one.method)
            if one.ratio < RECOVERED_RATIO:
                self._reported.discard(key)
            elif one.ratio > SLOW_RATIO and one.median_s - one.peers_s > MIN_DIFFERENCE_S and key not in self._reported:
                self._reported.add(key)
                warnings.append(WarningRaised(one.slot, _warning_text(one)))
        return warnings


def _warning_text(one: PeerComparison) -> str:
    peers = "its peer" if one.num_peers == 1 else f"its {one.num_peers} peers"
    return (
        f"it is slow: {one.method} took {one.median_s:.2f} s (median of its last {NUM_CALLS} calls), and "
        f"{one.peers_s:.2f} s for {peers}, {one.ratio:.1f} times as long; check its device and its machine, and "
        "whether another program runs there"
    )
