"""This process among its peers: who it is, what it sends them, and what it hears from them.

There is one router per process, `current_router()`; `Parallel()` and `task.router` are the same one. It is active in a
process that `Parallel.runner` started, and elsewhere it sends nothing and hears nothing. Which peers it has is decided
in `node_group.py`.
"""

import logging
import threading
import uuid
from collections.abc import Callable, Iterable
from typing import Any

from hybridrl.framework.parallel.event_loop import ListenerFn, ReplayingLoop
from hybridrl.framework.parallel.inbox import Inbox, Link, Message
from hybridrl.framework.parallel.message import pack

logger = logging.getLogger(__name__)

# Listeners are quick; one that takes longer than this waits for something that waits for it.
HEARING_TIMEOUT_S = 60.0


class Router:
    """is_active: whether this process has peers, or might. node_id: which process of its group it is. labels: given to
    `runner`.

    attached_to: names of the processes of other groups that it was attached to. retries: how often `main` was begun
    again here. Messages of one sender are heard in the order in which they were sent, in a thread of the router's own.
    What comes before anybody listens is kept for the first who does. A listener's exception is raised by the next call
    that can raise it: `emit`, the next stage of a task, or else when `main` returns.
    """

    def __init__(self) -> None:
        self.is_active = False
        self.node_id = 0
        self.name = "standalone"
        self.labels: frozenset[str] = frozenset()
        self.attached_to: tuple[str, ...] = ()
        self.retries = 0
        self.message_bytes = 0  # size of the message that is being heard; for listeners, in the thread that hears
        self.failure: BaseException | None = None
        self.on_failure: list[Callable[[], None]] = []
        self._links: dict[str, Link] = {}
        self._lasting: dict[str, Message] = {}  # topic -> what a peer that comes later has to know
        self._sending = threading.Lock()
        self._inbox: Inbox | None = None
        self._topics = ReplayingLoop("router", self.post)

    def __reduce__(self) -> tuple:
        return current_router, ()  # wherever it is sent, it is the router of that process

    # -- membership: called by the process's host

    def activate(self, node_id: int, *, name: str, labels: Iterable[str], attached_to: Iterable[str]) -> None:
        """Become a member of a group. From here on messages are taken."""
        self.is_active, self.node_id, self.name = True, node_id, name
        self.labels, self.attached_to = frozenset(labels), tuple(attached_to)
        self._inbox = Inbox(self._hear, self.fail)

    def connect(self, peer: str, deliver: Callable[[str, int, Message], Any]) -> None:
        """Send to this peer too, in place of an earlier process of its name, and tell it what lasts."""
        link = Link(peer, stream=f"{self.name}#{uuid.uuid4().hex}", deliver=deliver)
        with self._sending:
            self._links[peer] = link
            for message in self._lasting.values():
                link.send(message)

    def deliver(self, stream: str, number: int, message: Message) -> None:
        """Take a message from a peer."""
        if self._inbox is not None:
            self._inbox.deliver(stream, number, message)

    def begin(self, retries: int) -> None:
        """`main` is about to be called."""
        self.retries = retries
        self._lasting.clear()

    def end(self) -> None:
        """`main` is over: forget who listens, and raise what no listener's emitter could be told."""
        failure, self.failure = self.failure, None
        self.on_failure.clear()
        self._topics = ReplayingLoop("router", self.post)
        if failure is not None:
            raise failure

    # -- events

    def on(self, topic: str, fn: ListenerFn) -> None:
        """Call `fn` with every message that a peer emits under `topic`."""
        self._topics.on(topic, fn)

    def once(self, topic: str, fn: ListenerFn) -> None:
        """Call `fn` with the next message under `topic` only."""
        self._topics.once(topic, fn)

    def off(self, topic: str, fn: ListenerFn | None = None) -> None:
        """Forget `fn`, or every listener, of the topics that match the glob `topic`."""
        self._topics.off(topic, fn)

    def emit(self, topic: str, *args: Any, **kwargs: Any) -> None:
        """Send to all peers, as the arguments are now.

        Not to this process itself. Nothing happens where there are no peers.
        """
        self.send(topic, args, kwargs)

    def send(self, topic: str, args: tuple, kwargs: dict, *, newest_only: bool = False, lasting: bool = False) -> None:
        """`emit`.

        newest_only: an older message that was not heard yet need not be. lasting: peers that come later hear it first.
        """
        self.raise_failure()
        if not self._links and not (lasting and self.is_active):
            return
        try:
            message = Message(topic, pack((args, kwargs)), newest_only)
        except Exception as error:
            error.add_note(f"while {self.name} packed what it emits as {topic!r}: everything in it has to be picklable")
            raise
        with self._sending:
            if lasting:
                self._lasting[topic] = message
            for link in self._links.values():
                link.send(message)

    def post(self, function: Callable[[], None]) -> None:
        """Call `function` in the thread in which messages are heard, behind those that wait; at once where there is no
        such thread.
        """
        if self._inbox is None:
            function()
        else:
            self._inbox.post(function)

    def flush(self) -> None:
        """Return when what has arrived by now has been heard."""
        if self._inbox is not None:
            self._inbox.flush(HEARING_TIMEOUT_S)

    def settle(self) -> None:
        """Everybody who wants to listen does: nothing more is kept for those who come later."""
        self._topics.settle()

    def _hear(self, message: Message, args: tuple, kwargs: dict) -> None:
        self.message_bytes = message.parcel.num_bytes
        self._topics.replay(
            message.topic, args, kwargs, num_bytes=message.parcel.num_bytes, newest_only=message.newest_only
        )

    def fail(self, error: BaseException) -> None:
        """Remember what a listener raised for the next who can raise it."""
        logger.error("%s: hearing a message failed: %r", self.name, error, exc_info=error)
        if self.failure is None:
            self.failure = error
        for hook in tuple(self.on_failure):
            hook()

    def raise_failure(self) -> None:
        """Raise what a listener raised, once."""
        if self.failure is not None:
            failure, self.failure = self.failure, None
            raise failure


_ROUTER = Router()


def current_router() -> Router:
    """Return this process's router."""
    return _ROUTER
