"""In every worker of a run with faults: waits to be told what is to happen to it, and does that to itself in the very
call that is meant.

    actor_rollout_ref.model.external_lib=[tests/support/chaos/victim.py]

It listens on a socket named after its process id; `faults.py` in the driver tells it. An order is JSON: kind, method,
after_s, log, and what else is to be noted with it.
"""

import ctypes
import json
import os
import resource
import signal
import socket
import sys
import threading
import time
from types import FrameType

from hybridrl.single_controller.processes.worker_host import WorkerHost

LOOK_EVERY_S = 0.0002  # the shortest calls take a millisecond
HANG_S = 3600.0
WORKERS = f"{os.sep}workers{os.sep}"  # a frame of a worker's own method, and not of what called it
WATCHED = WorkerHost.call.__code__


def address(process_id: int) -> str:
    return f"\0hybridrl-victim-{process_id}"


def listen() -> None:
    inbox = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    inbox.bind(address(os.getpid()))
    while True:
        order = json.loads(inbox.recv(65536))
        threading.Thread(target=carry_out, args=(order,), daemon=True).start()


def carry_out(order: dict) -> None:
    """Wait for the moment, note it, and do it."""
    method, kind = order["method"], KINDS[order["kind"]]
    sys.setswitchinterval(LOOK_EVERY_S)  # or this thread sleeps until that call is over
    while method is not None and calls_in_progress() != ([method] if method else []):
        time.sleep(LOOK_EVERY_S)
    time.sleep(order["after_s"])
    with open(order["log"], "a") as log:
        log.write(
            json.dumps(order | {"what": "hit", "pid": os.getpid(), "doing": calls_in_progress(), "at": time.time()})
            + "\n"
        )
    kind()


def calls_in_progress() -> list[str]:
    return [call.f_locals["method"] for call, _ in _calls().values()]


def _calls() -> dict[int, tuple[FrameType, FrameType]]:
    """Thread -> the frame of its call of a worker's method, and its innermost one, of threads that are
    in such a call.
    """
    found = {}
    for thread, innermost in sys._current_frames().items():
        frame: FrameType | None = innermost
        while frame is not None and frame.f_code is not WATCHED:
            frame = frame.f_back
        if frame is not None and "method" in frame.f_locals:
            found[thread] = (frame, innermost)
    return found


class PlantedMistake(RuntimeError):
    """A mistake in somebody's code."""

    def __init__(self, text: str = "planted: somebody's code made a mistake"):
        super().__init__(text)


class PlantedHang(BaseException):
    """Whatever raises it does not go on: it waits in a line of Python, and the other threads of its process work."""

    def __init__(self) -> None:
        super().__init__("planted: a hang")
        time.sleep(HANG_S)


def raise_in_call(error: type[BaseException]) -> None:
    """Have the thread that runs a worker's method raise, as if the line that it is in did."""
    while True:
        for thread, (_, frame) in _calls().items():
            while frame.f_code is not WATCHED:
                if WORKERS in frame.f_code.co_filename:
                    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(error))
                    return
                frame = frame.f_back
        time.sleep(LOOK_EVERY_S)


def run_out_of_memory() -> None:
    """Allocate past a limit where C++ does: `operator new` throws what nobody catches, as under any library of the
    process.
    """
    with open("/proc/self/statm", encoding="ascii") as file:
        has = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (has, has))
    allocate = ctypes.CDLL("libstdc++.so.6")._Znwm
    allocate.argtypes, allocate.restype = [ctypes.c_size_t], ctypes.c_void_p
    while True:
        allocate(64 * 1024**2)


KINDS = {
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "freeze": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "exit": lambda: os._exit(7),
    "memory": run_out_of_memory,
    "exception": lambda: raise_in_call(PlantedMistake),
    "hang": lambda: raise_in_call(PlantedHang),
}


def is_worker() -> bool:
    """Whether this is a process of Ray's.

    The program imports this file, too, and is forked after that: it may have no threads.
    """
    ray = sys.modules.get("ray")
    return ray is not None and ray.is_initialized() and ray.get_runtime_context().get_actor_id() is not None


if is_worker():
    threading.Thread(target=listen, name="victim", daemon=True).start()
