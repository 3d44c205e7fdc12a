"""Deliver messages between processes in order (`Inbox`) and limit how many are in flight (`Link`).

`PeerRouter` owns one inbox, and one link per peer. A stream is the connection of one sender. Its messages are numbered
from 0 and are handled in that order, whatever the order of arrival. A message with `newest_only` replaces an older one
that still waits. A sender that is faster than its peer has to wait. This module does not interpret the contents.
"""

import logging
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hybridrl.errors import CallTimeout
from hybridrl.framework.parallel.message import SerializedMessage

logger = logging.getLogger(__name__)

# A message is in flight until it is in the peer's inbox, about 1 ms, whatever code the peer is running.
MAX_IN_FLIGHT = 256
MAX_IN_FLIGHT_NEWEST = 2  # of messages that replace older ones: more of them would only use memory
SEND_TIMEOUT_S = 300.0


@dataclass(frozen=True)
class Message:
    """A message to peers.

    Attributes:
        topic: Name under which listeners register.
        newest_only: An older message of the topic that still waits may be dropped.
    """

    topic: str
    contents: SerializedMessage  # of (args, kwargs)
    newest_only: bool = False


class Inbox:
    """Queue of received messages, handled by one thread.

    Args:
        handle: Called with a message, its args and its kwargs, in order.
        on_error: Called with any exception of `handle` or of a posted function.
    """

    def __init__(
        self, handle: Callable[[Message, tuple, dict], None], on_error: Callable[[BaseException], None]
    ) -> None:
        self._handle, self._on_error = handle, on_error
        self._expected: dict[str, int] = {}  # stream -> number of its next message
        self._out_of_order: dict[str, dict[int, Message]] = {}  # stream -> messages that arrived too early
        self._items: deque[Callable[[], None] | _QueuedMessage] = deque()
        self._newest: dict[tuple[str, str], _QueuedMessage] = {}  # (stream, topic) -> the queued message
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="inbox", daemon=True)
        self._thread.start()

    def deliver(self, stream: str, number: int, message: Message) -> None:
        """Accept message `number` of a stream."""
        with self._changed:
            out_of_order = self._out_of_order.setdefault(stream, {})
            out_of_order[number] = message
            while (expected := self._expected.get(stream, 0)) in out_of_order:
                self._enqueue(stream, out_of_order.pop(expected))
                self._expected[stream] = expected + 1
            self._changed.notify_all()

    def _enqueue(self, stream: str, message: Message) -> None:
        waiting = _QueuedMessage(message)
        if message.newest_only:
            older = self._newest.get((stream, message.topic))
            if older is not None:
                older.message = None
            self._newest[stream, message.topic] = waiting
        self._items.append(waiting)

    def post(self, function: Callable[[], None]) -> None:
        """Call `function` in the inbox's thread, after everything that is queued now."""
        with self._changed:
            self._items.append(function)
            self._changed.notify_all()

    def flush(self, timeout_s: float) -> None:
        """Return when everything that is queued now has been handled.

        Raises:
            CallTimeout: It took longer than `timeout_s`.
        """
        if threading.current_thread() is self._thread:
            return
        done = threading.Event()
        self.post(done.set)
        if not done.wait(timeout_s):
            raise CallTimeout(
                f"listeners had not handled all messages within {timeout_s:g} s; does one of them wait for this thread?"
            )

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._items:
                    self._changed.wait()
                item = self._items.popleft()
                if isinstance(item, _QueuedMessage):
                    message, item.message = item.message, None
            try:
                if not isinstance(item, _QueuedMessage):
                    item()
                elif message is not None:
                    self._load_and_handle(message)
            except BaseException as error:  # also a listener's SystemExit: this thread must not end
                self._on_error(error)
            message = None  # do not keep the message alive
            del item

    def _load_and_handle(self, message: Message) -> None:
        try:
            args, kwargs = message.contents.load()
        except Exception as error:
            error.add_note(f"while loading a message for {message.topic!r}")
            raise
        self._handle(message, args, kwargs)


@dataclass
class _QueuedMessage:
    message: Message | None  # None if a newer one replaced it


# -- sending


class Link:
    """Numbered messages to one peer, with a limit on those in flight.

    Args:
        peer: Name of the peer, for messages.
        stream: Name of this connection.
        deliver: Called with stream, number and message. Returns a Ray reference that is ready once the peer has the
            message or is dead.
    """

    def __init__(self, peer: str, *, stream: str, deliver: Callable[[str, int, Message], Any]) -> None:
        self.peer, self._stream, self._deliver = peer, stream, deliver
        self._number = 0
        self._in_flight: dict[bool, list] = {False: [], True: []}  # newest_only -> references

    def send(self, message: Message) -> None:
        """Send after everything that was sent before.

        A dead peer is not reported here; the group that started it detects the death.

        Raises:
            CallTimeout: The peer is alive but accepts no messages.
        """
        self._wait_for_capacity(message.newest_only)
        reference = self._deliver(self._stream, self._number, message)
        self._number += 1
        self._in_flight[message.newest_only].append(reference)

    def _wait_for_capacity(self, newest_only: bool) -> None:
        import ray

        limit = MAX_IN_FLIGHT_NEWEST if newest_only else MAX_IN_FLIGHT
        pending = self._in_flight[newest_only]
        if len(pending) < limit:
            return
        arrived, rest = ray.wait(pending, num_returns=len(pending), timeout=0, fetch_local=False)
        if not arrived:
            arrived, rest = ray.wait(pending, num_returns=1, timeout=SEND_TIMEOUT_S, fetch_local=False)
        if not arrived:
            raise CallTimeout(
                f"{self.peer} accepted none of {len(pending)} messages within {SEND_TIMEOUT_S:g} s; is it stopped?"
            )
        self._in_flight[newest_only] = rest
