"""What is left of this machine's memory and disks. In a container with a limit, what is left of that, where it is less.

    gauge = MemoryGauge()
    gauge.read()                 # Room(left=19.2e9, total=23.4e9)
    disk_room("/dev/shm")        # Room(left=..., total=...), or None where there is no such directory

Reading costs some ten microseconds; heartbeats do it once a second.
"""

import os
from collections.abc import Iterator
from typing import NamedTuple


class Room(NamedTuple):
    """Bytes. left: what can still be had, without ending anything."""

    left: int
    total: int


class Limit(NamedTuple):
    """The files in which a kernel keeps a control group's limit, what it uses, and what of that the kernel can take
    back.
    """

    limit: str
    used: str
    reclaimable: tuple[str, ...]


NO_LIMIT = 2**63
VERSION_1 = Limit("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_inactive_file", "total_active_file"))
VERSION_2 = Limit("memory.max", "memory.current", ("inactive_file", "active_file", "slab_reclaimable"))


class MemoryGauge:
    """Which limits there are is looked up once. proc, groups: where the kernel shows itself and its control groups."""

    def __init__(self, proc: str = "/proc", groups: str = "/sys/fs/cgroup") -> None:
        self._meminfo = os.path.join(proc, "meminfo")
        total = self._machine().total
        self._limited = [(level, files) for level, files in _levels(proc, groups) if _limit(level, files) < total]

    def read(self) -> Room:
        """Return the machine's room, or that of the control group with the least."""
        return (
            min(self._machine(), *(_group(level, files) for level, files in self._limited))
            if self._limited
            else self._machine()
        )

    def _machine(self) -> Room:
        with open(self._meminfo, encoding="ascii") as f:
            kilobytes = {name: int(rest.split()[0]) for name, _, rest in (line.partition(":") for line in f)}
        return Room(kilobytes["MemAvailable"] * 1024, kilobytes["MemTotal"] * 1024)


def disk_room(path: str) -> Room | None:
    """Return what a user other than root may still write to the file system of a path; None where there is no such
    path.
    """
    try:
        found = os.statvfs(path)
    except OSError:
        return None
    return Room(found.f_bavail * found.f_frsize, found.f_blocks * found.f_frsize)


def _levels(proc: str, groups: str) -> Iterator[tuple[str, Limit]]:
    """This process's control group for memory and those that hold it.

    A container may see itself as the root of them all.
    """
    with open(os.path.join(proc, "self", "cgroup"), encoding="utf-8") as f:
        lines = [line.rstrip("\n").split(":", 2) for line in f]
    for _, controllers, path in lines:
        mounts, files = [os.path.join(groups, "unified"), groups], VERSION_2
        if controllers:
            if "memory" not in controllers.split(","):
                continue
            mounts, files = [os.path.join(groups, "memory"), os.path.join(groups, controllers)], VERSION_1
        for mount in mounts:
            names = path.strip("/").split("/") if path.strip("/") else []
            for depth in range(len(names), -1, -1):
                level = os.path.join(mount, *names[:depth])
                if os.path.exists(os.path.join(level, files.limit)):
                    yield level, files


def _limit(level: str, files: Limit) -> int:
    with open(os.path.join(level, files.limit), encoding="ascii") as f:
        text = f.read().strip()
    return NO_LIMIT if text == "max" else int(text)


def _group(level: str, files: Limit) -> Room:
    limit = _limit(level, files)
    with open(os.path.join(level, files.used), encoding="ascii") as f:
        used = int(f.read())
    with open(os.path.join(level, "memory.stat"), encoding="ascii") as f:
        counts = dict(line.split() for line in f)
    return Room(max(0, limit - used + sum(int(counts.get(name, 0)) for name in files.reclaimable)), limit)
