"""SIGTERM, the notice that this process has to go (preemption, a scheduler's time limit, `kill`): commit at the end of
the step and leave.

    with NOTICE.heard():                        # from here on SIGTERM raises Terminated, at once ...
        ...
        with NOTICE.kept(grace_s=120):          # ... but in here it is kept, until somebody looks
            ...
            if NOTICE.received: commit and leave

Within `kept`, a second SIGTERM, or grace that runs out, raises Terminated at once all the same: what was committed is
there anyway, and what is half-written is none. `LEAVE_S` later the process ends in any case. Only the main thread of a
process can hear signals; elsewhere SIGTERM does what it did before.
"""

import contextlib
import logging
import os
import signal
import threading
from collections.abc import Iterator
from types import FrameType

logger = logging.getLogger(__name__)
EXIT_CODE = 128 + signal.SIGTERM  # 143, as a shell tells it
LEAVE_S = 15.0  # to end worker processes; a process that hangs in a library's code hears no exception


class Terminated(SystemExit):
    """The process was told to end.

    As a SystemExit it passes through `except Exception`, and ends a program with `EXIT_CODE`.
    """

    def __init__(self) -> None:
        super().__init__(EXIT_CODE)


class Notice:
    """The notice of this process. received: it has come."""

    def __init__(self) -> None:
        self.received = False
        self._grace_s: float | None = None  # while it is kept
        self._over = threading.Event()
        self._depth = 0

    @contextlib.contextmanager
    def heard(self) -> Iterator[None]:
        """Hear SIGTERM in the block. Blocks within blocks are one; what listened before listens afterwards."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = signal.getsignal(signal.SIGTERM)
        if self._depth == 0:
            self.received, self._over = False, threading.Event()
        self._depth += 1
        signal.signal(signal.SIGTERM, self._hear)
        try:
            yield
        finally:
            self._depth -= 1
            if self._depth == 0:
                self._over.set()
            signal.signal(signal.SIGTERM, signal.SIG_DFL if before is None else before)

    @contextlib.contextmanager
    def kept(self, *, grace_s: float) -> Iterator[None]:
        """Keep a notice that comes in the block until somebody looks at `received`, but no longer than `grace_s`
        seconds.
        """
        with self.heard():
            self._grace_s = grace_s
            try:
                yield
            finally:
                self._grace_s = None

    def listen_again(self) -> None:
        """Hear SIGTERM although a library (Ray, when it is started) has put its own handler in place meanwhile."""
        if self._depth and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self._hear)

    def leave_if_received(self) -> None:
        """Raise Terminated if the notice has come."""
        if self.received:
            raise Terminated

    def _hear(self, number: int, frame: FrameType | None) -> None:
        first, self.received = not self.received, True
        if first:  # a handler must not write to a log that it may have interrupted
            threading.Thread(
                target=self._end_in_time, args=(self._grace_s, self._over), name="leaving", daemon=True
            ).start()
        if not first or self._grace_s is None:
            raise Terminated

    def _end_in_time(self, grace_s: float | None, over: threading.Event) -> None:
        """See to it that this process ends."""
        if grace_s is not None:
            logger.warning(
                "SIGTERM: this step is finished and committed, then the run leaves, within trainer.grace_s=%g s",
                grace_s,
            )
            if over.wait(grace_s):
                return
            logger.warning("trainer.grace_s=%g s are over: the run leaves now, without a commit of this step", grace_s)
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGTERM)
        if not over.wait(LEAVE_S):
            os._exit(EXIT_CODE)


NOTICE = Notice()
