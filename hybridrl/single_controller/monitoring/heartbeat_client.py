"""A thread that tells the job's master once a second that its process lives and what it does. Workers have one, and the
trainer.

    beats = Heartbeats("run/master", {"slot": "actor-0", "name": "run/actor-0"}, progress)
    beats.tell({"event": "Stepped", "step": 3})      # returns at once; told until the master has written it down

They are lines of JSON over one TCP connection, which the kernel closes when the process dies, so a death is known in
milliseconds. An actor's call that waits in the process would tell it too, but a process with such a call no longer ends
when SIGTERM asks it to, and a group of threads for it would move every other call out of the main thread.

A master that is gone is looked for until it is back; nobody waits for it. Knows nothing of what the master does.
"""

import faulthandler
import json
import logging
import os
import select
import socket
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hybridrl.single_controller.cluster import NAMESPACE
from hybridrl.single_controller.monitoring import lost_workers as losses
from hybridrl.single_controller.monitoring.capacity import MemoryGauge, disk_room

logger = logging.getLogger(__name__)
MASTER_VARIABLE = "HYBRIDRL_MASTER"  # environment variable: the master's name
INTERVAL_S = 1.0
LOOK_AGAIN_S = 0.5  # for a master that is gone
CONNECT_TIMEOUT_S = 5.0
KEPT_TELLS = 10_000  # while there is no master
MEMORY, SHARED_MEMORY, RAY_DISK = "memory", "/dev/shm", "Ray's directory"  # whose room a heartbeat tells

_own: "Heartbeats | None" = None  # this process's


