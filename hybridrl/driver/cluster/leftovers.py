"""The program that kills what a killed program leaves of its Ray cluster.

    python -I -S leftovers.py

Ray's agents outlive their cluster by more than a minute. `watch.py` runs this file in a program without a supervisor; a
supervised cluster ends with its holder. Each line of stdin has the process ids of the cluster, instead of those of the
line before. The end of stdin is that of the program. Then all of them are killed.
"""

import os
import signal
import sys
from contextlib import suppress


def main() -> None:
    """Read process ids until the end of stdin, and kill those that were named last."""
    pidfds: dict[int, int] = {}  # a process id may have become that of another program
    for line in sys.stdin:
        named = {int(word) for word in line.split()}
        for pid in pidfds.keys() - named:
            os.close(pidfds.pop(pid))
        for pid in named - pidfds.keys():
            with suppress(OSError, AttributeError):  # it has ended, or this kernel has no such descriptors
                pidfds[pid] = os.pidfd_open(pid)
    for pidfd in pidfds.values():
        with suppress(OSError):
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)


if __name__ == "__main__":
    main()
