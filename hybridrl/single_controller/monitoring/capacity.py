"""Free memory and disk space of this machine, or of its container where a limit leaves less.

    MemoryProbe().read()         # Capacity(left=19.2e9, total=23.4e9)
    disk_capacity("/dev/shm")    # Capacity(left=..., total=...), or None where there is no such directory

A read takes about ten microseconds; every heartbeat contains one.
"""

import os
from collections.abc import Iterator
from typing import NamedTuple


class Capacity(NamedTuple):
    """Bytes. left: what can still be allocated or written without ending a process or deleting a file."""

    left: int
    total: int


class CgroupLimit(NamedTuple):
    """Files of a control group, for its limit and its usage.

    The counters of `memory.stat` are those that the kernel can reclaim.
    """

    limit: str
    used: str
    reclaimable: tuple[str, ...]


NO_LIMIT = 2**63
VERSION_1 = CgroupLimit("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_inactive_file", "total_active_file"))
VERSION_2 = CgroupLimit("memory.max", "memory.current", ("inactive_file", "active_file", "slab_reclaimable"))


class MemoryProbe:
    """Reads free memory. The control groups with a limit are determined once, at construction.

    Args:
        proc: where /proc is mounted.
        groups: where the control groups are mounted.
    """

    def __init__(self, proc: str = "/proc", groups: str = "/sys/fs/cgroup") -> None:
        self._meminfo = os.path.join(proc, "meminfo")
        total = self._read_machine().total
        self._limited = [
            (level, files) for level, files in _cgroup_levels(proc, groups) if _read_limit(level, files) < total
        ]

    def read(self) -> Capacity:
        """Return the capacity of the machine, or of the control group with the least left."""
        return min([self._read_machine(), *(_read_cgroup(level, files) for level, files in self._limited)])

    def _read_machine(self) -> Capacity:
        with open(self._meminfo, encoding="ascii") as f:
            kilobytes = {name: int(rest.split()[0]) for name, _, rest in (line.partition(":") for line in f)}
        return Capacity(kilobytes["MemAvailable"] * 1024, kilobytes["MemTotal"] * 1024)


def disk_capacity(path: str) -> Capacity | None:
    """Return what a user other than root may still write to a file system.

    None where there is no such path.
    """
    try:
        found = os.statvfs(path)
    except OSError:
        return None
    return Capacity(found.f_bavail * found.f_frsize, found.f_blocks * found.f_frsize)


def _cgroup_levels(proc: str, groups: str) -> Iterator[tuple[str, CgroupLimit]]:
    """Yield this process's memory control group and its ancestors.

    A container may see its own group as the root of the hierarchy.
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


def _read_limit(level: str, files: CgroupLimit) -> int:
    with open(os.path.join(level, files.limit), encoding="ascii") as f:
        text = f.read().strip()
    return NO_LIMIT if text == "max" else int(text)


def _read_cgroup(level: str, files: CgroupLimit) -> Capacity:
    limit = _read_limit(level, files)
    with open(os.path.join(level, files.used), encoding="ascii") as f:
        used = int(f.read())
    with open(os.path.join(level, "memory.stat"), encoding="ascii") as f:
        counts = dict(line.split() for line in f)
    return Capacity(max(0, limit - used + sum(int(counts.get(name, 0)) for name in files.reclaimable)), limit)
