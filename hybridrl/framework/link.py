"""The way to one peer. Messages are numbered, and only so many are on their way: whoever sends faster than the peer takes has to wait."""

from collections.abc import Callable
from typing import Any

from hybridrl.errors import CallTimeout
from hybridrl.framework.inbox import Message

# A message is on its way until it stands in the peer's inbox, about a millisecond, whatever the peer's own code is doing.
MAX_ON_THE_WAY = 256
MAX_NEWEST_ON_THE_WAY = 2  # of messages that make older ones worthless, more are memory for nothing
SEND_TIMEOUT_S = 300.0


class Link:
    """deliver: called with stream, number and message; returns a Ray reference that is ready once the peer has the message or is dead."""

    def __init__(self, peer: str, *, stream: str, deliver: Callable[[str, int, Message], Any]) -> None:
        self.peer, self._stream, self._deliver = peer, stream, deliver
        self._number = 0
        self._on_the_way: dict[bool, list] = {False: [], True: []}  # newest_only -> references

    def send(self, message: Message) -> None:
        """Send behind what was sent before. A dead peer hears nothing, and that is no error here: whoever started it knows.

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
            raise CallTimeout(f"{self.peer} took none of the last {len(pending)} messages within {SEND_TIMEOUT_S:g} s; is it stopped?")
        self._on_the_way[newest_only] = rest
