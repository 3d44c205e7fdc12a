"""`LIFE`: what a driver knows of the one who keeps it running (`hybridrl/driver/supervisor.py`), and tells him.

A driver that dies is started again, and is then the same driver in its next life: same command, same run, next number.
One that nobody keeps running (a notebook, a test, `trainer.backend=local`) has one life, and what is told here goes
nowhere.
"""

import json
import logging
import os
import queue
import signal
import socket
import threading
from collections.abc import Callable
from typing import Any

logger = logging.getLogger(__name__)
CLUSTER_WITHIN_S = 120.0


class Life:
    """number: 1, and one more for every driver of this run that was lost.

    run: its name on the cluster, the same in every life.
    """

    def __init__(self) -> None:
        self.number, self.run = 1, ""
        self.on_orphaned: Callable[[], None] = lambda: None
        self._channel: socket.socket | None = None
        self._clusters: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()

    @property
    def is_kept(self) -> bool:
        """Whether somebody starts this driver again when it dies."""
        return self._channel is not None

    def begin(self, channel: socket.socket, *, number: int, run: str) -> None:
        """Be a life that is kept.

        channel: to the supervisor; when it closes, the supervisor is gone, and this process ends.
        """
        self.number, self.run, self._channel = number, run, channel
        threading.Thread(target=self._listen, args=(channel,), name="life", daemon=True).start()

    def reached(self, step: int) -> None:
        """Tell that a step has ended and what it left can be gone on from: the next loss is not the same one again."""
        self._tell({"step": step})

    def lost_the_job(self, why: str) -> None:
        """Tell that this driver ends because of what no driver can mend, so that the whole job is to
        be started anew.
        """
        self._tell({"again": why})

    def end(self, code: int) -> None:
        """Tell that this driver ends, and means it."""
        self._tell({"end": code})

    def cluster(self) -> str:
        """Return the address of a Ray cluster on this machine that outlives this driver, and set the environment that
        it is known with.

        Raises RuntimeError when it did not start.
        """
        self._tell({"cluster": True})
        try:
            answer = self._clusters.get(timeout=CLUSTER_WITHIN_S)
        except queue.Empty:
            answer = {"error": f"no answer within {CLUSTER_WITHIN_S:g} s"}
        if "error" in answer:
            raise RuntimeError(f"Ray did not start on this machine: {answer['error']}")
        os.environ.update(answer["environment"])
        return answer["cluster"]

    def _tell(self, word: dict[str, Any]) -> None:
        if self._channel is not None:
            self._channel.sendall(json.dumps(word).encode() + b"\n")

    def _listen(self, channel: socket.socket) -> None:
        with channel.makefile("rb") as lines:
            for line in lines:
                self._clusters.put(json.loads(line))
        self.on_orphaned()
        os.kill(os.getpid(), signal.SIGKILL)  # it may be anywhere, in a collective too


LIFE = Life()
