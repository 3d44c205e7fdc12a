"""What other processes have sent to this one: put into order, and handed on by one thread. Knows nothing of what it
hands on.

A stream is one sender's connection. Its messages are numbered from 0 and are handed on in that order, however they
arrive. A message of which only the newest matters takes the place of an older one that still waits.

The way to one peer. Messages are numbered, and only so many are on their way: whoever sends faster than the peer takes
has to wait.
"""

import logging
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hybridrl.errors import CallTimeout
from hybridrl.framework.parallel.message import Parcel

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Message:
    """topic: whose business it is. newest_only: an older one that still waits need not be heard."""

    topic: str
    parcel: Parcel  # of (args, kwargs)
    newest_only: bool = False


class Inbox:
    """handle: called with a message, its args and its kwargs, in order.

    on_error: called with what `handle` or a posted function raises.
    """

    def __init__(
        self, handle: Callable[[Message, tuple, dict], None], on_error: Callable[[BaseException], None]
    ) -> None:
        self._handle, self._on_error = handle, on_error
        self._expected: dict[str, int] = {}  # stream -> number of its next message
        self._early: dict[str, dict[int, Message]] = {}  # stream -> messages that came before their turn
        self._waiting: deque[Callable[[], None] | _Waiting] = deque()
        self._newest: dict[tuple[str, str], _Waiting] = {}  # (stream, topic) -> the message that still waits
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="inbox", daemon=True)
        self._thread.start()

    def deliver(self, stream: str, number: int, message: Message) -> None:
        """Take message `number` of a stream."""
        with self._changed:
            early = self._early.setdefault(stream, {})
            early[number] = message
            while (turn := self._expected.get(stream, 0)) in early:
                self._queue(stream, early.pop(turn))
                self._expected[stream] = turn + 1
            self._changed.notify_all()

    def _queue(self, stream: str, message: Message) -> None:
        waiting = _Waiting(message)
        if message.newest_only:
            older = self._newest.get((stream, message.topic))
            if older is not None:
                older.message = None
            self._newest[stream, message.topic] = waiting
        self._waiting.append(waiting)

    def post(self, function: Callable[[], None]) -> None:
        """Call `function` in the inbox's thread, behind what waits there now."""
        with self._changed:
            self._waiting.append(function)
            self._changed.notify_all()

    def flush(self, timeout_s: float) -> None:
        """Return when all that waits now has been handed on. Past the deadline: CallTimeout."""
        if threading.current_thread() is self._thread:
            return
        done = threading.Event()
        self.post(done.set)
        if not done.wait(timeout_s):
            raise CallTimeout(
                f"listeners had not heard all messages within {timeout_s:g} s; does one of them wait for this thread?"
            )

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._waiting:
                    self._changed.wait()
                item = self._waiting.popleft()
                if isinstance(item, _Waiting):
                    message, item.message = item.message, None
            try:
                if not isinstance(item, _Waiting):
                    item()
                elif message is not None:
                    self._open(message)
            except BaseException as error:  # a listener's SystemExit too: this thread has to stay
                self._on_error(error)
            item = message = None  # what was heard must not outlive it here

    def _open(self, message: Message) -> None:
        try:
            args, kwargs = message.parcel.open()
        except Exception as error:
            error.add_note(f"while opening a message for {message.topic!r}")
            raise
        self._handle(message, args, kwargs)


@dataclass
class _Waiting:
    message: Message | None  # None: a newer one has taken its place


# A message is on its way until it stands in the peer's inbox, about a millisecond, whatever the peer's own code is
# doing.
MAX_ON_THE_WAY = 256
MAX_NEWEST_ON_THE_WAY = 2  # of messages that make older ones worthless, more are memory for nothing
SEND_TIMEOUT_S = 300.0


class Link:
    """deliver: called with stream, number and message; returns a Ray reference that is ready once the peer has the
    message or is dead.
    """

    def __init__(self, peer: str, *, stream: str, deliver: Callable[[str, int, Message], Any]) -> None:
        self.peer, self._stream, self._deliver = peer, stream, deliver
        self._number = 0
        self._on_the_way: dict[bool, list] = {False: [], True: []}  # newest_only -> references

    def send(self, message: Message) -> None:
        """Send behind what was sent before. A dead peer hears nothing, and that is no error here: whoever started it
        knows.

        Raises CallTimeout when the peer lives and takes nothing.
        """
        self._make_room(message.newest_only)
        reference = self._deliver(self._stream, self._number, message)
        self._number += 1
        self._on_the_way[message.newest_only].append(reference)

    def _make_room(self, newest_only: bool) -> None:
        import ray

        limit = MAX_NEWEST_ON_THE_WAY if newest_only else MAX_ON_THE_WAY
        pending = self._on_the_way[newest_only]
        if len(pending) < limit:
            return
        taken, rest = ray.wait(pending, num_returns=len(pending), timeout=0, fetch_local=False)
        if not taken:
            taken, rest = ray.wait(pending, num_returns=1, timeout=SEND_TIMEOUT_S, fetch_local=False)
        if not taken:
            raise CallTimeout(
                f"{self.peer} took none of the last {len(pending)} messages within {SEND_TIMEOUT_S:g} s; is it stopped?"
            )
        self._on_the_way[newest_only] = rest
