"""The master's end of the heartbeats: lines of JSON from every process of the job, in one thread."""

import json
import selectors
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

LONGEST_LINE = 4 * 1024**2
SEND_TIMEOUT_S = 1.0


@dataclass(eq=False)
class Connection:
    """One process's. introduction: its first word; empty until it has spoken."""

    socket: socket.socket
    introduction: dict[str, Any] = field(default_factory=dict)
    received: bytes = b""

    def send(self, message: Mapping[str, Any]) -> None:
        """Send a word; one that cannot be sent is lost, as the connection is, which the next look will show."""
        try:
            self.socket.settimeout(SEND_TIMEOUT_S)
            self.socket.sendall(json.dumps(message).encode() + b"\n")
        except OSError:
            return
        finally:
            self.socket.setblocking(False)


class Connections:
    """Listens at `host` on a port of its own.

    A process that does not show the token with its first word is not heard.
    """

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
        """Wait for words, at most so long; return them, with None where a connection has ended."""
        words: list[tuple[Connection, dict[str, Any] | None]] = []
        for key, _ in self._selector.select(timeout_s):
            if key.data is None:
                self._accept()
            else:
                words += [(key.data, word) for word in self._read(key.data)]
        return words

    def _accept(self) -> None:
        while True:
            try:
                accepted, _ = self._listener.accept()
            except OSError:  # nobody else knocks
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
        *lines, connection.received = (connection.received + data).split(b"\n")
        words: list[dict[str, Any] | None] = []
        try:
            for line in lines:
                word = json.loads(line)
                if not connection.introduction:
                    connection.introduction = self._admit(word)
                words.append(word)
        except (ValueError, KeyError, TypeError):
            data = b""  # not one of ours
        if not data or len(connection.received) > LONGEST_LINE:
            self._close(connection)
            if connection.introduction:
                words.append(None)
        return words

    def _admit(self, word: dict[str, Any]) -> dict[str, Any]:
        introduction = dict(word["hello"])
        if introduction.pop("token") != self._token:
            raise ValueError("the token is of another master")
        return introduction

    def _close(self, connection: Connection) -> None:
        self._selector.unregister(connection.socket)
        connection.socket.close()

    def close(self) -> None:
        """Close everything."""
        for key in list(self._selector.get_map().values()):
            key.fileobj.close()  # type: ignore[union-attr]
        self._selector.close()
