"""`HangDetector`: finds the process that blocks a job, from heartbeats or, if these tie, from stacks.

The master calls `check` periodically. The detector inspects methods that take too long, and at once the processes of a
call that missed its deadline. It requests stacks over the heartbeat connections and never waits for a process that
hangs: it concludes without the stacks that arrive too late.
"""

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from hybridrl.master.health.hang_diagnosis import Diagnosis, all_in_one_method, compare_stacks, find_culprit, frame_of
from hybridrl.master.health.monitor import Monitor
from hybridrl.master.state.events import WarningRaised, role_of_slot

STACKS_TIMEOUT_S = 2.0


@dataclass
class StackInquiry:
    """A pending request for stacks.

    Attributes:
        asked: Slots whose stacks were requested, of the called role first.
        method: `role.method` that takes too long.
        found: The diagnosis, if activities were sufficient for one.
        is_overdue: The cause is a call that missed its deadline.
        methods: Slot -> the method that it executes, if that is another one.
        stacks: Slot -> stack dump, as they arrive.
    """

    since: float
    asked: tuple[str, ...]
    method: str
    found: Diagnosis | None = None
    is_overdue: bool = False
    methods: Mapping[str, str] = field(default_factory=dict)
    stacks: dict[str, str] = field(default_factory=dict)

    @property
    def is_ready(self) -> bool:
        return set(self.asked) <= self.stacks.keys() or time.monotonic() - self.since >= STACKS_TIMEOUT_S


class HangDetector:
    """Detects hangs; one inquiry at a time.

    Args:
        monitor: Source of the activities.
        request_stacks: Requests the stacks of a slot's process, if it is connected.
        journal: Directory for stack dumps. Used only if it is a local directory.
        hang_s: A method that takes longer than this, and than three times its longest time so far, is inspected.

    Attributes:
        findings: `role.method` of a call that missed its deadline -> which process blocks it, None if that is unknown.
            Without an entry until the inquiry has ended. Other threads read it.
    """

    def __init__(self, monitor: Monitor, request_stacks: Callable[[str], None], *, journal: str, hang_s: float) -> None:
        self._monitor, self._request_stacks, self._journal, self._hang_s = monitor, request_stacks, journal, hang_s
        self.findings: dict[str, Diagnosis | None] = {}
        self._inquiry: StackInquiry | None = None
        self._reported: set[tuple[str, str | None]] = set()
        self._num_files = 0

    def add_stacks(self, slot: str, stacks: str) -> None:
        """Store the stacks that a process sent."""
        if self._inquiry is not None:
            self._inquiry.stacks[slot] = stacks

    def inspect_now(self, overdue: tuple[str, ...], method: str) -> None:
        """Start an inquiry about a call that these processes did not answer in time.

        It replaces any other one.
        """
        # Processes that have answered cannot be the culprit.
        late = [activity for activity in self._monitor.activities() if activity.slot in overdue]
        found = find_culprit(late, threshold_s=0.0)
        self.findings.pop(method, None)
        methods = {activity.slot: activity.method for activity in late if activity.method}
        self._start_inquiry(StackInquiry(time.monotonic(), overdue, method, found, is_overdue=True, methods=methods))

    def check(self) -> WarningRaised | None:
        """Return a finding if an inquiry has finished.

        Starts an inquiry if a method takes too long.
        """
        if self._inquiry is None:
            self._inspect_overdue()
        elif self._inquiry.is_ready:
            inquiry, self._inquiry = self._inquiry, None
            return self._conclude(inquiry)
        return None

    def _inspect_overdue(self) -> None:
        activities = self._monitor.activities()
        in_progress = [activity.method for activity in activities if activity.method]
        longest_s = self._monitor.longest_call_s
        threshold_s = max([self._hang_s, *(3 * longest_s.get(method, 0.0) for method in in_progress)])
        found = find_culprit(activities, threshold_s=threshold_s)
        alike = all_in_one_method(activities, threshold_s=threshold_s)
        key: tuple[str, str | None]
        if found is not None:
            asked, key, method = (found.culprit, *found.waiting[:1]), (found.culprit, found.waiting[0]), found.method
        elif alike:
            method = alike[0].method or ""
            asked, key = tuple(activity.slot for activity in alike), (method, None)
        else:
            self._reported.clear()
            return
        if key not in self._reported:
            self._reported.add(key)
            self._start_inquiry(StackInquiry(time.monotonic(), asked, method, found))

    def _start_inquiry(self, inquiry: StackInquiry) -> None:
        self._inquiry = inquiry
        for slot in inquiry.asked:
            self._request_stacks(slot)

    def _conclude(self, inquiry: StackInquiry) -> WarningRaised | None:
        found = inquiry.found or self._compare_peers(inquiry) or self._only_silent(inquiry)
        if inquiry.is_overdue:
            self.findings[inquiry.method] = found
        if found is not None:
            location = self._save_stacks(found.culprit, inquiry)
            return WarningRaised(found.culprit, f"it blocks the job: {found.evidence}{location}")
        slot = inquiry.asked[0]
        late = f"{inquiry.method} is past its deadline"
        if not inquiry.is_overdue:
            late = f"no process of its role ({len(inquiry.asked)}) advances in {inquiry.method}"
        return WarningRaised(slot, f"{late}: {self._place(slot, inquiry)}{self._save_stacks(slot, inquiry)}")

    def _only_silent(self, inquiry: StackInquiry) -> Diagnosis | None:
        """Return the process that alone has not answered a call that missed its deadline."""
        if not inquiry.is_overdue or len(inquiry.asked) != 1:
            return None
        slot = inquiry.asked[0]
        return Diagnosis(slot, (), f"it alone has not answered, and {self._place(slot, inquiry)}", inquiry.method)

    def _place(self, slot: str, inquiry: StackInquiry) -> str:
        """Return where a process is, from its stack, as a part of a sentence."""
        if slot not in inquiry.stacks:
            return "it sent no stack"
        return f"it is at {frame_of(inquiry.stacks[slot], inquiry.method)}"

    def _compare_peers(self, inquiry: StackInquiry) -> Diagnosis | None:
        """Return the process whose stack differs from those of its role, the called role first."""
        for label in dict.fromkeys(map(role_of_slot, inquiry.asked)):
            peers = {slot: text for slot, text in inquiry.stacks.items() if role_of_slot(slot) == label}
            method = next((inquiry.methods[slot] for slot in peers if slot in inquiry.methods), inquiry.method)
            if found := compare_stacks(peers, method=method):
                return found
        return None

    def _save_stacks(self, slot: str, inquiry: StackInquiry) -> str:
        """Write the stacks to a file; return the suffix of the warning that names it.

        The file is beside the journal if that is on a local disk.

        If the file cannot be written, the suffix has the innermost frames instead.
        """
        if not inquiry.stacks:
            return ""
        self._num_files += 1
        path = os.path.join(self._journal, f"stacks-{slot}-{os.getpid()}-{self._num_files}.txt")
        try:
            with open(path, "w", encoding="utf-8") as f:
                f.writelines(f"== {name}\n{text}\n" for name, text in inquiry.stacks.items())
        except OSError:  # the journal is on remote storage, or its disk is full
            frames = (f"{name} is at {frame_of(text, inquiry.method)}" for name, text in inquiry.stacks.items())
            return "; " + "; ".join(frames)
        return f"; stacks: {path}"
