"""`HeartbeatClient`: a thread that sends heartbeats and events of this process to the job's master.

Runs in every worker process and in the trainer's. Its counterpart is `master/health/heartbeat_server.py`.

    client = HeartbeatClient("run/master", {"slot": "actor-0", "name": "run/actor-0"}, progress)
    client.send({"event": "StepCompleted", "step": 3})      # returns at once; resent until the master acknowledges it

Messages are lines of JSON over one TCP connection. The kernel closes it when the process dies, so the master detects a
death within milliseconds. A pending Ray actor call would show a death too, but a process with such a call no longer
exits on SIGTERM. A concurrency group for that call would move every other call out of the main thread.

If the master is gone, the thread reconnects until it is back; no caller waits for that.
"""

import faulthandler
import logging
import os
import select
import socket
import stat
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from hybridrl.errors import CallTimeout
from hybridrl.single_controller.cluster import NAMESPACE, get_value
from hybridrl.single_controller.monitoring.capacity import MemoryProbe, disk_capacity
from hybridrl.single_controller.monitoring.process import PROCESS, mark_lost
from hybridrl.system.json_lines import MessageReader, send_message
from hybridrl.system.machine import machine_id

logger = logging.getLogger(__name__)
MASTER_VARIABLE = "HYBRIDRL_MASTER"  # environment variable: name of the master's actor
HEARTBEAT_PERIOD_S = 1.0
RECONNECT_PERIOD_S = 0.5
CONNECT_TIMEOUT_S = 5.0
MAX_UNACKNOWLEDGED = 10_000  # messages kept for a master that is gone; older ones are dropped
MEMORY, SHARED_MEMORY, RAY_DISK = "memory", "/dev/shm", "Ray's directory"  # keys of `capacity` in a heartbeat


