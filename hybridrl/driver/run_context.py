"""`RunContext`: what one run has in its driver: the channel to its supervisor, SIGTERM state, trace and run id.

`main_ppo` and `main_sft` create one and pass it to whatever asks. A trainer that is constructed without one creates its
own, so that several trainers in one process do not see each other's attempts or signals. State that the process has
once, such as its connection to a master, is in `single_controller/monitoring/process.py`.

When a driver dies, the supervisor (`driver/supervisor.py`) starts it again with the same command and run id and the
next attempt number. A driver without a supervisor (a notebook, a test, `trainer.backend=local`) is attempt 1, and its
reports are dropped. Nothing is restarted here.
"""

import contextlib
import logging
import os
import queue
import signal
import socket
import threading
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from hybridrl.driver.signals import TerminationSignal
from hybridrl.system.json_lines import RECEIVE_BYTES, MessageReader, send_message

if TYPE_CHECKING:
    from hybridrl.failure_policy import Decision

logger = logging.getLogger(__name__)
CLUSTER_TIMEOUT_S = 120.0  # for the supervisor to start Ray on this machine


class DriverLifecycle:
    """The driver's end of the channel to its supervisor.

    Attributes:
        attempt: 1 for the first driver of a run, one more for each restart.
        run_id: Name of the run on the cluster, the same in every attempt.
        restarted_by: The supervisor's decision that started this driver; None for the first one.
        on_orphaned: Called when the supervisor is gone, right before this process kills itself.
    """

    def __init__(self) -> None:
        self.attempt, self.run_id = 1, uuid.uuid4().hex[:6]
        self.restarted_by: Decision | None = None
        self.on_orphaned: Callable[[], None] = lambda: None
        self._channel: socket.socket | None = None
        self._cluster_answers: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()

    @property
    def is_supervised(self) -> bool:
        """Whether a supervisor restarts this driver when it dies."""
        return self._channel is not None

    def attach_supervisor(
        self, channel: socket.socket, *, attempt: int, run_id: str, restarted_by: "Decision | None"
    ) -> None:
        """Connect to the supervisor.

        Args:
            channel: Socket to the supervisor. When it closes, the supervisor is gone and this process kills itself.
            attempt: Number of this driver.
            run_id: Name of the run.
            restarted_by: See the attribute.
        """
        self.attempt, self.run_id, self.restarted_by, self._channel = attempt, run_id, restarted_by, channel
        threading.Thread(target=self._receive, args=(channel,), name="supervisor-channel", daemon=True).start()

    def report_step(self, step: int) -> None:
        """Report that a step is complete and its snapshot is stored.

        Resets the supervisor's count of consecutive failures.
        """
        self._send({"step": step})

    def request_new_job(self, why: str) -> None:
        """Request a new job: no restart of this driver can repair the failure."""
        self._send({"new_job": why})

    def report_exit(self, code: int) -> None:
        """Report an intentional exit, so that the supervisor does not restart the driver."""
        self._send({"exit": code})

    def ray_address(self) -> str:
        """Return the address of a Ray cluster on this machine that outlives this driver.

        The supervisor starts the cluster if there is none. Sets the `RAY_*` variables that the cluster was started
        with.

        Raises:
            RuntimeError: Ray did not start within `CLUSTER_TIMEOUT_S`.
        """
        self._send({"cluster": True})
        try:
            answer = self._cluster_answers.get(timeout=CLUSTER_TIMEOUT_S)
        except queue.Empty:
            answer = {"error": f"no answer within {CLUSTER_TIMEOUT_S:g} s"}
        if "error" in answer:
            raise RuntimeError(f"Ray did not start on this machine: {answer['error']}")
        os.environ.update(answer["environment"])
        return answer["cluster"]

    def _send(self, message: dict[str, Any]) -> None:
        if self._channel is not None:
            with contextlib.suppress(ConnectionError):  # the supervisor is gone: `_receive` ends this process
                send_message(self._channel, message)

    def _receive(self, channel: socket.socket) -> None:
        reader = MessageReader()
        try:
            with contextlib.suppress(ConnectionResetError):  # the end of a supervisor that had not read everything
                while data := channel.recv(RECEIVE_BYTES):
                    for message in reader.messages(data):
                        self._cluster_answers.put(message)
            self.on_orphaned()
        finally:  # the main thread may block in a collective: an exception would not reach it
            os.kill(os.getpid(), signal.SIGKILL)


class Trace(Protocol):
    """A trace that is being recorded."""

    def close(self) -> None:
        """End the recording."""


@dataclass(eq=False)
class RunContext:
    """State of one run in its driver; for one trainer.

    Attributes:
        lifecycle: Channel to the supervisor; without one, this driver is attempt 1.
        termination: Whether SIGTERM has arrived.
        trace: The trace that this run records; None without `trainer.trace`.
        config: The run's settings, once they are read and checked; None if the program only shows them.
        directory: The run's directory, once it is prepared.
    """

    lifecycle: DriverLifecycle = field(default_factory=DriverLifecycle)
    termination: TerminationSignal = field(default_factory=TerminationSignal)
    trace: Trace | None = None
    config: Any = None
    directory: str | None = None

    @property
    def run_id(self) -> str:
        """Tells this run apart from others of its experiment; the same in every attempt."""
        return self.lifecycle.run_id
