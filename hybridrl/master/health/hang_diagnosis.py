"""Who holds up a job that hangs: from what heartbeats say, without asking anybody who may hang himself.

Processes of one role work in step. Where some are in a method for too long while another of the same role is idle, or
in another method, that other one is the culprit: the others wait for it; unless it has just ended that method, and then
it is the one that has not. Where all are in the same method, their stacks tell: the one that stands elsewhere than the
others, or outside of a collective. Where all workers are idle, it is the trainer.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hybridrl.master.state.events import TRAINER, label_of

COLLECTIVE = ("distributed_c10d.py", "torch/distributed", "process_group")


@dataclass(frozen=True)
class Doing:
    """What one process does. method: None while it is idle. for_s: seconds in it, or idle. did: the method that it
    ended last.

    turn: which call it is of that method, the one in progress or the one that ended last; peers get the same calls.
    """

    slot: str
    method: str | None
    for_s: float
    did: str | None = None
    turn: int = 0


@dataclass(frozen=True)
class Diagnosis:
    """culprit: a slot.

    waiting: those who wait for it. evidence: why it is believed, in a sentence. method: in which somebody hangs.
    """

    culprit: str
    waiting: tuple[str, ...]
    evidence: str
    method: str = ""


def find_culprit(doings: Sequence[Doing], *, patience_s: float) -> Diagnosis | None:
    """Return who holds up the others, or None where nobody does, or where only stacks can tell.

    patience_s: a method that takes no longer holds up nobody.
    """
    workers = [doing for doing in doings if doing.slot != TRAINER]
    for label in dict.fromkeys(label_of(doing.slot) for doing in workers):
        found = _odd_one([doing for doing in workers if label_of(doing.slot) == label], patience_s)
        if found is not None:
            return found
    trainer = next((doing for doing in doings if doing.slot == TRAINER), None)
    if trainer is None or not workers or any(doing.method or doing.for_s < patience_s for doing in workers):
        return None
    if trainer.method is None or trainer.for_s < patience_s:
        return None
    idle = tuple(doing.slot for doing in workers)
    return Diagnosis(
        TRAINER, idle, f"it is in {trainer.method} for {trainer.for_s:.0f} s, and all workers are idle", trainer.method
    )


def _odd_one(group: Sequence[Doing], patience_s: float) -> Diagnosis | None:
    late = [doing for doing in group if doing.method and doing.for_s >= patience_s]
    if not late:
        return None
    method = Counter(doing.method for doing in late).most_common(1)[0][0]
    waiting = tuple(doing.slot for doing in late if doing.method == method)
    turn = max(doing.turn for doing in late if doing.method == method)
    done = [doing for doing in group if doing.method is None and doing.did == method and doing.turn >= turn]
    others = [doing for doing in group if doing.method != method and doing not in done]
    if not others:
        return _left_alone(late, done)
    odd = max(
        others, key=lambda doing: (doing.method is None, doing.for_s)
    )  # who is idle, before who does something else
    does = f"in {odd.method}" if odd.method else "idle"
    return Diagnosis(
        odd.slot,
        waiting,
        f"it is {does} for {odd.for_s:.0f} s, while {', '.join(waiting)} wait in {method}",
        method or "",
    )


def _left_alone(late: list[Doing], done: list[Doing]) -> Diagnosis | None:
    """The one that is still in a method that its peers have ended."""
    if len(late) != 1 or not done:
        return None
    [odd], peers = late, tuple(doing.slot for doing in done)
    since = min(doing.for_s for doing in done)
    evidence = (
        f"it is in {odd.method} for {odd.for_s:.0f} s, which {', '.join(peers)} ended {since:.0f} s ago or earlier"
    )
    return Diagnosis(odd.slot, peers, evidence, odd.method or "")


def all_in_one_method(doings: Sequence[Doing], *, patience_s: float) -> tuple[Doing, ...]:
    """Return the processes of a role that are all in the same method for too long: those whose stacks are to be
    compared.
    """
    for label in dict.fromkeys(label_of(doing.slot) for doing in doings if doing.slot != TRAINER):
        group = tuple(doing for doing in doings if label_of(doing.slot) == label)
        if group[0].method and all(doing.method == group[0].method and doing.for_s >= patience_s for doing in group):
            return group
    return ()


def compare_stacks(stacks: Mapping[str, str], *, method: str) -> Diagnosis | None:
    """Return who stands elsewhere than the others, by dumps of `faulthandler`; None where all stand in the same place.

    With two, or where all stand in places of their own, it is the one that is not in a collective.
    """
    places = {slot: place(text, method) for slot, text in stacks.items()}
    counts = Counter(places.values())
    if len(counts) < 2:
        return None
    outside = [slot for slot, where in places.items() if not any(word in where for word in COLLECTIVE)]
    alone = [slot for slot, where in places.items() if counts[where] == 1]
    candidates = outside if len(outside) == 1 else alone
    if len(candidates) != 1:
        return None
    culprit = candidates[0]
    waiting = tuple(slot for slot in places if slot != culprit)
    common = Counter(places[slot] for slot in waiting).most_common(1)[0][0]
    return Diagnosis(culprit, waiting, f"it stands at {places[culprit]}, while {', '.join(waiting)} stand at {common}")


def place(dump: str, method: str) -> str:
    """Return the innermost line of the thread that runs `role.method`: `file:line in function`."""
    threads = [block.splitlines() for block in dump.split("\n\n")]
    running = [lines for lines in threads if any(f" in {method.rpartition('.')[2]}" in line for line in lines)]
    lines = [line.strip() for line in (running or threads)[0] if line.strip().startswith("File ")]
    if not lines:
        return "an unknown place"
    _, path, rest = lines[0].split('"', 2)
    return f"{path}:{rest.replace(', line ', '').strip()}"
