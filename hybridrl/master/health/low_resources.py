"""`Shortages`: a machine whose memory or disk is about to be full is told about while there is something left, and not
again until it had been well in between. Heartbeats say how much is left; who holds how much of the memory, and how it
grew, is told with it.
"""

import os
from collections.abc import Collection, Iterable, Mapping

from hybridrl.master.health.process_record import Presence
from hybridrl.master.state.events import Noticed
from hybridrl.single_controller.monitoring.capacity import Room, disk_room
from hybridrl.single_controller.monitoring.heartbeat_client import MEMORY, RAY_DISK, SHARED_MEMORY

RUN_DISK = "the disk of the run's directory"
# Ray ends processes when 5% of the memory are left, and takes no new objects when 5% of its disk are; this is told
# before. A checkpoint needs some gigabytes, however large the disk is.
LOW = {MEMORY: 0.08, RAY_DISK: 0.08, SHARED_MEMORY: 0.05, RUN_DISK: 0.05}
LOW_BYTES = {RUN_DISK: 20 * 2**30}  # less is low only if it is also less than this
WELL_AGAIN = 1.5  # times the room below which it was low
FATTEST = 3  # processes that are named
WHAT_TO_CHANGE = {
    MEMORY: "Ray ends processes when 5% are left, the kernel soon after. Smaller micro-batches "
    "(*.ppo_micro_batch_size_per_gpu, "
    "*.ppo_max_token_len_per_gpu), no *.param_offload and *.optimizer_offload, trainer.snapshot_freq=0, "
    "or fewer processes on a machine "
    "need less",
    SHARED_MEMORY: "Ray's objects and snapshots of models lie there; a container gets more with --shm-size, and "
    "trainer.snapshot_freq=0 "
    "needs less",
    RAY_DISK: "Ray takes no new objects when 5% are left. Delete what is not needed, or start Ray with --temp-dir "
    "on a larger disk",
    RUN_DISK: "the next checkpoint may not fit. Delete what is not needed, or keep fewer: trainer.max_ckpt_to_keep",
}


class Shortages:
    """run_directory: of the run, on this machine; whatever is no directory of it is not watched."""

    def __init__(self, run_directory: str = "") -> None:
        self._run_directory = run_directory
        self._low: set[tuple[str, str]] = set()  # (machine, what)

    def look(self, presences: Iterable["Presence"]) -> list[Noticed]:
        """Return what is low now and was not when it was last looked at."""
        machines: dict[str, list[Presence]] = {}
        for presence in presences:
            machines.setdefault(presence.machine, []).append(presence)
        notices = []
        for machine, there in machines.items():
            for what, room in _least(there).items():
                if self._is_news(machine, what, room):
                    notices.append(
                        Noticed(f"machine {there[0].host}", _in_words(what, room, there if what == MEMORY else ()))
                    )
        room = disk_room(self._run_directory) if os.path.isdir(self._run_directory) else None
        if room is not None and self._is_news("", RUN_DISK, room):
            notices.append(Noticed(self._run_directory, _in_words(RUN_DISK, room, ())))
        return notices

    def _is_news(self, machine: str, what: str, room: Room) -> bool:
        low = min(LOW[what] * room.total, LOW_BYTES.get(what, room.total))
        if room.left > WELL_AGAIN * low:
            self._low.discard((machine, what))
        if room.left >= low or (machine, what) in self._low:
            return False
        self._low.add((machine, what))
        return True


def _least(there: Iterable["Presence"]) -> dict[str, Room]:
    """What is left on a machine, by what; of several processes' words the one with the least."""
    found: dict[str, Room] = {}
    for presence in there:
        said: Mapping[str, list[int]] = presence.beat.get("room", {})
        for what, room in said.items():
            found[what] = min(found.get(what, Room(*room)), Room(*room))
    return found


def memory_in_words(presence: "Presence") -> str:
    """Return how little memory its machine had when a process was last heard, for an account of its end; "" where there
    was enough.
    """
    room = _least([presence]).get(MEMORY)
    if room is None or room.left >= LOW[MEMORY] * room.total:
        return ""
    return (
        f"; its machine had {_gib(room.left)} of {_gib(room.total)} of memory left, and Ray ends processes "
        "when it is 5%"
    )


def _in_words(what: str, room: Room, there: Collection["Presence"]) -> str:
    text = f"{what} is nearly full: {_gib(room.left)} of {_gib(room.total)} are left"
    if there:
        fattest = sorted(there, key=lambda presence: -presence.private)[:FATTEST]
        text += "".join(
            f"; {one.slot} holds {_gib(one.private)} ({_gib(one.growth, '+')} in {one.grown_in_s:.0f} s)"
            for one in fattest
        )
        text += (
            f"; the {len(there)} processes of the job hold together {_gib(sum(presence.private for presence in there))}"
        )
    return f"{text}. {WHAT_TO_CHANGE[what]}"


def _gib(count: float, sign: str = "") -> str:
    return f"{count / 2**30:{sign}.2f} GiB"
