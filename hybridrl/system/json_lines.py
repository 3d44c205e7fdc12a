"""Messages between two processes over a stream socket: one JSON object per line, of bounded length."""

import json
import socket
from collections.abc import Iterator, Mapping
from typing import Any

RECEIVE_BYTES = 65536  # per call of the kernel
MAX_LINE_BYTES = 4 * 1024**2


def send_message(connection: socket.socket, message: Mapping[str, Any]) -> None:
    """Send one message.

    Raises:
        OSError: The peer is gone.
    """
    connection.sendall(json.dumps(message).encode() + b"\n")


class MessageReader:
    """Splits the bytes that arrive on one connection into messages.

    Attributes:
        max_line_bytes: Longest message; may be changed at any time.
        num_pending: Bytes of a message whose end has not arrived.
    """

    def __init__(self, max_line_bytes: int = MAX_LINE_BYTES) -> None:
        self.max_line_bytes = max_line_bytes
        self._pending: list[bytes] = []  # parts of a message whose end has not arrived
        self.num_pending = 0

    def messages(self, data: bytes) -> Iterator[dict[str, Any]]:
        """Yield the messages that `data` completes, in the order in which they were sent.

        Raises:
            ValueError: A line is not a JSON object, or is longer than `max_line_bytes`. What is left of `data` is lost.
        """
        *lines, rest = data.split(b"\n")
        for line in lines:
            whole = b"".join([*self._pending, line])
            self._pending, self.num_pending = [], 0
            yield self._parse(whole)
        self._pending.append(rest)
        self.num_pending += len(rest)
        if self.num_pending > self.max_line_bytes:
            raise ValueError(f"a message is longer than {self.max_line_bytes} bytes")

    def _parse(self, line: bytes) -> dict[str, Any]:
        if len(line) > self.max_line_bytes:
            raise ValueError(f"a message is longer than {self.max_line_bytes} bytes")
        try:
            message = json.loads(line)
        except RecursionError as error:
            raise ValueError("a message is nested too deeply") from error
        if not isinstance(message, dict):
            raise ValueError(f"a message is a {type(message).__name__}, not an object")
        return message
