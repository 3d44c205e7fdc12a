"""Heartbeat server: the master's end of the connections from all processes of a job.

Messages are lines of JSON, received in the master's one thread. The other end is
`single_controller/monitoring/heartbeat_client.py`.
"""

import selectors
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hybridrl.system.json_lines import MessageReader, send_message

MAX_LINE_BYTES = 4 * 1024**2
SEND_TIMEOUT_S = 1.0


@dataclass(eq=False)
class Connection:
    """Connection of one process. hello: its first message; empty until it arrived."""

    socket: socket.socket
    hello: dict[str, Any] = field(default_factory=dict)
    reader: MessageReader = field(default_factory=MessageReader)

    def send(self, message: Mapping[str, Any]) -> None:
        """Send a message, or drop it.

        If sending fails, the connection is broken too; the next `poll` reports its end.
        """
        try:
            self.socket.settimeout(SEND_TIMEOUT_S)
            send_message(self.socket, message)
        except OSError:
            return
        finally:
            self.socket.setblocking(False)


class HeartbeatServer:
    """Listens at `host` on a free port. Rejects processes whose first message lacks the token."""

    def __init__(self, host: str, *, token: str) -> None:
        self._token = token
        self._listener = socket.create_server((host, 0), backlog=1024)
        self._listener.setblocking(False)
        self.port: int = self._listener.getsockname()[1]
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)

    def __len__(self) -> int:
        return len(self._selector.get_map()) - 1

    def poll(self, timeout_s: float) -> list[tuple[Connection, dict[str, Any] | None]]:
        """Wait at most `timeout_s` and return the received messages.

        Returns:
            Pairs of connection and message. The message is None where a connection has ended.
        """
        messages: list[tuple[Connection, dict[str, Any] | None]] = []
        for key, _ in self._selector.select(timeout_s):
            if key.data is None:
                self._accept()
            else:
                messages += [(key.data, message) for message in self._read(key.data)]
        return messages

    def _accept(self) -> None:
        while True:
            try:
                accepted, _ = self._listener.accept()
            except OSError:  # no further connection waits
                return
            accepted.setblocking(False)
            self._selector.register(accepted, selectors.EVENT_READ, Connection(accepted))

    def _read(self, connection: Connection) -> list[dict[str, Any] | None]:
        try:
            data = connection.socket.recv(65536)
        except BlockingIOError:
            return []
        except OSError:
            data = b""
        messages: list[dict[str, Any] | None] = []
        try:
            for message in connection.reader.messages(data):
                if not connection.hello:
                    connection.hello = self._authenticate(message)
                messages.append(message)
        except (ValueError, KeyError, TypeError):
            data = b""  # not a process of this job
        if not data or connection.reader.num_pending > MAX_LINE_BYTES:
            self._close(connection)
            if connection.hello:
                messages.append(None)
        return messages

    def _authenticate(self, message: dict[str, Any]) -> dict[str, Any]:
        hello = dict(message["hello"])
        if hello.pop("token") != self._token:
            raise ValueError("the token is of another master")
        return hello

    def _close(self, connection: Connection) -> None:
        self._selector.unregister(connection.socket)
        connection.socket.close()

    def close(self) -> None:
        """Close all connections and the listener."""
        for key in list(self._selector.get_map().values()):
            key.fileobj.close()  # type: ignore[union-attr]
        self._selector.close()
