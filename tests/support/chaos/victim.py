"""Receive faults in every worker of a chaos run, and apply them to the own process inside the chosen call.

    actor_rollout_ref.model.external_lib=[tests/support/chaos/victim.py]

Listens on a socket named after the process id; `faults.py` in the driver sends. A message is JSON: kind, method,
after_s, log, and further fields for the log.
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
from collections.abc import Generator
from contextlib import contextmanager, suppress
from types import FrameType

from hybridrl.single_controller.monitoring.tracing import call_span
from hybridrl.single_controller.processes import worker_host
from hybridrl.single_controller.processes.worker_host import WorkerHost

POLL_PERIOD_S = 0.0002
HANG_S = 3600.0
WORKERS = f"{os.sep}workers{os.sep}"  # in the file name of a worker's own code
CALL_CODE = WorkerHost.call.__code__


class Held:
    """A call that must not end before its fault: the shortest ones take a millisecond."""

    def __init__(self) -> None:
        self.started = threading.Event()
        self.may_end = threading.Event()  # set by a fault that the process survives


HELD: dict[str, Held] = {}  # method with a fault -> its next call


def address(process_id: int) -> str:
    return f"\0hybridrl-victim-{process_id}"


def listen() -> None:
    inbox = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    inbox.bind(address(os.getpid()))
    while True:
        content, sender = inbox.recvfrom(65536)
        fault, held = json.loads(content), None
        if fault["method"] and fault["kind"] in (*PROCESS_ENDS, "cut"):
            held = HELD[fault["method"]] = Held()
        answered = threading.Event()
        threading.Thread(target=apply, args=(fault, held, answered), daemon=True).start()
        inbox.sendto(b"planted", sender)
        answered.set()


def apply(fault: dict, held: Held | None = None, answered: threading.Event | None = None) -> None:
    """Wait until the process is in the chosen call, log the fault, and apply it; not before who sent it knows."""
    method, kind = fault["method"], KINDS[fault["kind"]]
    if held is not None:
        held.started.wait()
    sys.setswitchinterval(POLL_PERIOD_S)  # otherwise this thread would sleep until that call is over
    while method is not None and calls_in_progress() != ([method] if method else []):
        time.sleep(POLL_PERIOD_S)
    time.sleep(fault["after_s"])
    with open(fault["log"], "a") as log:
        log.write(
            json.dumps(fault | {"what": "hit", "pid": os.getpid(), "doing": calls_in_progress(), "at": time.time()})
            + "\n"
        )
    if answered is not None:
        answered.wait()
    kind()
    if held is not None and fault["kind"] not in PROCESS_ENDS:
        held.may_end.set()


@contextmanager
def hold_until_hit(role: str, rank: int, method: str) -> Generator[None, None, None]:
    """Keep a call of a chosen method from ending before its fault."""
    held = HELD.get(method)
    if held is not None:
        held.started.set()
    with call_span(role, rank, method):
        yield
    if held is not None:
        held.may_end.wait(HANG_S)


def calls_in_progress() -> list[str]:
    return [call.f_locals["method"] for call, _ in _calls().values()]


def _calls() -> dict[int, tuple[FrameType, FrameType]]:
    """Return thread -> (frame of its `WorkerHost.call`, innermost frame), for threads in such a call."""
    found = {}
    for thread, innermost in sys._current_frames().items():
        frame: FrameType | None = innermost
        while frame is not None and frame.f_code is not CALL_CODE:
            frame = frame.f_back
        if frame is not None and "method" in frame.f_locals:
            found[thread] = (frame, innermost)
    return found


class PlantedMistake(RuntimeError):
    """A mistake in user code."""

    def __init__(self, text: str = "planted: a mistake in user code"):
        super().__init__(text)


class PlantedHang(BaseException):
    """Raised in a thread to block it in a line of Python; the other threads of its process run on."""

    def __init__(self) -> None:
        super().__init__("planted: a hang")
        time.sleep(HANG_S)


def raise_in_call(error: type[BaseException]) -> None:
    """Raise in the thread that runs a worker's method, at its current line."""
    while True:
        for thread, (_, frame) in _calls().items():
            while frame.f_code is not CALL_CODE:
                if WORKERS in frame.f_code.co_filename:
                    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(error))
                    return
                frame = frame.f_back
        time.sleep(POLL_PERIOD_S)


def run_out_of_memory() -> None:
    """Allocate past a limit in C++: `operator new` throws an exception that no library catches."""
    with open("/proc/self/statm", encoding="ascii") as file:
        has = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (has, has))
    allocate = ctypes.CDLL("libstdc++.so.6")._Znwm
    allocate.argtypes, allocate.restype = [ctypes.c_size_t], ctypes.c_void_p
    while True:
        allocate(64 * 1024**2)


def cut_connections() -> None:
    """End the connections of this process's collective groups; both ends notice.

    They are those of gloo, and the one for heartbeats: the connections of Ray and of torch's store are of IPv6.
    """
    num_cut = 0
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError), socket.socket(fileno=os.dup(int(name))) as end:
            listens = end.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)  # without it, gloo ends the process
            if end.family == socket.AF_INET and end.type == socket.SOCK_STREAM and not listens:
                end.shutdown(socket.SHUT_RDWR)  # an error for a socket that is not connected
                num_cut += 1
    assert num_cut, "this process has no connection of a collective group"


PROCESS_ENDS = ("kill", "freeze", "exit", "memory")
KINDS = {
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "freeze": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "exit": lambda: os._exit(7),
    "memory": run_out_of_memory,
    "exception": lambda: raise_in_call(PlantedMistake),
    "hang": lambda: raise_in_call(PlantedHang),
    "cut": cut_connections,
}


def is_worker() -> bool:
    """Return whether this is a Ray worker.

    The program imports this file, too, and is forked afterwards: it must not start threads.
    """
    ray = sys.modules.get("ray")
    return ray is not None and ray.is_initialized() and ray.get_runtime_context().get_actor_id() is not None


if is_worker():
    worker_host.call_span = hold_until_hit
    threading.Thread(target=listen, name="victim", daemon=True).start()
