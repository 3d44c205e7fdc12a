"""Heartbeat server: the master's end of the connections from all processes of a job.

Messages are lines of JSON, received in the master's one thread. The other end is
`single_controller/monitoring/heartbeat_client.py`.
"""

import hmac
import logging
import selectors
import socket
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from hybridrl.system.json_lines import MAX_LINE_BYTES, RECEIVE_BYTES, MessageReader, send_message

logger = logging.getLogger(__name__)
SEND_TIMEOUT_S = 1.0
# Limits of a connection whose first message has not arrived: anybody who reaches the port can open one.
HELLO_BYTES, HELLO_TIMEOUT_S = 4096, 5.0
MAX_WITHOUT_HELLO = 1024  # the oldest ones are closed; all processes of a large job may connect at once
MAX_ACCEPTS = 64  # per poll, so that new connections do not delay the messages of old ones
ACCEPT_PAUSE_S = 1.0  # after the process ran out of file descriptors
LOOPBACK = "127.0.0.1"


def needed_host(node_host: str, nodes: Iterable[Mapping[str, Any]]) -> str:
    """Return the address at which a master has to listen.

    It is the loopback address while the cluster has no other machine.

    Args:
        node_host: Address of the master's node.
        nodes: What `ray.nodes()` returns.
    """
    is_alone = all(node["NodeManagerAddress"] == node_host for node in nodes if node["Alive"])
    return LOOPBACK if is_alone else node_host


@dataclass(eq=False)
class Connection:
    """Connection of one process. hello: its first message; empty until it arrived."""

    socket: socket.socket
    hello: dict[str, Any] = field(default_factory=dict)
    reader: MessageReader = field(default_factory=lambda: MessageReader(HELLO_BYTES))
    opened_at: float = field(default_factory=time.monotonic)

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

    host: str
    port: int

    def __init__(self, host: str, *, token: str) -> None:
        self._token = token
        self._selector = selectors.DefaultSelector()
        self._without_hello: dict[Connection, None] = {}  # oldest first
        self._listen(host, socket.create_server((host, 0), backlog=1024))

    def move(self, host: str) -> None:
        """Listen at another address. Connections of the old one stay.

        Raises:
            OSError: It is not possible there; the server listens where it did.
        """
        listener = socket.create_server((host, 0), backlog=1024)
        if not self._accept_again_at:
            self._selector.unregister(self._listener)
        self._listener.close()
        self._listen(host, listener)

    def _listen(self, host: str, listener: socket.socket) -> None:
        self._listener = listener
        self._listener.setblocking(False)
        self.host, self.port = host, self._listener.getsockname()[1]
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._accept_again_at = 0.0  # of the monotonic clock; 0 while accepting

    def __len__(self) -> int:
        return len(self._selector.get_map()) - (not self._accept_again_at)

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
        self._close_silent()
        if self._accept_again_at and time.monotonic() > self._accept_again_at:
            self._selector.register(self._listener, selectors.EVENT_READ)
            self._accept_again_at = 0.0
        return messages

    def _accept(self) -> None:
        for _ in range(MAX_ACCEPTS):
            try:
                accepted, _ = self._listener.accept()
            except BlockingIOError:
                return
            except ConnectionError:  # it ended while it waited
                continue
            except OSError as error:  # out of file descriptors
                logger.warning(
                    "no new connection is accepted for %g s: %s; raise the limit of open files", ACCEPT_PAUSE_S, error
                )
                self._selector.unregister(self._listener)
                self._accept_again_at = time.monotonic() + ACCEPT_PAUSE_S
                return
            accepted.setblocking(False)
            connection = Connection(accepted)
            self._selector.register(accepted, selectors.EVENT_READ, connection)
            self._without_hello[connection] = None

    def _close_silent(self) -> None:
        """Close connections whose first message is late, and the oldest ones if there are too many."""
        for connection in list(self._without_hello):
            too_many = len(self._without_hello) > MAX_WITHOUT_HELLO
            if not too_many and time.monotonic() - connection.opened_at < HELLO_TIMEOUT_S:
                return
            self._close(connection)

    def _read(self, connection: Connection) -> list[dict[str, Any] | None]:
        messages: list[dict[str, Any] | None] = []
        try:
            data = connection.socket.recv(RECEIVE_BYTES)
            for message in connection.reader.messages(data):
                if not connection.hello:
                    self._admit(connection, message)
                messages.append(message)
        except BlockingIOError:
            return []
        except Exception as error:  # whatever one peer sends, the others are heard
            logger.debug("closing a connection to the master: %r", error)
            data = b""
        if not data:
            self._close(connection)
            if connection.hello:
                messages.append(None)
        return messages

    def _admit(self, connection: Connection, message: dict[str, Any]) -> None:
        """Take the first message of a connection.

        Raises ValueError if it lacks this master's token.
        """
        hello = dict(message["hello"])
        if not hmac.compare_digest(str(hello.pop("token")).encode(), self._token.encode()):
            raise ValueError("the token is of another master")
        connection.hello, connection.reader.max_line_bytes = hello, MAX_LINE_BYTES
        del self._without_hello[connection]

    def _close(self, connection: Connection) -> None:
        self._without_hello.pop(connection, None)
        self._selector.unregister(connection.socket)
        connection.socket.close()

    def close(self) -> None:
        """Close all connections and the listener."""
        for key in list(self._selector.get_map().values()):
            key.fileobj.close()  # type: ignore[union-attr]
        self._listener.close()
        self._selector.close()
