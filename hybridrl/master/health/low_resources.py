"""`LowResourceDetector`: warns about a machine whose memory or disk is nearly full.

It warns before Ray or the kernel act.

The free capacity comes from heartbeats. A warning about memory also names the processes that hold most of it, and how
they grew. Each shortage is reported once, and again only if it was resolved in between.
"""

import os
from collections.abc import Collection, Iterable, Mapping

from hybridrl.master.health.process_record import ProcessRecord
from hybridrl.master.state.events import WarningRaised
from hybridrl.single_controller.monitoring.capacity import Capacity, disk_capacity
from hybridrl.single_controller.monitoring.heartbeat_client import MEMORY, RAY_DISK, SHARED_MEMORY

RUN_DISK = "the disk of the run's directory"
# Ray kills processes when 5% of the memory are left, and stores no new objects when 5% of its disk are left. The
# warning has to come earlier. A checkpoint needs some gigabytes, however large the disk is.
LOW = {MEMORY: 0.08, RAY_DISK: 0.08, SHARED_MEMORY: 0.05, RUN_DISK: 0.05}
LOW_BYTES = {RUN_DISK: 20 * 2**30}  # low only if less than this is left, too
RECOVERED_FACTOR = 1.5  # a shortage is resolved when this many times its threshold are free
NUM_LARGEST = 3  # processes that a warning names
REMEDIES = {
    MEMORY: "Ray kills processes when 5% are left, the kernel soon after. Use smaller micro-batches "
    "(*.ppo_micro_batch_size_per_gpu, *.ppo_max_token_len_per_gpu), no *.param_offload and *.optimizer_offload, "
    "trainer.snapshot_freq=0, or fewer processes per machine",
    SHARED_MEMORY: "Ray's objects and model snapshots are stored there. Give a container more with --shm-size, or set "
    "trainer.snapshot_freq=0",
    RAY_DISK: "Ray stores no new objects when 5% are left. Delete unneeded files, or start Ray with --temp-dir "
    "on a larger disk",
    RUN_DISK: "the next checkpoint may not fit. Delete unneeded files, or keep fewer checkpoints: "
    "trainer.max_ckpt_to_keep",
}


class LowResourceDetector:
    """Detects low memory and disk space. run_directory: on this machine; not monitored if it is no local directory."""

    def __init__(self, run_directory: str = "") -> None:
        self._run_directory = run_directory
        self._low: set[tuple[str, str]] = set()  # (machine, resource)

    def check(self, processes: Iterable["ProcessRecord"]) -> list[WarningRaised]:
        """Return warnings about resources that became low since the last check."""
        machines: dict[str, list[ProcessRecord]] = {}
        for process in processes:
            machines.setdefault(process.machine, []).append(process)
        warnings = []
        for machine, local in machines.items():
            for resource, capacity in _lowest_capacities(local).items():
                if self._is_new(machine, resource, capacity):
                    text = _warning_text(resource, capacity, local if resource == MEMORY else ())
                    warnings.append(WarningRaised(f"machine {local[0].host}", text))
        disk = disk_capacity(self._run_directory) if os.path.isdir(self._run_directory) else None
        if disk is not None and self._is_new("", RUN_DISK, disk):
            warnings.append(WarningRaised(self._run_directory, _warning_text(RUN_DISK, disk, ())))
        return warnings

    def _is_new(self, machine: str, resource: str, capacity: Capacity) -> bool:
        low = min(LOW[resource] * capacity.total, LOW_BYTES.get(resource, capacity.total))
        if capacity.left > RECOVERED_FACTOR * low:
            self._low.discard((machine, resource))
        if capacity.left >= low or (machine, resource) in self._low:
            return False
        self._low.add((machine, resource))
        return True


def _lowest_capacities(processes: Iterable["ProcessRecord"]) -> dict[str, Capacity]:
    """Return resource -> the lowest free capacity that these processes of one machine reported."""
    lowest: dict[str, Capacity] = {}
    for process in processes:
        reported: Mapping[str, list[int]] = process.beat.get("capacity", {})
        for resource, capacity in reported.items():
            lowest[resource] = min(lowest.get(resource, Capacity(*capacity)), Capacity(*capacity))
    return lowest


def low_memory_note(process: "ProcessRecord") -> str:
    """Return the suffix of an exit reason if the process's machine was low on memory, else ""."""
    capacity = _lowest_capacities([process]).get(MEMORY)
    if capacity is None or capacity.left >= LOW[MEMORY] * capacity.total:
        return ""
    return (
        f"; its machine had {_gib(capacity.left)} of {_gib(capacity.total)} of memory left, and Ray kills processes "
        "when 5% are left"
    )


def _warning_text(resource: str, capacity: Capacity, processes: Collection["ProcessRecord"]) -> str:
    text = f"{resource} is nearly full: {_gib(capacity.left)} of {_gib(capacity.total)} are left"
    if processes:
        largest = sorted(processes, key=lambda process: -process.private)[:NUM_LARGEST]
        text += "".join(
            f"; {one.slot} holds {_gib(one.private)} ({_gib(one.growth, '+')} in {one.growth_window_s:.0f} s)"
            for one in largest
        )
        total = _gib(sum(process.private for process in processes))
        text += f"; the {len(processes)} processes of the job hold together {total}"
    return f"{text}. {REMEDIES[resource]}"


def _gib(count: float, sign: str = "") -> str:
    return f"{count / 2**30:{sign}.2f} GiB"