class HeartbeatClient:
    """Connects to a master in a thread of its own.

    Args:
        master: name of the master's actor.
        hello: first message on every connection, completed with `process_identity` and the host name.
        progress: returns the content of a heartbeat; called in the thread.
        commands: command of the master -> handler of its argument; called in the thread. Built in are `stacks` (send
            the stacks of all threads), `notice` (log a warning), `lost` (fail the calls to a worker) and `acknowledge`.
    """

    def __init__(
        self,
        master: str,
        hello: Mapping[str, Any],
        progress: Callable[[], Mapping[str, Any]],
        commands: Mapping[str, Callable[[Any], None]] | None = None,
    ) -> None:
        host = {"host": socket.gethostname()}
        self._master, self._hello, self._progress = master, {**hello, **process_identity(), **host}, progress
        builtin = {"stacks": self._send_stacks, "acknowledge": self._drop_acknowledged, "notice": logger.warning}
        self._commands = {**builtin, "lost": lambda worker: mark_lost(**worker), **(commands or {})}
        self._unacknowledged: deque[tuple[int, Mapping[str, Any]]] = deque(maxlen=MAX_UNACKNOWLEDGED)
        self._last_number, self._last_sent = 0, 0
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self._wake_read, self._wake_write = os.pipe()
        self._connection: socket.socket | None = None
        self._process_stats = ProcessStats()
        self._thread = threading.Thread(target=self._run, name="heartbeats", daemon=True)
        self._thread.start()
        PROCESS.master = self

    def send(self, data: Mapping[str, Any]) -> None:
        """Queue a message; the master receives each exactly once, in order, also if it is restarted meanwhile."""
        with self._lock:
            self._last_number += 1
            self._unacknowledged.append((self._last_number, data))
        os.write(self._wake_write, b".")

    def drain(self, timeout_s: float) -> bool:
        """Wait until the master has acknowledged every message; return whether it has."""
        until = time.monotonic() + timeout_s
        while self._unacknowledged and time.monotonic() < until:
            time.sleep(0.01)
        return not self._unacknowledged

    def ask(self, method: str, *args: Any, timeout_s: float) -> Any:
        """Return what a method of the master's actor returns, called when it has acknowledged every message.

        None if the master is gone or does not answer within `timeout_s`.
        """
        import ray

        until = time.monotonic() + timeout_s
        try:
            if not self.drain(timeout_s):
                return None
            master: Any = ray.get_actor(self._master, namespace=NAMESPACE)
            call = getattr(master, method).remote(*args, until - time.monotonic())
            return get_value(call, what=f"the master's {method}", timeout_s=until - time.monotonic())
        except (ray.exceptions.RayError, CallTimeout, ValueError) as error:  # ValueError: there is no such actor
            logger.warning("the master did not answer %s (%s: %s)", method, type(error).__name__, error)
            return None

    def stop(self, *, timeout_s: float = 2.0) -> None:
        """Sign off and end the thread."""
        if PROCESS.master is self:
            PROCESS.master = None
        self._stopped.set()
        os.write(self._wake_write, b".")
        self._thread.join(timeout_s)

    # -- the thread

    def _run(self) -> None:
        while not self._stopped.is_set():
            try:
                self._connection = self._connect()
                self._exchange(self._connection)
            except Exception as error:  # no fault of the master may stop this process
                logger.debug(
                    "connection to %s failed, reconnecting in %g s: %r", self._master, RECONNECT_PERIOD_S, error
                )
            finally:
                if self._connection is not None:
                    self._connection.close()
                    self._connection = None
            self._stopped.wait(RECONNECT_PERIOD_S)

    def _connect(self) -> socket.socket:
        import ray

        master: Any = ray.get_actor(self._master, namespace=NAMESPACE)
        host, port, token = get_value(master.address.remote(), what="the master's address", timeout_s=CONNECT_TIMEOUT_S)
        connection = socket.create_connection((host, port), timeout=CONNECT_TIMEOUT_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._connection = connection
        self._send_line({"hello": {**self._hello, "token": token}})
        self._last_sent = 0
        return connection

    def _exchange(self, connection: socket.socket) -> None:
        next_beat, reader = time.monotonic(), MessageReader()
        while not self._stopped.is_set():
            if time.monotonic() >= next_beat:
                self._send_line({"beat": {**self._progress(), **self._process_stats.read()}})
                next_beat = max(next_beat + HEARTBEAT_PERIOD_S, time.monotonic())
            self._send_queued()
            wait_s = max(0.0, next_beat - time.monotonic())
            ready = select.select([connection.fileno(), self._wake_read], [], [], wait_s)[0]
            if self._wake_read in ready:
                os.read(self._wake_read, 4096)
            if connection.fileno() in ready:
                data = connection.recv(65536)
                if not data:
                    raise ConnectionResetError("the master closed the connection")
                for message in reader.messages(data):
                    self._handle(message)
        self._send_queued()
        self._send_line({"bye": {}})

    def _handle(self, message: Mapping[str, Any]) -> None:
        for command, argument in message.items():
            if command in self._commands:
                self._commands[command](argument)

    def _send_queued(self) -> None:
        with self._lock:
            queued = [(number, data) for number, data in self._unacknowledged if number > self._last_sent]
        for number, data in queued:
            self._send_line({"report": {"number": number, **data}})
            self._last_sent = number

    def _drop_acknowledged(self, number: int) -> None:
        with self._lock:
            while self._unacknowledged and self._unacknowledged[0][0] <= number:
                self._unacknowledged.popleft()

    def _send_stacks(self, _: Any) -> None:
        with tempfile.TemporaryFile() as f:
            faulthandler.dump_traceback(file=f, all_threads=True)
            f.seek(0)
            self._send_line({"stacks": f.read().decode(errors="replace")})

    def _send_line(self, message: Mapping[str, Any]) -> None:
        assert self._connection is not None
        send_message(self._connection, message)


def process_identity() -> dict[str, Any]:
    """Return this process's id, Ray's id of its node, its machine's id, and the files that it prints to."""
    import ray

    node = ray.get_runtime_context().get_node_id()
    printed = {"stdout": _file_of_descriptor(1), "stderr": _file_of_descriptor(2)}
    return {"pid": os.getpid(), "node": node, "machine": machine_id(), **printed}


def _file_of_descriptor(descriptor: int) -> str:
    """Return the path of the file that is open there; "" for a terminal, a pipe or nothing."""
    try:
        return os.readlink(f"/proc/self/fd/{descriptor}") if stat.S_ISREG(os.fstat(descriptor).st_mode) else ""
    except OSError:
        return ""


class ProcessStats:
    """Reads resource usage of this process and its machine, a part of every heartbeat."""

    def __init__(self) -> None:
        import ray

        self._memory = MemoryProbe()
        self._disks = {SHARED_MEMORY: SHARED_MEMORY, RAY_DISK: ray.get_runtime_context().get_temp_dir()}

    def read(self) -> dict[str, Any]:
        """Return the current values.

        Returns:
            memory: resident bytes. private: those of them that no other process shares. cpu_s: CPU seconds so far.
            oom_kills: see `oom_kills`. capacity: (bytes left, bytes in total) of the machine's memory and disks.
        """
        with open("/proc/self/statm", encoding="ascii") as f:
            resident, shared = (int(pages) * os.sysconf("SC_PAGE_SIZE") for pages in f.read().split()[1:3])
        capacity = {MEMORY: self._memory.read()} | {
            name: found for name, path in self._disks.items() if (found := disk_capacity(path))
        }
        return {
            "memory": resident,
            "private": resident - shared,
            "cpu_s": time.process_time(),
            "oom_kills": oom_kills(),
            "capacity": capacity,
        }


def oom_kills() -> int:
    """Return how many processes this machine's kernel has killed for lack of memory since it booted."""
    with open("/proc/vmstat", encoding="ascii") as f:
        return next((int(line.split()[1]) for line in f if line.startswith("oom_kill ")), 0)
