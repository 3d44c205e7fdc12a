"""Messages between two processes over a stream socket: one JSON object per line."""

import json
import socket
from collections.abc import Iterator, Mapping
from typing import Any

RECEIVE_BYTES = 65536  # per call of the kernel


def send_message(connection: socket.socket, message: Mapping[str, Any]) -> None:
    """Send one message.

    Raises:
        OSError: The peer is gone.
    """
    connection.sendall(json.dumps(message).encode() + b"\n")


class MessageReader:
    """Splits the bytes that arrive on one connection into messages.

    Attributes:
        num_pending: Bytes of a message whose end has not arrived.
    """

    def __init__(self) -> None:
        self._pending = b""

    @property
    def num_pending(self) -> int:
        return len(self._pending)

    def messages(self, data: bytes) -> Iterator[dict[str, Any]]:
        """Yield the messages that `data` completes, in the order in which they were sent.

        Raises:
            ValueError: A line is not JSON.
        """
        *lines, self._pending = (self._pending + data).split(b"\n")
        for line in lines:
            yield json.loads(line)
