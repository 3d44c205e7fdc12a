"""Messages that wait for their turn, in order and within limits.

A process has one queue of received messages (`inbox.py`), and one per peer of messages that could not be sent at once
(`outbox.py`). Not thread-safe: its owner holds a lock.
"""

import itertools
import logging
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from hybridrl.framework.parallel.message import SerializedMessage

logger = logging.getLogger(__name__)

# Limits of waiting events in one queue. A stopped peer, or a slow listener, then costs memory and no time.
MAX_WAITING_EVENTS = 10_000
MAX_WAITING_BYTES = 512 * 1024**2


@dataclass(frozen=True)
class Message:
    """A message to peers.

    Attributes:
        topic: Name under which listeners register.
        contents: Of (args, kwargs).
        event: Name for log lines; default the topic.
        newest_only: An older message of the same topic and event that still waits is dropped.
    """

    topic: str
    contents: SerializedMessage
    event: str = ""
    newest_only: bool = False

    @property
    def name(self) -> str:
        """Name for log lines."""
        return self.event or self.topic


class MessageQueue:
    """Messages, and functions between them, in order.

    A message with `newest_only` replaces an older one of its stream, topic and event. Of the others the oldest are
    dropped at the limits, with a log line.

    Args:
        name: What the messages wait for, for the log line.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._numbers = itertools.count()
        self._items: OrderedDict[int, Message | Callable[[], None]] = OrderedDict()
        self._newest: dict[tuple[str, str, str], int] = {}  # (stream, topic, event) -> number of the waiting message
        self._limited: OrderedDict[int, int] = OrderedDict()  # number -> bytes, of messages that may be dropped
        self._limited_bytes = 0
        self._num_dropped, self._next_report = 0, 1

    def __len__(self) -> int:
        return len(self._items)

    def put(self, message: Message, *, stream: str = "") -> None:
        """Append a message of a stream."""
        number = next(self._numbers)
        if message.newest_only:
            key = stream, message.topic, message.event
            self._items.pop(self._newest.get(key, -1), None)
            self._newest[key] = number
        else:
            self._limited[number] = message.contents.num_bytes
            self._limited_bytes += message.contents.num_bytes
        self._items[number] = message
        while len(self._limited) > MAX_WAITING_EVENTS or (
            self._limited_bytes > MAX_WAITING_BYTES and len(self._limited) > 1
        ):
            self._drop_oldest()

    def put_call(self, function: Callable[[], None]) -> None:
        """Append a function."""
        self._items[next(self._numbers)] = function

    def first(self) -> Message | Callable[[], None]:
        """Return the first item without removing it."""
        return next(iter(self._items.values()))

    def pop(self) -> Message | Callable[[], None]:
        """Remove and return the first item."""
        number, item = self._items.popitem(last=False)
        self._limited_bytes -= self._limited.pop(number, 0)
        return item

    def _drop_oldest(self) -> None:
        number, num_bytes = self._limited.popitem(last=False)
        self._limited_bytes -= num_bytes
        dropped = self._items.pop(number)
        self._num_dropped += 1
        if self._num_dropped == self._next_report and isinstance(dropped, Message):
            self._next_report *= 10
            logger.warning(
                "%s: the oldest of %d waiting events is dropped (%r; dropped so far: %d); "
                "emit(..., newest_only=True) lets a new one replace it",
                self._name,
                len(self._limited) + 1,
                dropped.name,
                self._num_dropped,
            )
