"""Harm that needs root's rights: disk, network, clock, memory cgroup and connections of one run.

A run in namespaces of its own (`stage.enter_command`) has a disk that is a loop device, so that the kernel can slow
down this disk alone (cgroup v1, `blkio.throttle`). Its clock is set by libfaketime, for the processes of this run
alone: all clocks but the monotonic ones. A memory cgroup of its own lets the kernel kill a chosen process.
"""

import os
import re
import shutil
import subprocess
from collections.abc import Callable
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

from tests.support.chaos.machines import can_simulate

DISK_BYTES = 400 * 1024**2  # of the run's directory
SLOW_BYTES_PER_S = 30_000  # of a slow disk: a checkpoint of the tiny model takes minutes
THROTTLE = Path("/sys/fs/cgroup/blkio/blkio.throttle.write_bps_device")
MEMORY = Path("/sys/fs/cgroup/memory")
OOM_BYTES = 1024**2  # that a process may still allocate
TIMEOUT_S = 20
ADDRESS = re.compile(r"\S+:(\d+)\s+\S+:(\d+)\s")  # of one end, then of the other


def possible_harms(*, apart: bool) -> list[str]:
    """Return those of `plan.PRIVILEGED` that this machine can do.

    Args:
        apart: Whether runs have namespaces of their own.
    """
    if not apart:
        return []
    needs = {
        "full disk": True,
        "network": True,
        "slow disk": has_loop_disk() and os.access(THROTTLE, os.W_OK),
        "clock": faketime_library() is not None,
        "oom": os.access(MEMORY / "memory.limit_in_bytes", os.F_OK) and os.access(MEMORY, os.W_OK),
        "reset": shutil.which("ss") is not None,
        "link": can_simulate(),
        "machine": can_simulate(),
    }
    return [how for how, is_met in needs.items() if is_met]


def has_loop_disk() -> bool:
    return os.path.exists("/dev/loop-control") and shutil.which("mkfs.ext4") is not None


def faketime_library() -> str | None:
    """Return libfaketime's path: of the package `libfaketime`, which the tests do not need otherwise."""
    if (found := find_spec("libfaketime")) is None or found.origin is None:
        return None
    library = Path(found.origin).parent / "vendor/libfaketime/src/libfaketime.so.1"
    return str(library) if library.exists() else None


def clock_environment(folder: Path) -> dict[str, str]:
    """Return the variables of a run whose clock can be set by `set_clock`."""
    set_clock(folder, 0.0)
    return {
        "LD_PRELOAD": faketime_library() or "",
        "FAKETIME_TIMESTAMP_FILE": str(folder / "clock"),
        "FAKETIME_CACHE_DURATION": "1",  # seconds until a process notices
        "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        "FAKETIME_DONT_RESET": "1",
        "FAKETIME_DISABLE_SHM": "1",
        "NO_FAKE_STAT": "1",
    }


def set_clock(folder: Path, offset_s: float) -> None:
    aside = folder / "clock.new"
    aside.write_text(f"{offset_s:+.0f}\n")
    aside.replace(folder / "clock")


def mount_disk(disk: Path) -> None:
    """Mount a small file system: a loop device, else memory. It ends with this mount namespace."""
    if not has_loop_disk():
        words = ["-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs"]
        subprocess.run(["mount", *words, str(disk)], check=True, timeout=TIMEOUT_S)
        return
    image = disk.with_suffix(".image")
    with open(image, "wb") as file:
        file.truncate(DISK_BYTES)
    subprocess.run(["mkfs.ext4", "-q", "-m", "0", "-F", str(image)], check=True, timeout=TIMEOUT_S)
    subprocess.run(["mount", "-o", "loop", str(image), str(disk)], check=True, timeout=TIMEOUT_S)
    image.unlink()  # the device keeps it
    shutil.rmtree(disk / "lost+found")
    if os.access(THROTTLE, os.W_OK):
        _limit_writes(disk, 0)  # an earlier drill may have been killed before it lifted its limit


def slow_down_disk(disk: Path) -> Callable[[], None]:
    """Let the disk write `SLOW_BYTES_PER_S`; return what ends this."""
    _limit_writes(disk, SLOW_BYTES_PER_S)
    return lambda: _limit_writes(disk, 0)


def _limit_writes(disk: Path, bytes_per_s: int) -> None:
    device = os.stat(disk).st_dev
    THROTTLE.write_text(f"{os.major(device)}:{os.minor(device)} {bytes_per_s}\n")


def fill_disk(disk: Path) -> Callable[[], None]:
    """Leave no byte on the disk; return what ends this."""
    ballast = disk / "ballast"
    with suppress(OSError), open(ballast, "wb") as file:
        while True:
            file.write(bytes(1024**2))
            file.flush()
    return lambda: ballast.unlink(missing_ok=True)


def cut_network() -> Callable[[], None]:
    """Cut all connections of this network namespace; return what ends this."""
    change_loopback("down")
    return lambda: change_loopback("up")


def change_loopback(state: str) -> None:
    subprocess.run(["ip", "link", "set", "lo", state], check=True, timeout=TIMEOUT_S)


def starve(pid: int) -> None:
    """Let the kernel kill this process when it needs more memory."""
    group = MEMORY / f"drill-{os.stat('/proc/self/ns/pid').st_ino}-{pid}"
    group.mkdir(exist_ok=True)
    (group / "memory.limit_in_bytes").write_text(f"{OOM_BYTES}\n")
    with suppress(ProcessLookupError):
        (group / "cgroup.procs").write_text(f"{pid}\n")


def remove_memory_groups() -> None:
    """Remove what `starve` made; all of the run's processes have ended."""
    for group in MEMORY.glob(f"drill-{os.stat('/proc/self/ns/pid').st_ino}-*"):
        with suppress(OSError):
            group.rmdir()


def reset_connections(pid: int) -> int:
    """Abort the established TCP connections of this process; return their number."""
    own_network = ["nsenter", f"--net=/proc/{pid}/ns/net"]
    listing = [*own_network, "ss", "--no-header", "--numeric", "--tcp", "--processes", "state", "established"]
    rows = subprocess.run(listing, capture_output=True, text=True, check=True, timeout=TIMEOUT_S).stdout.splitlines()
    found = [ends.groups() for row in rows if f"pid={pid}," in row and (ends := ADDRESS.search(row))]
    for source, destination in found:
        connection = f"( sport = :{source} and dport = :{destination} )"
        abort = [*own_network, "ss", "--kill", "--tcp", "state", "established", connection]
        subprocess.run(abort, capture_output=True, timeout=TIMEOUT_S)
    return len(found)
