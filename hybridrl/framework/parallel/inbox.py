"""Receive messages of other processes in order, and handle them in one thread.

`PeerRouter` owns one inbox. A stream is the connection of one sender. Its messages are numbered from 0 and are handled
in that order, whatever the order of arrival. This module does not interpret the contents.
"""

import threading
from collections.abc import Callable

from hybridrl.errors import CallTimeout
from hybridrl.framework.parallel.message_queue import Message, MessageQueue


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
        self._items = MessageQueue("listeners are slower than the events of their peers")
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="inbox", daemon=True)
        self._thread.start()

    def deliver(self, stream: str, number: int, message: Message) -> None:
        """Accept message `number` of a stream."""
        with self._changed:
            out_of_order = self._out_of_order.setdefault(stream, {})
            out_of_order[number] = message
            while (expected := self._expected.get(stream, 0)) in out_of_order:
                self._items.put(out_of_order.pop(expected), stream=stream)
                self._expected[stream] = expected + 1
            self._changed.notify_all()

    def post(self, function: Callable[[], None]) -> None:
        """Call `function` in the inbox's thread, after everything that is queued now."""
        with self._changed:
            self._items.put_call(function)
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
                item = self._items.pop()
            try:
                if isinstance(item, Message):
                    self._load_and_handle(item)
                else:
                    item()
            except BaseException as error:  # also a listener's SystemExit: this thread must not end
                self._on_error(error)
            del item  # do not keep the message alive

    def _load_and_handle(self, message: Message) -> None:
        try:
            args, kwargs = message.contents.load()
        except Exception as error:
            error.add_note(f"while loading a message for {message.name!r}")
            raise
        self._handle(message, args, kwargs)
