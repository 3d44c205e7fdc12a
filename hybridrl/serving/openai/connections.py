"""Bounds on connections: their number, the time that they may be silent, and the memory of bodies in transit.

Used by `server`. aiohttp limits the size of headers and of one body; it does not limit how long either takes.
"""

import asyncio
import contextlib
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

from aiohttp import web

from hybridrl.serving.openai.parameters import RequestError

MAX_CONNECTIONS = 512  # without those of episodes, which the training batch bounds
MAX_BODY_BYTES = 16 << 20  # of a request
MAX_BODIES_BYTES = 128 << 20  # of all requests that are being received
IDLE_TIMEOUT_S = 30.0  # for a connection without a request in work: to send a header, or to read an answer
BODY_TIMEOUT_S = 30.0  # to receive a body
SWEEP_PERIOD_S = 1.0
SHUTDOWN_TIMEOUT_S = 2.0  # for open connections to end when the endpoint stops
BACKLOG = 128
REFUSAL = b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"


class Connections:
    """The connections of one endpoint; closes those that are silent for too long."""

    def __init__(self) -> None:
        self._in_work: set[object] = set()  # connections with a request that a handler works on
        self._of_episodes: set[object] = set()
        self._idle_since: dict[object, float] = {}
        self._num_bytes = 0  # of bodies that are being received

    async def serve(self, app: web.Application, host: str, port: int) -> int:
        """Accept connections for an application and return the port. Raises OSError if it is in use."""
        self._runner = web.AppRunner(
            app,
            handler_cancellation=True,
            access_log=None,
            shutdown_timeout=SHUTDOWN_TIMEOUT_S,
            auto_decompress=False,  # aiohttp would on this loop, before a handler has looked at the key
        )
        await self._runner.setup()
        assert self._runner.server is not None  # since `setup`
        self._server = self._runner.server
        loop = asyncio.get_running_loop()
        try:
            self._listener = await loop.create_server(self._protocol, host, port, backlog=BACKLOG)
        except OSError:
            await self._runner.cleanup()
            raise
        self._sweeper = asyncio.create_task(self._sweep())
        return self._listener.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        """Close all connections and accept nothing more."""
        self._listener.close()
        self._sweeper.cancel()
        await self._runner.cleanup()

    @contextlib.contextmanager
    def in_work(self, request: web.Request) -> Iterator[None]:
        """Take a connection as in work during a block."""
        connection = request.protocol
        self._in_work.add(connection)
        self._idle_since.pop(connection, None)
        try:
            yield
        finally:
            self._in_work.discard(connection)

    def exempt(self, request: web.Request) -> None:
        """Do not count this request's connection: many episodes may wait for new weights at a time."""
        self._of_episodes.add(request.protocol)

    async def read_body(self, request: web.Request) -> bytes:
        """Return the body.

        Raises:
            RequestError: It is too large or too slow, or too many others are being received.
        """
        parts, size = [], 0
        if (request.content_length or 0) > MAX_BODY_BYTES:
            raise RequestError(f"the body has more than {MAX_BODY_BYTES >> 20} MB", status=413)
        try:
            async with asyncio.timeout(BODY_TIMEOUT_S):
                async for part in request.content.iter_any():
                    size += len(part)
                    self._num_bytes += len(part)
                    parts.append(part)
                    if size > MAX_BODY_BYTES:
                        raise RequestError(f"the body has more than {MAX_BODY_BYTES >> 20} MB", status=413)
                    if self._num_bytes > MAX_BODIES_BYTES:
                        raise RequestError(
                            "too many large requests at the same time; try again", status=503, retry_after_s=1
                        )
        except TimeoutError:
            raise RequestError(f"the body did not arrive within {BODY_TIMEOUT_S:g} s", status=408) from None
        finally:
            self._num_bytes -= size
        return b"".join(parts)

    def _protocol(self) -> asyncio.Protocol:
        num_counted = sum(connection not in self._of_episodes for connection in self._server.connections)
        return _Refusal() if num_counted >= MAX_CONNECTIONS else self._server()

    async def _sweep(self) -> None:
        """Close idle connections.

        Consumes: The connections that are open.
        Waits for: The next look, `SWEEP_PERIOD_S` seconds later.
        Unblocked by: The time; `close` cancels it.
        """
        while True:
            await asyncio.sleep(SWEEP_PERIOD_S)
            self.close_idle(time.monotonic())

    def close_idle(self, now: float) -> None:
        """Close connections that had no request in work for `IDLE_TIMEOUT_S` seconds at `now` (monotonic)."""
        self._of_episodes.intersection_update(self._server.connections)
        idle = [connection for connection in self._server.connections if connection not in self._in_work]
        self._idle_since = {connection: self._idle_since.get(connection, now) for connection in idle}
        for connection in idle:
            if now - self._idle_since[connection] > IDLE_TIMEOUT_S:
                if connection.transport is not None:
                    connection.transport.abort()
                connection.force_close()


class _Refusal(asyncio.Protocol):
    """A connection above the limit."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.write(REFUSAL)
        transport.close()


async def serve_until_stopped(endpoint: Any, on_start: Callable[[Any], None]) -> None:
    """Start an endpoint, call `on_start` once it listens, and stop it upon Ctrl-C or SIGTERM."""
    stop_requested = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        with contextlib.suppress(ValueError):  # not in the main thread: the caller cancels this coroutine
            asyncio.get_running_loop().add_signal_handler(number, stop_requested.set)
    await endpoint.start()
    on_start(endpoint)
    try:
        await stop_requested.wait()
    finally:
        await endpoint.stop()
