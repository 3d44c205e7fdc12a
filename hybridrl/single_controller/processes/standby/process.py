"""The standby process of a node: it has imported what workers import, and forks to become one.

`StandbyActor` (`standbys.py`) runs this module as a program of its own.

    python -m hybridrl.single_controller.processes.standby.process LISTENER_FD PARENT_PID

From standard input it reads JSON: {"modules": names of what to import, "path": `sys.path` of a worker}.

It prints one line: JSON {"imported": number of modules} or {"refused": reason}. Then it serves the requests of
`request.py`: each is the command of one Ray worker with its environment. A fork runs that command and needs none of its
imports. The standby process itself connects to nothing, and starts no thread and no GPU context, since a fork inherits
neither. It ends with its parent (PR_SET_PDEATHSIG); the workers stay.
"""

import contextlib
import gc
import importlib
import json
import os
import runpy
import signal
import socket
import sys
import threading
from typing import Any, NoReturn

from hybridrl.single_controller.processes.standby.request import LENGTH_BYTES, START, STARTED, is_same_user
from hybridrl.system.child_guard import PR_SET_PDEATHSIG, prctl

REQUEST_TIMEOUT_S = 2.0  # for one request to arrive in full
DEVICES = ("/dev/nvidia", "/dev/kfd", "/dev/davinci")  # devices of which a fork cannot use what its parent opened


def main() -> None:
    """Import, report, and serve; in a fork, return after the worker's command has ended."""
    listener, parent = socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2])
    end_with(parent)
    wanted = json.load(sys.stdin)
    sys.path[:] = wanted["path"]
    imported = import_all(wanted["modules"])
    reason = why_not_forkable()
    sys.stdout.write(json.dumps({"refused": reason} if reason else {"imported": imported}) + "\n")
    sys.stdout.flush()
    if reason:
        return
    gc.collect()
    gc.freeze()  # the collector of a fork does not write to these pages, so they stay shared
    command = serve(listener)
    sys.argv[:] = command
    runpy.run_path(command[0], run_name="__main__")


def end_with(parent: int) -> None:
    """Have the kernel kill this process when its parent ends, also while it is stopped."""
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before the kernel knew
        os._exit(1)


def import_all(modules: list[str]) -> int:
    """Import the modules that can be imported here; return their number."""
    imported = 0
    for name in modules:
        with contextlib.suppress(Exception):  # a worker imports it again, and raises the error with its address
            importlib.import_module(name)
            imported += 1
    return imported


def why_not_forkable() -> str:
    """Return why a fork of this process would not work as a new process does; "" if it would."""
    threads = [thread.name for thread in threading.enumerate() if thread is not threading.main_thread()]
    if threads:
        return f"an import started the threads {', '.join(threads)}"
    opened = {target for target in map(_target, os.listdir("/proc/self/fd")) if target.startswith(DEVICES)}
    return f"an import opened {', '.join(sorted(opened))}" if opened else ""


def _target(descriptor: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{descriptor}")
    except OSError:
        return ""


def serve(listener: socket.socket) -> list[str]:
    """Fork for each request; return in the forks, with the command to run."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # ended workers leave no zombies
    while True:
        connection, _ = listener.accept()
        with connection, contextlib.suppress(OSError, ValueError):
            if not is_same_user(connection):
                continue
            connection.settimeout(REQUEST_TIMEOUT_S)
            request, descriptors = receive(connection)
            try:
                if os.fork() == 0:
                    listener.close()
                    become(request, descriptors, connection)
                    return list(request["command"])
            finally:
                for descriptor in descriptors:
                    os.close(descriptor)


def receive(connection: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Return a request and the descriptors of its standard streams."""
    data, descriptors, _, _ = socket.recv_fds(connection, 65536, 3)
    while len(data) < LENGTH_BYTES or len(data) < LENGTH_BYTES + int.from_bytes(data[:LENGTH_BYTES], "big"):
        more = connection.recv(65536)
        if not more:
            raise ValueError("the request ended early")
        data += more
    return json.loads(data[LENGTH_BYTES:]), descriptors


def become(request: dict[str, Any], descriptors: list[int], connection: socket.socket) -> None:
    """Give this fork the environment, directory and streams of the request; exit if nobody waits for it any more."""
    try:
        connection.sendall(STARTED)
        if connection.recv(len(START)) != START:
            _exit()
        os.setpgid(0, 0)
        for number, descriptor in enumerate(descriptors):
            os.dup2(descriptor, number)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.environ.clear()
        os.environ.update(request["environment"])
        os.chdir(request["directory"])
        if "numpy.random" in sys.modules:
            sys.modules["numpy.random"].seed()  # every fork would draw the same numbers
    except BaseException:
        _exit()


def _exit() -> NoReturn:
    os._exit(1)


if __name__ == "__main__":
    main()
