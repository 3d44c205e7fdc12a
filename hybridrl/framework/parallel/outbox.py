"""Send messages to peers without ever waiting for one of them.

`PeerRouter` owns one outbox, with a link per peer. A link sends at once while few messages are in flight. A stopped
peer accepts none; messages for it then wait in the link's queue, and a thread of the outbox sends them later.
"""

import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

from hybridrl.framework.parallel.message_queue import Message, MessageQueue

# A message is in flight until it is in the peer's inbox, about 1 ms, whatever code the peer is running.
MAX_IN_FLIGHT = 256
MAX_IN_FLIGHT_NEWEST = 2  # of messages that replace older ones: more of them would only use memory
# Longest single wait for a message to arrive; another peer may meanwhile get its first waiting message.
POLL_PERIOD_S = 0.05


class Link:
    """Numbered messages to one peer, with a limit on those in flight.

    Args:
        peer: Name of the peer, for messages.
        stream: Name of this connection.
        deliver: Called with stream, number and message. Returns a Ray reference that is ready once the peer has the
            message or is dead.
    """

    def __init__(self, peer: str, *, stream: str, deliver: Callable[[str, int, Message], Any]) -> None:
        self._stream, self._deliver = stream, deliver
        self._number = 0
        self._in_flight: dict[Any, bool] = {}  # reference -> newest_only
        self._num_newest = 0  # of them
        self._waiting = MessageQueue(f"{peer} accepts no messages, it is stopped or slow")

    @property
    def num_waiting(self) -> int:
        """Number of messages that are not sent yet."""
        return len(self._waiting)

    @property
    def in_flight(self) -> list:
        """References to messages that have not arrived yet."""
        return list(self._in_flight)

    def send(self, message: Message) -> None:
        """Send the message, or let it wait behind those that wait already.

        A dead peer is not reported here; the group that started it detects the death.
        """
        if not self._waiting and self._has_capacity(message):
            self._deliver_now(message)
        else:
            self._waiting.put(message)

    def send_waiting(self) -> None:
        """Send what the limits allow."""
        while self._waiting:
            message = self._waiting.first()
            if not isinstance(message, Message) or not self._has_capacity(message):
                return
            self._waiting.pop()
            self._deliver_now(message)

    def _deliver_now(self, message: Message) -> None:
        reference = self._deliver(self._stream, self._number, message)
        self._number += 1
        self._in_flight[reference] = message.newest_only
        self._num_newest += message.newest_only

    def _has_capacity(self, message: Message) -> bool:
        if not self._is_full(message):
            return True
        import ray

        arrived, _ = ray.wait(self.in_flight, num_returns=len(self._in_flight), timeout=0, fetch_local=False)
        for reference in arrived:
            self._num_newest -= self._in_flight.pop(reference)
        return not self._is_full(message)

    def _is_full(self, message: Message) -> bool:
        return len(self._in_flight) >= MAX_IN_FLIGHT or (
            message.newest_only and self._num_newest >= MAX_IN_FLIGHT_NEWEST
        )


class Outbox:
    """The links of a process. Its methods never wait for a peer, but for `drain`."""

    def __init__(self) -> None:
        self._links: dict[str, Link] = {}  # peer -> link
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def __len__(self) -> int:
        return len(self._links)

    def connect(self, peer: str, link: Link, first: Iterable[Message]) -> None:
        """Add a peer and send it the messages `first`; an earlier link of its name is dropped."""
        with self._changed:
            self._links[peer] = link
            self._send(link, first)

    def send(self, message: Message) -> None:
        """Send a message to all peers."""
        with self._changed:
            for link in self._links.values():
                self._send(link, [message])

    def drain(self, timeout_s: float) -> None:
        """Wait until nothing waits, at most `timeout_s` seconds."""
        until = time.monotonic() + timeout_s
        with self._changed:
            while any(link.num_waiting for link in self._links.values()) and (left := until - time.monotonic()) > 0:
                self._changed.wait(left)

    def _send(self, link: Link, messages: Iterable[Message]) -> None:
        for message in messages:
            link.send(message)
        if link.num_waiting:
            if self._thread is None:
                self._thread = threading.Thread(target=self._send_waiting, name="outbox", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def _send_waiting(self) -> None:
        import ray

        while True:
            with self._changed:
                while not (in_flight := self._send_possible()):
                    self._changed.notify_all()
                    self._changed.wait()
            ray.wait(in_flight, num_returns=1, timeout=POLL_PERIOD_S, fetch_local=False)

    def _send_possible(self) -> list:
        """Send what the limits allow; return what is in flight to the peers for which messages still wait."""
        in_flight = []
        for link in self._links.values():
            if link.num_waiting:
                link.send_waiting()
            if link.num_waiting:
                in_flight += link.in_flight
        return in_flight