class Heartbeats:
    """introduction: told first on every connection. progress: returns what a heartbeat says, called in the thread.

    commands: what the master may ask, by name; called in the thread with the master's word. `stacks` is answered here,
    a `notice` is logged, and calls of a worker that is said to be `lost` end.
    """

    def __init__(
        self,
        master: str,
        introduction: Mapping[str, Any],
        progress: Callable[[], Mapping[str, Any]],
        commands: Mapping[str, Callable[[Any], None]] | None = None,
    ) -> None:
        global _own
        host = {"host": socket.gethostname()}
        self._master, self._introduction, self._progress = master, {**introduction, **identity(), **host}, progress
        answered = {"stacks": self._send_stacks, "acknowledge": self._forget_told, "notice": logger.warning}
        self._commands = {**answered, "lost": lambda word: losses.declare(**word), **(commands or {})}
        self._told: deque[tuple[int, Mapping[str, Any]]] = deque(
            maxlen=KEPT_TELLS
        )  # what the master has not acknowledged
        self._number, self._sent = 0, 0
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self._woken, self._wake = os.pipe()
        self._connection: socket.socket | None = None
        self._vital_signs = VitalSigns()
        self._thread = threading.Thread(target=self._run, name="heartbeats", daemon=True)
        self._thread.start()
        _own = self

    def tell(self, data: Mapping[str, Any]) -> None:
        """Have the master told, in order and exactly once, whether it is there now or comes back later."""
        with self._lock:
            self._number += 1
            self._told.append((self._number, data))
        os.write(self._wake, b".")

    def drain(self, timeout_s: float) -> bool:
        """Wait until the master has acknowledged everything told; return whether it has."""
        until = time.monotonic() + timeout_s
        while self._told and time.monotonic() < until:
            time.sleep(0.01)
        return not self._told

    def stop(self, *, timeout_s: float = 2.0) -> None:
        """Say good-bye and end the thread."""
        global _own
        if _own is self:
            _own = None
        self._stopped.set()
        os.write(self._wake, b".")
        self._thread.join(timeout_s)

    # -- the thread

    def _run(self) -> None:
        while not self._stopped.is_set():
            try:
                self._connection = self._connect()
                self._talk(self._connection)
            except Exception as error:  # whatever is wrong with the master is no reason for this process to stop
                logger.debug("no word to %s: %r", self._master, error)
            finally:
                if self._connection is not None:
                    self._connection.close()
                    self._connection = None
            self._stopped.wait(LOOK_AGAIN_S)

    def _connect(self) -> socket.socket:
        import ray

        master: Any = ray.get_actor(self._master, namespace=NAMESPACE)
        host, port, token = ray.get(master.address.remote(), timeout=CONNECT_TIMEOUT_S)
        connection = socket.create_connection((host, port), timeout=CONNECT_TIMEOUT_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._connection = connection
        self._send({"hello": {**self._introduction, "token": token}})
        self._sent = 0
        return connection

    def _talk(self, connection: socket.socket) -> None:
        next_beat, received = time.monotonic(), b""
        while not self._stopped.is_set():
            if time.monotonic() >= next_beat:
                self._send({"beat": {**self._progress(), **self._vital_signs.read()}})
                next_beat = max(next_beat + INTERVAL_S, time.monotonic())
            self._send_told()
            ready = select.select([connection.fileno(), self._woken], [], [], max(0.0, next_beat - time.monotonic()))[0]
            if self._woken in ready:
                os.read(self._woken, 4096)
            if connection.fileno() in ready:
                data = connection.recv(65536)
                if not data:
                    raise ConnectionResetError("the master closed the connection")
                *lines, received = (received + data).split(b"\n")
                for line in lines:
                    self._obey(json.loads(line))
        self._send_told()
        self._send({"bye": {}})

    def _obey(self, message: Mapping[str, Any]) -> None:
        for command, word in message.items():
            if command in self._commands:
                self._commands[command](word)

    def _send_told(self) -> None:
        with self._lock:
            waiting = [(number, data) for number, data in self._told if number > self._sent]
        for number, data in waiting:
            self._send({"tell": {"number": number, **data}})
            self._sent = number

    def _forget_told(self, number: int) -> None:
        with self._lock:
            while self._told and self._told[0][0] <= number:
                self._told.popleft()

    def _send_stacks(self, _: Any) -> None:
        with tempfile.TemporaryFile() as f:
            faulthandler.dump_traceback(file=f, all_threads=True)
            f.seek(0)
            self._send({"stacks": f.read().decode(errors="replace")})

    def _send(self, message: Mapping[str, Any]) -> None:
        assert self._connection is not None
        self._connection.sendall(json.dumps(message).encode() + b"\n")


def machine() -> str:
    """Return what two processes have in common that can see each other's process ids: a running kernel and a namespace
    of ids.
    """
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as f:
        return f"{f.read().strip()} {os.readlink('/proc/self/ns/pid')}"


def identity() -> dict[str, Any]:
    """Return where this process is to be found: its id, Ray's id of its node, its machine."""
    import ray

    return {"pid": os.getpid(), "node": ray.get_runtime_context().get_node_id(), "machine": machine()}


class VitalSigns:
    """What every process of a job says of itself and of its machine."""

    def __init__(self) -> None:
        import ray

        self._memory, self._disks = (
            MemoryGauge(),
            {SHARED_MEMORY: SHARED_MEMORY, RAY_DISK: ray.get_runtime_context().get_temp_dir()},
        )

    def read(self) -> dict[str, Any]:
        """Return a heartbeat's part.

        memory, private: bytes that are resident, and those of them that no other process shares. cpu_s: seconds of CPU
        so far. oom_kills: see there. room: (bytes left, bytes in all) of the machine's memory and of its own disks.
        """
        with open("/proc/self/statm", encoding="ascii") as f:
            resident, shared = (int(pages) * os.sysconf("SC_PAGE_SIZE") for pages in f.read().split()[1:3])
        room = {MEMORY: self._memory.read()} | {
            name: found for name, path in self._disks.items() if (found := disk_room(path))
        }
        return {
            "memory": resident,
            "private": resident - shared,
            "cpu_s": time.process_time(),
            "oom_kills": oom_kills(),
            "room": room,
        }


def oom_kills() -> int:
    """Return how many processes the kernel of this machine has ended for want of memory since it was started."""
    with open("/proc/vmstat", encoding="ascii") as f:
        return next((int(line.split()[1]) for line in f if line.startswith("oom_kill ")), 0)


def tell_of_deadline(role: str, ranks: Sequence[int], method: str, timeout_s: float) -> None:
    """Have this process's master told, if it has one, that workers did not answer a call in time."""
    if _own is not None:
        _own.tell({"deadline": {"role": role, "ranks": list(ranks), "method": method, "timeout_s": timeout_s}})
