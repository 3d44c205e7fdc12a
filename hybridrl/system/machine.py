"""Identity of a machine, whatever its host name is, and its memory."""

import os
import socket
from contextlib import suppress
from pathlib import Path

CGROUP_MEMORY = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")  # of a container

CPU_INFO = Path("/proc/cpuinfo")
BFLOAT16_FLAGS = ("amx_bf16", "avx512_bf16")


def boot_id() -> str:
    """Return the id of the running kernel, "" where there is none (not Linux)."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as f:
            return f.read().strip()
    except FileNotFoundError:
        return ""


def machine_id() -> str:
    """Return an id that is equal for two processes if they can see each other's process ids.

    It consists of the kernel's boot id and the namespace of process ids.
    """
    return f"{boot_id()} {os.readlink('/proc/self/ns/pid')}"


def shared_memory_id() -> str:
    """Return a name that two processes have in common only if they can share memory.

    It contains host name, boot id and the device of /dev/shm. Containers on different machines may have the same host
    name, and those on one machine a /dev/shm each.
    """
    kernel = boot_id()
    return f"{socket.gethostname()} ({kernel[:8]}-{os.stat('/dev/shm').st_dev})" if kernel else socket.gethostname()


def memory_bytes() -> int:
    """Return the memory that this machine, or this container, has."""
    found = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for path in CGROUP_MEMORY:
        with suppress(OSError, ValueError), open(path, encoding="ascii") as file:  # "max": no limit
            found.append(int(file.read()))
    return min(found)


def bfloat16_instructions() -> str:
    """Return the CPU's fastest instructions for products in bfloat16, "" without them or if they are unknown."""
    try:
        flags = CPU_INFO.read_text().split()
    except OSError:
        return ""
    return next((flag for flag in BFLOAT16_FLAGS if flag in flags), "")
