"""Start a Ray worker from a standby process; if that does not answer, start it as Ray would.

Ray runs this file in place of Python (`py_executable` of a runtime environment). It imports the standard library.

    python -I -S request.py ADDRESS PYTHON WORKER_SCRIPT ARGUMENTS...

This process ends when the worker has been forked from the standby process that listens at ADDRESS. Otherwise it becomes
`PYTHON WORKER_SCRIPT ARGUMENTS...`.
"""

import json
import os
import socket
import struct
import sys

TIMEOUT_S = 1.0  # a fork takes some milliseconds; a frozen standby process does not answer
START, STARTED = b"start", b"started"
LENGTH_BYTES = 8


def main() -> None:
    """Have the worker started by either way."""
    address, python, *command = sys.argv[1:]
    if not is_started(address, command):
        os.execv(python, [python, *command])


def is_started(address: str, command: list[str]) -> bool:
    """Request a fork that runs the command; return whether it does."""
    request = {"command": command, "environment": dict(os.environ), "directory": os.getcwd()}
    content = json.dumps(request).encode()
    try:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(TIMEOUT_S)
            connection.connect(abstract(address))
            if not is_same_user(connection):
                return False
            socket.send_fds(connection, [len(content).to_bytes(LENGTH_BYTES, "big")], [0, 1, 2])
            connection.sendall(content)
            if connection.recv(len(STARTED)) != STARTED:
                return False
            connection.sendall(START)  # a fork that does not get this runs nothing
            return True
    except OSError:
        return False


def abstract(address: str) -> str:
    """Return the name of a Unix socket that has no file, and that the kernel removes with its last process."""
    return f"\0{address}"


def is_same_user(connection: socket.socket) -> bool:
    """Return whether the other end is a process of this user; a socket without a file admits every user."""
    size = struct.calcsize("3i")
    _, user, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
    return bool(user == os.getuid())


if __name__ == "__main__":
    main()
