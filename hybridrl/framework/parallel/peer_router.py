"""Messages between this process and its peers.

Importing this module makes a `PeerRouter` the router of the process. It is active in processes that `Parallel.runner`
started; elsewhere it sends and receives nothing. `process_group.py` decides who the peers are.
"""

import logging
import threading
import uuid
from collections.abc import Callable, Iterable
from typing import Any

from hybridrl.framework.events import ListenerFn
from hybridrl.framework.events.event_loop import ReplayingLoop
from hybridrl.framework.events.local_peers import LocalPeers, install_router
from hybridrl.framework.parallel.inbox import Inbox
from hybridrl.framework.parallel.message import serialize
from hybridrl.framework.parallel.message_queue import Message
from hybridrl.framework.parallel.outbox import Link, Outbox

logger = logging.getLogger(__name__)

# Listeners are quick; one that takes longer is in a deadlock.
LISTENER_TIMEOUT_S = 60.0
DRAIN_TIMEOUT_S = 5.0  # for messages that still wait for a slow peer when `main` has ended


class PeerRouter(LocalPeers):
    """Sends events to peers and passes received ones to listeners.

    Messages of one sender are handled in the order in which they were sent, in the router's own thread. Messages that
    arrive before their first listener are buffered. An exception of a listener is raised by the next call that can
    raise it: `emit`, the next stage of a task, or the end of `main`.
    """

    def __init__(self) -> None:
        super().__init__()
        self._outbox = Outbox()
        self._retained: dict[str, Message] = {}  # topic -> message for peers that connect later
        self._send_lock = threading.Lock()  # all peers receive the messages of several threads in the same order
        self._inbox: Inbox | None = None
        self._topics = ReplayingLoop("router", self.post)

    # -- lifecycle, called by `GroupMember`

    def activate(self, node_id: int, *, name: str, labels: Iterable[str], attached_to: Iterable[str]) -> None:
        """Join a group; messages are accepted from here on."""
        self.is_active, self.node_id, self.name = True, node_id, name
        self.labels, self.attached_to = frozenset(labels), tuple(attached_to)
        self._inbox = Inbox(self._on_message, self.record_failure)

    def connect(self, peer: str, deliver: Callable[[str, int, Message], Any]) -> None:
        """Add a peer and send it the retained messages.

        An earlier process of the same name is replaced.
        """
        link = Link(peer, stream=f"{self.name}#{uuid.uuid4().hex}", deliver=deliver)
        with self._send_lock:
            self._outbox.connect(peer, link, tuple(self._retained.values()))

    def deliver(self, stream: str, number: int, message: Message) -> None:
        """Accept a message from a peer."""
        if self._inbox is not None:
            self._inbox.deliver(stream, number, message)

    def start_run(self, retries: int) -> None:
        """Prepare for a call of `main`."""
        self.retries = retries
        self._retained.clear()

    def finish_run(self) -> None:
        """Remove all listeners after `main`, and raise a failure that was not raised yet."""
        self._outbox.drain(DRAIN_TIMEOUT_S)
        failure, self.failure = self.failure, None
        self.finish_hooks.clear()
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
        """Remove `fn`, or every listener, from the topics that match the glob `topic`."""
        self._topics.off(topic, fn)

    def emit(self, topic: str, *args: Any, newest_only: bool = False, **kwargs: Any) -> None:
        """Send the arguments, in their present state, to all peers but not to this process.

        With `newest_only` they replace those of earlier calls that a peer has not handled yet.
        """
        self.send(topic, args, kwargs, newest_only=newest_only)

    def register_rpc(self, name: str, fn: ListenerFn) -> None:
        """Call `fn` whenever a peer calls `send_rpc(name)`, in place of an earlier function.

        A name of DI-engine v0.2.3, as is `send_rpc`.
        """
        self.off(name)
        self.on(name, fn)

    def unregister_rpc(self, name: str) -> None:
        """Remove the function of `register_rpc`."""
        self.off(name)

    def send_rpc(self, name: str, *args: Any, **kwargs: Any) -> None:
        """Have all peers call the function that they registered as `name`."""
        self.send(name, args, kwargs)

    def send(
        self,
        topic: str,
        args: tuple,
        kwargs: dict,
        *,
        event: str = "",
        newest_only: bool = False,
        retained: bool = False,
    ) -> None:
        """Send a message to all peers, without waiting for them.

        Args:
            topic: Topic of the message.
            args: Positional arguments of the listeners.
            kwargs: Keyword arguments of the listeners.
            event: Name within the topic.
            newest_only: An older message of this topic and event that was not handled yet may be dropped.
            retained: Peers that connect later receive it first.
        """
        self.raise_failure()
        if not len(self._outbox) and not (retained and self.is_active):
            return
        try:
            message = Message(topic, serialize((args, kwargs)), event, newest_only)
        except Exception as error:
            error.add_note(f"{self.name} cannot send its event {event or topic!r}: all arguments must be picklable")
            raise
        with self._send_lock:
            if retained:
                self._retained[topic] = message
            self._outbox.send(message)

    def post(self, function: Callable[[], None]) -> None:
        """Call `function` in the thread that handles messages, after the waiting ones.

        Without such a thread it is called at once.
        """
        if self._inbox is None:
            function()
        else:
            self._inbox.post(function)

    def flush(self) -> None:
        """Return when all messages that have arrived are handled."""
        if self._inbox is not None:
            self._inbox.flush(LISTENER_TIMEOUT_S)

    def stop_buffering(self) -> None:
        """Stop buffering messages for late listeners."""
        self._topics.stop_buffering()

    def _on_message(self, message: Message, args: tuple, kwargs: dict) -> None:
        self.message_bytes = message.contents.num_bytes
        self._topics.emit_and_buffer(
            message.topic,
            args,
            kwargs,
            num_bytes=message.contents.num_bytes,
            newest_only=message.newest_only,
            key=message.event,
        )


_ROUTER = PeerRouter()
install_router(_ROUTER)


def peer_router() -> PeerRouter:
    """Return the router of this process."""
    return _ROUTER
