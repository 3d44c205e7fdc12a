"""The web server of the page: files of the page, JSON for its views, and a stream of events.

It answers GET only and writes nothing. A loopback address needs no token. On any other address a request needs the
token from the link that `hybridrl view` prints. Readers run in threads, one request at a time per run. aiohttp is the
web framework: the OpenAI-compatible endpoint uses it, so every installation has it.
"""

import asyncio
import hmac
import json
import logging
import math
import secrets
import socket
from collections.abc import Awaitable, Callable, Mapping
from importlib.resources import files
from typing import Any

from aiohttp import web

from hybridrl.errors import ConfigError
from hybridrl.system.web_origin import is_loopback, refusal
from hybridrl.view.answers import UNLOCKED, VIEWS, BadRequest
from hybridrl.view.runs import Run

logger = logging.getLogger(__name__)
SVG = "image/svg+xml"
COOKIE, TOKEN_PARAMETER = "hybridrl_view", "token"
TYPES = {"html": "text/html", "js": "text/javascript", "css": "text/css", "LICENSE": "text/plain"}  # by suffix
EVENT_PERIOD_S = 1.0  # between two looks at the runs
KEEP_ALIVE_S = 15.0
MAX_STREAMS = 64
BACKLOG = 64
HEADERS = {
    # The page runs its own scripts only: a sample with <script> in it stays text.
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class ViewServer:
    """The page of some runs.

    Args:
        runs: Id -> run.
        host: Address to listen at. Other than a loopback address it makes a token necessary.
        port: 0: any free one.
    """

    def __init__(self, runs: Mapping[str, Run], *, host: str, port: int) -> None:
        self._runs, self.host, self._port = runs, host, port
        self.token = None if is_loopback(host) else secrets.token_urlsafe(24)
        self._num_streams = 0

    def take_port(self) -> None:
        """Take the port.

        Raises:
            ConfigError: The port is in use, or the address is not of this machine.
        """
        family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
        try:
            self._socket = socket.create_server((self.host, self._port), family=family, backlog=BACKLOG)
        except OSError as error:
            raise ConfigError(
                f"--host {self.host} --port {self._port}: cannot listen there ({error.strerror or error}); choose "
                "another port, or --port 0 for any free one"
            ) from error
        self._port = self._socket.getsockname()[1]

    @property
    def _cookie(self) -> str:
        return f"{COOKIE}_{self._port}"  # cookies do not know ports

    @property
    def link(self) -> str:
        """What to open in a browser."""
        name = socket.gethostname() if self.host in ("0.0.0.0", "::") else self.host
        name = f"[{name}]" if ":" in name else name
        query = "" if self.token is None else f"?{TOKEN_PARAMETER}={self.token}"
        return f"http://{name}:{self._port}/{query}"

    def serve(self) -> None:
        """Serve until Ctrl-C, after `take_port`."""
        settings: dict[str, Any] = {"access_log": None, "shutdown_timeout": 1.0, "auto_decompress": False}
        web.run_app(self.application(), sock=self._socket, print=None, **settings)

    def application(self) -> web.Application:
        """Return the web application."""
        application = web.Application(middlewares=[self._guarded])
        application.router.add_get("/", self._page)
        application.router.add_get("/page/{name}", self._page)
        application.router.add_get("/api/runs", self._list_runs)
        application.router.add_get("/api/events", self._events)
        application.router.add_get("/api/runs/{run}/{view}", self._view)
        return application

    @web.middleware
    async def _guarded(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Check who asks, and answer mistakes in JSON."""
        in_link = request.query.get(TOKEN_PARAMETER)
        try:
            self._check_access(request, sent=in_link or request.cookies.get(self._cookie, ""))
            response = self._without_token() if in_link and self.token else await handler(request)
        except BadRequest as error:
            response = _json({"error": str(error)}, status=error.status)
        except web.HTTPException as error:
            response = _json({"error": error.reason}, status=error.status)
        except Exception:
            logger.exception("%s could not be answered", request.path)
            response = _json({"error": "the server failed; its terminal says why"}, status=500)
        if not response.prepared:
            for name, value in HEADERS.items():
                response.headers.setdefault(name, value)
        return response

    def _check_access(self, request: web.Request, *, sent: str) -> None:
        """Raise BadRequest for a request of another origin, or without the token. sent: that of its link or cookie."""
        if (reason := refusal(request.headers, listens_on=self.host)) is not None:
            raise BadRequest(reason, status=403)
        if request.headers.get("Sec-Fetch-Site") == "cross-site" and request.path != "/":
            raise BadRequest("web pages of other sites may not load parts of this one", status=403)
        if self.token is not None and not hmac.compare_digest(sent.encode("utf-8", "replace"), self.token.encode()):
            what = "the token is wrong or missing; open the link that `hybridrl view` has printed"
            raise BadRequest(what, status=401)

    def _without_token(self) -> web.Response:
        """Return a redirection that leaves the token in a cookie, and not in the browser's history."""
        response = web.Response(status=303, headers={"Location": "/"})
        response.set_cookie(self._cookie, self.token or "", httponly=True, samesite="Lax")
        return response

    async def _page(self, request: web.Request) -> web.Response:
        name = request.match_info.get("name", "index.html")
        folder = files("hybridrl.view") / "page"
        if name not in {file.name for file in folder.iterdir()}:
            raise BadRequest(f"there is no {name}", status=404)
        kind = TYPES[name.rsplit(".", 1)[-1]]
        return web.Response(body=(folder / name).read_bytes(), content_type=kind, charset="utf-8")

    async def _list_runs(self, request: web.Request) -> web.Response:
        return _json([await self._read(run, run.summary) for run in self._runs.values()])

    async def _view(self, request: web.Request) -> web.Response:
        run_id, name = request.match_info["run"], request.match_info["view"]
        run, view = self._runs.get(run_id), VIEWS.get(name)
        if run is None:
            raise BadRequest(f"there is no run {run_id}; there are {', '.join(self._runs)}", status=404)
        if view is None:
            raise BadRequest(f"there is no view {name}; there are {', '.join(VIEWS)}", status=404)
        answer = await self._read(run, lambda: view(run, request.query), locks=name not in UNLOCKED)
        if isinstance(answer, bytes):
            return web.Response(
                body=answer,
                content_type=SVG,
                headers={"Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'"},
            )
        return _json(answer)

    async def _read(self, run: Run, read: Callable[[], Any], *, locks: bool = True) -> Any:
        def locked() -> Any:
            with run.lock:
                return read()

        try:
            return await asyncio.to_thread(locked if locks else read)
        except OSError as error:
            raise BadRequest(f"{run.folder.url}: cannot be read ({error.strerror or error})", status=503) from error

    async def _events(self, request: web.Request) -> web.StreamResponse:
        """Send the summary of every run that has changed, as server-sent events, until the client leaves."""
        if self._num_streams >= MAX_STREAMS:
            raise BadRequest("too many open pages; close some", status=503)
        response = web.StreamResponse(headers={**HEADERS, "Content-Type": "text/event-stream"})
        self._num_streams += 1
        try:
            await response.prepare(request)
            await self._send_changes(response)
        except ConnectionError:
            pass
        finally:
            self._num_streams -= 1
        return response

    async def _send_changes(self, response: web.StreamResponse) -> None:
        sent: dict[str, Any] = {}
        quiet_s = 0.0
        while True:
            for run in self._runs.values():
                summary = await self._read(run, run.summary)
                if sent.get(run.run_id) != summary:
                    sent[run.run_id], quiet_s = summary, 0.0
                    await response.write(b"data: " + _text(summary).encode() + b"\n\n")
            if quiet_s >= KEEP_ALIVE_S:
                quiet_s = 0.0
                await response.write(b": still here\n\n")
            await asyncio.sleep(EVENT_PERIOD_S)
            quiet_s += EVENT_PERIOD_S


def _text(value: Any) -> str:
    """Return JSON as browsers read it: numbers that are not finite are texts."""
    try:
        return json.dumps(value, allow_nan=False)
    except ValueError:
        return json.dumps(_finite(value))


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _finite(entry) for name, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(entry) for entry in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _json(value: Any, *, status: int = 200) -> web.Response:
    return web.Response(text=_text(value), status=status, content_type="application/json")
