"""Whether two processes are on one machine, whatever its host name is."""

import os
import socket


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
