"""Routes of a session besides its chat: its rows, its reward, its end.

    GET    /sessions/NAME              rows and counts
    POST   /sessions/NAME/v1/reward    {"reward": 1.0}, and for the conversation of one answer its "id"
    DELETE /sessions/NAME

Used by `server`, on the router's event loop.
"""

import json
import math
from collections.abc import Awaitable, Callable
from dataclasses import asdict

from aiohttp import web

from hybridrl.serving.openai.connections import Connections
from hybridrl.serving.openai.parameters import RequestError, shorten
from hybridrl.serving.sessions.rows import session_rows
from hybridrl.serving.sessions.session import Session, SessionEnded
from hybridrl.serving.sessions.store import SessionStore

HEADER = "X-Session-Id"


def session_of(request: web.Request, store: SessionStore) -> Session | None:
    """Return the session that a request names in its URL or its header; None without one.

    Raises:
        RequestError: The name is none, or the session has ended.
    """
    name = request.match_info.get("session") or request.headers.get(HEADER)
    if name is None:
        return None
    try:
        return store.find(name)
    except SessionEnded as error:
        raise RequestError(str(error), status=410) from error
    except ValueError as error:
        raise RequestError(str(error), param=HEADER) from error


def session_routes(store: SessionStore, connections: Connections) -> list[web.RouteDef]:
    """Return the routes above."""

    async def read(request: web.Request) -> web.Response:
        session = _required(request, store)
        body = {
            "session": session.name,
            "reward": session.reward,
            "counts": dict(session.counts),
            "rows": [asdict(row) for row in session_rows(session.turns)],
        }
        return web.json_response(body)

    async def post_reward(request: web.Request) -> web.Response:
        session = _required(request, store)
        reward, answer = _reward_in(await connections.read_body(request))
        if answer is None:
            session.reward = reward
        else:
            _reward_answer(session, answer, reward)
        return web.json_response({"session": session.name, "reward": reward})

    async def end(request: web.Request) -> web.Response:
        session = _required(request, store)
        if session.episode is not None:
            raise RequestError(f"session {session.name!r} ends with its agent loop", status=403)
        store.close(session.name)
        return web.json_response({"session": session.name})

    handlers: dict[str, Callable[[web.Request], Awaitable[web.StreamResponse]]]
    handlers = {"get": read, "delete": end}
    routes = [getattr(web, method)("/sessions/{session}", handler) for method, handler in handlers.items()]
    return [*routes, web.post("/sessions/{session}/v1/reward", post_reward)]


def _required(request: web.Request, store: SessionStore) -> Session:
    session = session_of(request, store)
    assert session is not None  # the routes have its name
    return session


def _reward_answer(session: Session, answer: str, reward: float) -> None:
    try:
        session.reward_answer(answer, reward)
    except KeyError:
        raise RequestError(
            f"session {session.name!r} has no answer with the id {shorten(answer)}; send that of one of its answers, "
            "or leave id out",
            param="id",
        ) from None


def _reward_in(raw: bytes) -> tuple[float, str | None]:
    """Return the number in a body, and the id of an answer or None. Raises RequestError for anything else."""
    try:
        body = json.loads(raw)
        value, answer = (body["reward"], body.get("id")) if isinstance(body, dict) else (None, None)
    except (ValueError, KeyError, RecursionError):
        value, answer = None, None
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise RequestError(f'the body is {shorten(raw)}; send {{"reward": NUMBER}}, a finite one', param="reward")
    if not isinstance(answer, str | None):
        raise RequestError(f"id={shorten(answer)}: must be the id of an answer", param="id")
    return float(value), answer
