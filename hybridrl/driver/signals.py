"""SIGTERM and Ctrl-C: commit at the end of the step, then exit.

SIGTERM comes from a preemption, a scheduler's time limit or `kill`.

    termination = TerminationSignal()
    with termination.handle_sigterm():                    # SIGTERM raises Terminated at once ...
        ...
        with termination.defer_sigterm(grace_s=120):      # ... but here it only sets `received`
            ...
            if termination.received: commit and exit

Inside `defer_sigterm`, a second SIGTERM or the end of the grace period raises Terminated at once. Committed checkpoints
stay valid; a half-written one is never visible. If the process still runs `EXIT_TIMEOUT_S` later, it is ended in any
case.

Inside `acknowledged_interrupts`, Ctrl-C does the same: the first one sets `received` where SIGTERM is deferred. The
next one, and every one elsewhere, raises KeyboardInterrupt, and the run stops its workers without a commit.

A run's signal is part of its `RunContext`; the trainer and `driver/program.py` use it in the driver. Only the main
thread of a process can handle signals: in other threads these blocks change nothing.
"""

import contextlib
import logging
import os
import signal
import threading
from collections.abc import Iterator
from types import FrameType

logger = logging.getLogger(__name__)
EXIT_CODE = 128 + signal.SIGTERM  # 143, as a shell reports it
INTERRUPT_EXIT_CODE = 128 + signal.SIGINT  # 130
ACKNOWLEDGEMENTS = (  # of the Ctrl-C that raises KeyboardInterrupt, and of the two after it
    b"\ninterrupted: stopping the workers, which takes some seconds\n",
    b"\nstill stopping; Ctrl-C once more ends this process at once, and may leave processes of the run behind\n",
    b"\nended before all workers had stopped\n",
)
EXIT_TIMEOUT_S = 15.0  # to shut worker processes down; a process stuck in a library's C code raises no exception


class Terminated(SystemExit):
    """The process received SIGTERM.

    As a SystemExit it passes through `except Exception`, and ends a program with `EXIT_CODE`.
    """

    def __init__(self) -> None:
        super().__init__(EXIT_CODE)


class TerminationSignal:
    """SIGTERM state of one run.

    Attributes:
        received: SIGTERM, or a deferred Ctrl-C, has arrived in the outermost block.
        number: The signal that arrived first.
    """

    def __init__(self) -> None:
        self.received, self.number = False, signal.SIGTERM
        self._grace_s: float | None = None  # set inside `defer_sigterm`
        self._finished = threading.Event()
        self._depth = 0

    @contextlib.contextmanager
    def handle_sigterm(self) -> Iterator[None]:
        """Handle SIGTERM in the block.

        Nested blocks act as one. The previous handler is restored at the end.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = signal.getsignal(signal.SIGTERM)
        if self._depth == 0:
            self.received, self.number, self._finished = False, signal.SIGTERM, threading.Event()
        self._depth += 1
        signal.signal(signal.SIGTERM, self._on_sigterm)
        try:
            yield
        finally:
            self._depth -= 1
            if self._depth == 0:
                self._finished.set()
            signal.signal(signal.SIGTERM, signal.SIG_DFL if before is None else before)

    @contextlib.contextmanager
    def defer_sigterm(self, *, grace_s: float) -> Iterator[None]:
        """Let a first SIGTERM in the block only set `received`, for at most `grace_s` seconds."""
        with self.handle_sigterm():
            self._grace_s = grace_s
            try:
                yield
            finally:
                self._grace_s = None

    @property
    def exit_code(self) -> int:
        """Exit code of a program that ends because of this signal."""
        return 128 + self.number

    def raise_if_received(self) -> None:
        """Raise Terminated if SIGTERM has arrived, KeyboardInterrupt if it was Ctrl-C."""
        if self.received:
            raise KeyboardInterrupt if self.number == signal.SIGINT else Terminated

    def defer_interrupt(self) -> bool:
        """Take a Ctrl-C as a first SIGTERM, inside `defer_sigterm`; return whether it was taken."""
        takes = self._grace_s is not None and not self.received
        if takes:
            self._receive(signal.SIGINT)
        return takes

    def _on_sigterm(self, number: int, frame: FrameType | None) -> None:
        first = not self.received
        if first:
            self._receive(signal.SIGTERM)
        if not first or self._grace_s is None:
            raise Terminated

    def _receive(self, number: signal.Signals) -> None:
        self.received, self.number = True, number
        threading.Thread(  # it logs: a handler must not write to a log that it may have interrupted
            target=self._enforce_exit, args=(self._grace_s, self._finished), name="termination", daemon=True
        ).start()

    def _enforce_exit(self, grace_s: float | None, finished: threading.Event) -> None:
        if grace_s is not None:
            name, hint = ("Ctrl-C", "; Ctrl-C again stops it now") if self.number == signal.SIGINT else ("SIGTERM", "")
            logger.warning(
                "%s: the run finishes and commits this step, then exits, within trainer.grace_s=%g s%s",
                name,
                grace_s,
                hint,
            )
            if finished.wait(grace_s):
                return
            logger.warning("trainer.grace_s=%g s are over: the run exits now, without a commit of this step", grace_s)
            signal.pthread_kill(threading.main_thread().ident or 0, self.number)
        if not finished.wait(EXIT_TIMEOUT_S):
            os._exit(self.exit_code)


def is_terminating() -> bool:
    """Return whether a run of this process has received SIGTERM. May be called in any thread."""
    run = getattr(signal.getsignal(signal.SIGTERM), "__self__", None)
    return isinstance(run, TerminationSignal) and run.received


@contextlib.contextmanager
def acknowledged_interrupts(termination: TerminationSignal | None = None, *, enabled: bool = True) -> Iterator[None]:
    """Acknowledge Ctrl-C in the block with a line at once.

    After a Ctrl-C that goes on to the end of this process.

    A first one that `termination` can defer ends the run after the step. The next one raises KeyboardInterrupt. The one
    after it changes nothing, because the workers are being stopped then, which takes seconds on Ray. One more ends the
    process. Where Python's own handler is not installed, or not `enabled`, the block changes nothing.
    """
    own = threading.current_thread() is threading.main_thread()
    if not (enabled and own and signal.getsignal(signal.SIGINT) is signal.default_int_handler):
        yield
        return
    num_received = 0

    def on_interrupt(number: int, frame: FrameType | None) -> None:
        nonlocal num_received
        if num_received == 0 and termination is not None and termination.defer_interrupt():
            return
        num_received += 1
        # Not through `logging`, which the handler may have interrupted.
        with contextlib.suppress(OSError):
            os.write(2, ACKNOWLEDGEMENTS[min(num_received, len(ACKNOWLEDGEMENTS)) - 1])
        if num_received == 1:
            raise KeyboardInterrupt
        if num_received >= len(ACKNOWLEDGEMENTS):
            os._exit(INTERRUPT_EXIT_CODE)

    signal.signal(signal.SIGINT, on_interrupt)
    try:
        yield
    finally:
        if num_received == 0:
            signal.signal(signal.SIGINT, signal.default_int_handler)


@contextlib.contextmanager
def keep_sigterm_handler() -> Iterator[None]:
    """Install a run's handler again after a block that replaces it.

    Ray replaces it when it starts.
    """
    before = signal.getsignal(signal.SIGTERM)
    yield
    is_own = isinstance(getattr(before, "__self__", None), TerminationSignal)
    if is_own and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, before)
