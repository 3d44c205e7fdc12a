"""Find the process that blocks a hung job, from heartbeats and stack dumps.

Pure functions; they call no process.

The rules, in this order:

  - Some processes of a role are in one method for too long, and a peer is idle or in another method: that peer is the
    culprit. If the peer has just finished the same call, the process still in the call is the culprit.
  - All processes of a role are in the same method: their stacks decide. The culprit is at another line than its peers,
    or outside of a collective.
  - All workers are idle: the trainer is the culprit.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hybridrl.master.state.events import DRIVERS, role_of_slot

TORCH, COLLECTIVE = "/torch/", ("distributed_c10d.py", "torch/distributed", "process_group")


@dataclass(frozen=True)
class Activity:
    """What one process does at the moment.

    Attributes:
        method: The method it executes. None: it is idle.
        elapsed_s: Seconds in that method, or idle.
        last_method: The method that it finished last.
        call_number: Number of the call of that method, in progress or finished last. Peers get the same calls.
    """

    slot: str
    method: str | None
    elapsed_s: float
    last_method: str | None = None
    call_number: int = 0


@dataclass(frozen=True)
class Diagnosis:
    """Which process blocks others.

    Attributes:
        culprit: Its slot.
        waiting: Slots of the processes that wait for it.
        evidence: The reason, as a sentence.
        method: The method that hangs.
    """

    culprit: str
    waiting: tuple[str, ...]
    evidence: str
    method: str = ""


def find_culprit(activities: Sequence[Activity], *, threshold_s: float) -> Diagnosis | None:
    """Return the process that blocks others; None if there is none, or if only stacks can show it.

    Args:
        activities: Of all processes of the job.
        threshold_s: A method that takes less time is not regarded as hung.
    """
    workers = [activity for activity in activities if activity.slot not in DRIVERS]
    for label in dict.fromkeys(role_of_slot(activity.slot) for activity in workers):
        found = _outlier([activity for activity in workers if role_of_slot(activity.slot) == label], threshold_s)
        if found is not None:
            return found
    trainer = next((activity for activity in activities if activity.slot in DRIVERS), None)
    if trainer is None or not workers:
        return None
    if any(activity.method or activity.elapsed_s < threshold_s for activity in workers):
        return None
    if trainer.method is None or trainer.elapsed_s < threshold_s:
        return None
    idle = tuple(activity.slot for activity in workers)
    evidence = f"it is in {trainer.method} for {trainer.elapsed_s:.0f} s, and all workers are idle"
    return Diagnosis(trainer.slot, idle, evidence, trainer.method)


def _outlier(group: Sequence[Activity], threshold_s: float) -> Diagnosis | None:
    overdue = [activity for activity in group if activity.method and activity.elapsed_s >= threshold_s]
    if not overdue:
        return None
    method = Counter(activity.method for activity in overdue).most_common(1)[0][0]
    waiting = tuple(activity.slot for activity in overdue if activity.method == method)
    number = max(activity.call_number for activity in overdue if activity.method == method)
    done = [
        activity
        for activity in group
        if activity.method is None and activity.last_method == method and activity.call_number >= number
    ]
    others = [activity for activity in group if activity.method != method and activity not in done]
    if not others:
        return _others_finished(overdue, done)
    # An idle process is a better candidate than one in another method.
    culprit = max(others, key=lambda activity: (activity.method is None, activity.elapsed_s))
    does = f"in {culprit.method}" if culprit.method else "idle"
    evidence = f"it is {does} for {culprit.elapsed_s:.0f} s, while {', '.join(waiting)} wait in {method}"
    return Diagnosis(culprit.slot, waiting, evidence, method or "")


def _others_finished(overdue: list[Activity], done: list[Activity]) -> Diagnosis | None:
    """Return the only process that is still in a call that its peers have finished."""
    if len(overdue) != 1 or not done:
        return None
    [culprit], peers = overdue, tuple(activity.slot for activity in done)
    since = min(activity.elapsed_s for activity in done)
    evidence = (
        f"it is in {culprit.method} for {culprit.elapsed_s:.0f} s, "
        f"which {', '.join(peers)} finished {since:.0f} s ago or earlier"
    )
    return Diagnosis(culprit.slot, peers, evidence, culprit.method or "")


def all_in_one_method(activities: Sequence[Activity], *, threshold_s: float) -> tuple[Activity, ...]:
    """Return the processes of a role that are all in one method for too long.

    The caller then compares their stacks.
    """
    for label in dict.fromkeys(role_of_slot(activity.slot) for activity in activities if activity.slot not in DRIVERS):
        group = tuple(activity for activity in activities if role_of_slot(activity.slot) == label)
        method = group[0].method
        if method and all(activity.method == method and activity.elapsed_s >= threshold_s for activity in group):
            return group
    return ()


def compare_stacks(stacks: Mapping[str, str], *, method: str) -> Diagnosis | None:
    """Return the process whose stack differs from the others', or None.

    With two processes, or if all stacks differ, it is the only one that is not in a collective.

    Args:
        stacks: Slot -> dump of `faulthandler`.
        method: `role.method` that the processes execute.
    """
    frames = {slot: frame_of(text, method) for slot, text in stacks.items()}
    counts = Counter(frames.values())
    if len(counts) < 2:
        return None
    outside = [slot for slot, text in stacks.items() if not _is_in_collective(text, method)]
    unique = [slot for slot, frame in frames.items() if counts[frame] == 1]
    candidates = outside if len(outside) == 1 else unique
    if len(candidates) != 1:
        return None
    culprit = candidates[0]
    waiting = tuple(slot for slot in frames if slot != culprit)
    common = Counter(frames[slot] for slot in waiting).most_common(1)[0][0]
    return Diagnosis(culprit, waiting, f"it is at {frames[culprit]}, while {', '.join(waiting)} are at {common}")


def frame_of(dump: str, method: str) -> str:
    """Return the innermost frame of the thread that runs `role.method`, as `file:line in function`."""
    lines = _frames(dump, method)
    if not lines:
        return "an unknown place"
    _, path, rest = lines[0].split('"', 2)
    return f"{path}:{rest.replace(', line ', '').strip()}"


def _frames(dump: str, method: str) -> list[str]:
    """Return the lines of the frames of the thread that runs `role.method`, the innermost first."""
    threads = [block.splitlines() for block in dump.split("\n\n")]
    running = [lines for lines in threads if any(f" in {method.rpartition('.')[2]}" in line for line in lines)]
    return [line.strip() for line in (running or threads)[0] if line.strip().startswith("File ")]


def _is_in_collective(dump: str, method: str) -> bool:
    """Return whether the innermost frames, up to the first one outside of torch, include a collective."""
    for line in _frames(dump, method):
        if any(word in line for word in COLLECTIVE):
            return True
        if TORCH not in line:
            break
    return False
