"""`HangWatch`: finds out who holds up a job, from what processes say they do and, where that is not enough, from their
stacks.

It looks by itself at methods that take too long, and at once at the processes of a call that ran past its deadline.
Stacks are asked for over the heartbeats' connections, so that nobody waits for a process that hangs; who does not
answer in time is concluded without.
"""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from hybridrl.master.health.hang_diagnosis import Diagnosis, all_in_one_method, compare_stacks, find_culprit, place
from hybridrl.master.health.monitor import Monitor
from hybridrl.master.state.events import Noticed

STACKS_WITHIN_S = 2.0


@dataclass
class Inquiry:
    """What is being found out.

    found: who it is, if that is known already. late: the slots that ran past a deadline, if one did.
    """

    since: float
    asked: tuple[str, ...]
    method: str
    found: Diagnosis | None = None
    late: tuple[str, ...] = ()
    stacks: dict[str, str] = field(default_factory=dict)

    @property
    def is_ready(self) -> bool:
        return set(self.asked) <= self.stacks.keys() or time.monotonic() - self.since >= STACKS_WITHIN_S


class HangWatch:
    """ask: asks a slot's process for its stacks, if it is there. journal: where stacks are kept, if it is a local
    directory.

    hang_s: a method that takes longer, and three times as long as it ever took, is looked into when others wait.
    """

    def __init__(self, monitor: Monitor, ask: Callable[[str], None], *, journal: str, hang_s: float) -> None:
        self._monitor, self._ask, self._journal, self._hang_s = monitor, ask, journal, hang_s
        self._inquiry: Inquiry | None = None
        self._noticed: set[tuple[str, str | None]] = set()
        self._num_files = 0

    def take(self, slot: str, stacks: str) -> None:
        """Take in the stacks of a process."""
        if self._inquiry is not None:
            self._inquiry.stacks[slot] = stacks

    def suspect(self, late: tuple[str, ...], method: str) -> None:
        """Look into a call that these processes did not answer in time, before anything else."""
        silent = [doing for doing in self._monitor.doings() if doing.slot in late]  # who has answered holds up nobody
        self._begin(Inquiry(time.monotonic(), late, method, find_culprit(silent, patience_s=0.0), late))

    def look(self) -> Noticed | None:
        """Return what was found out by now."""
        if self._inquiry is None:
            self._look_for_late()
        elif self._inquiry.is_ready:
            inquiry, self._inquiry = self._inquiry, None
            return self._conclude(inquiry)
        return None

    def _look_for_late(self) -> None:
        doings = self._monitor.doings()
        in_progress = [doing.method for doing in doings if doing.method]
        patience_s = max([self._hang_s, *(3 * self._monitor.longest_s.get(method, 0.0) for method in in_progress)])
        found, alike = find_culprit(doings, patience_s=patience_s), all_in_one_method(doings, patience_s=patience_s)
        if found is not None:
            asked, key, method = (found.culprit, *found.waiting[:1]), (found.culprit, found.waiting[0]), found.method
        elif len(alike) > 1:
            method = alike[0].method or ""
            asked, key = tuple(doing.slot for doing in alike), (method, None)
        else:
            self._noticed.clear()
            return
        if key not in self._noticed:
            self._noticed.add(key)
            self._begin(Inquiry(time.monotonic(), asked, method, found))

    def _begin(self, inquiry: Inquiry) -> None:
        self._inquiry = inquiry
        for slot in inquiry.asked:
            self._ask(slot)

    def _conclude(self, inquiry: Inquiry) -> Noticed | None:
        """Name the culprit, by the stacks that came in time."""
        found = inquiry.found
        if found is None and len(inquiry.stacks) > 1:
            found = compare_stacks(inquiry.stacks, method=inquiry.method)
        if found is not None:
            return Noticed(found.culprit, f"it holds up the job: {found.evidence}{self._write(found.culprit, inquiry)}")
        if not inquiry.late:
            return None
        slot, where = inquiry.late[0], "it does not tell where it stands"
        if slot in inquiry.stacks:
            where = f"it stands at {place(inquiry.stacks[slot], inquiry.method)}"
        return Noticed(slot, f"{inquiry.method} is past its deadline: {where}{self._write(slot, inquiry)}")

    def _write(self, slot: str, inquiry: Inquiry) -> str:
        """Keep the stacks beside a journal on a local disk; return where, in words."""
        if not inquiry.stacks:
            return ""
        self._num_files += 1
        path = os.path.join(self._journal, f"stacks-{slot}-{os.getpid()}-{self._num_files}.txt")
        try:
            with open(path, "w", encoding="utf-8") as f:
                f.writelines(f"== {name}\n{text}\n" for name, text in inquiry.stacks.items())
        except OSError:  # the journal is elsewhere, or its disk is full
            return "; " + "; ".join(
                f"{name} stands at {place(text, inquiry.method)}" for name, text in inquiry.stacks.items()
            )
        return f"; stacks: {path}"
