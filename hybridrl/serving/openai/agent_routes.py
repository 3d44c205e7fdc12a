"""Routes of sessions and of episodes, besides the session's chat.

    GET    /sessions/NAME               rows and counts
    POST   /sessions/NAME/v1/reward     {"reward": 1.0}, and for the conversation of one answer its "id"
    DELETE /sessions/NAME
    POST   /v1/episodes                 {"wait_s": 20}    the next row with its session; status 204 if none is offered
    POST   /v1/episodes/NAME/end        {"reward": 1.0}, {} for the run's reward function, or {"error": "..."}

A program outside claims an episode and ends it; the agent loop `outside_agent` offers the rows. Used by `server`, on
the router's event loop.
"""

import asyncio
import time
from typing import Any

from aiohttp import web

from hybridrl.rewards.sample_score import as_number, is_reward
from hybridrl.serving.openai.connections import Connections
from hybridrl.serving.openai.parameters import RequestError, shorten
from hybridrl.serving.openai.requests import read_json
from hybridrl.serving.sessions.episodes import EndOfEpisode, EpisodeQueue, row_as_json
from hybridrl.serving.sessions.rows import session_rows
from hybridrl.serving.sessions.session import Session, SessionEnded
from hybridrl.serving.sessions.store import SessionStore

HEADER = "X-Session-Id"
MAX_WAIT_S = 60.0
POLL_PERIOD_S = 0.05
MAX_ERROR_CHARACTERS = 2000
SHOWN = ("prompt_ids", "response_ids", "response_mask", "response_logprobs", "token_versions", "turns", "own_turns")
WANTED = "a finite one of float32"


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
    """Return the routes of sessions."""

    async def read(request: web.Request) -> web.Response:
        session = _required(request, store)
        body = {
            "session": session.name,
            "reward": session.reward,
            "counts": dict(session.counts),
            "rows": [{name: getattr(row, name) for name in SHOWN} for row in session_rows(session.turns)],
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

    path = "/sessions/{session}"
    return [web.get(path, read), web.delete(path, end), web.post(f"{path}/v1/reward", post_reward)]


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
        body = read_json(raw)
    except RequestError:
        body = {}
    reward, answer = _finite(body.get("reward")), body.get("id")
    if reward is None or isinstance(body["reward"], bool):
        raise RequestError(f'the body is {shorten(raw)}; send {{"reward": NUMBER}}, {WANTED}', param="reward")
    if not isinstance(answer, str | None):
        raise RequestError(f"id={shorten(answer)}: must be the id of an answer", param="id")
    return reward, answer


def _finite(value: Any) -> float | None:
    """Return a value as a number; None if it is not finite, or too large for float32."""
    number = as_number(value)
    return number if number is not None and is_reward(number) else None


def episode_routes(queue: EpisodeQueue, connections: Connections, *, model: str) -> list[web.RouteDef]:
    """Return the routes of episodes. model: name of the policy."""

    async def claim(request: web.Request) -> web.Response:
        """Let a program claim an episode.

        Consumes: The oldest offer.
        Waits for: An offer, up to `wait_s` seconds, looking every `POLL_PERIOD_S` seconds.
        Unblocked by: `EpisodeQueue.offer` of an agent loop.
        """
        wait_s = _wait_in(await connections.read_body(request))
        until = time.monotonic() + wait_s
        while (episode := queue.claim()) is None:
            if time.monotonic() >= until:
                return web.Response(status=204)
            await asyncio.sleep(POLL_PERIOD_S)
        name = episode.session.name
        url = f"{request.url.origin()}/sessions/{name}"
        urls = {"base_url": f"{url}/v1", "anthropic_base_url": url}
        return web.json_response(text=row_as_json({"session": name, **urls, "model": model, "row": episode.row}))

    async def end(request: web.Request) -> web.Response:
        name = request.match_info["session"]
        said = _end_in(await connections.read_body(request))
        try:
            queue.end(name, said)
        except KeyError:
            raise RequestError(
                f"episode {name[:80]!r} is not open: it has ended, its deadline has passed, or nobody has claimed it",
                status=410,
            ) from None
        return web.json_response({"session": name, "reward": said.reward})

    return [web.post("/v1/episodes", claim), web.post("/v1/episodes/{session}/end", end)]


def _wait_in(raw: bytes) -> float:
    body = read_json(raw) if raw else {}
    wait_s = as_number(body.get("wait_s", 0))
    if body.keys() - {"wait_s"} or wait_s is None or not 0 <= wait_s <= MAX_WAIT_S:
        raise RequestError(f'the body is {shorten(raw)}; send {{"wait_s": SECONDS}}, at most {MAX_WAIT_S:g}')
    return wait_s


def _end_in(raw: bytes) -> EndOfEpisode:
    """Return what a body says. Raises RequestError for anything else."""
    body = read_json(raw) if raw else {}
    reward, error = _finite(body.get("reward")), body.get("error")
    is_reward = body.get("reward") is None or reward is not None
    if body.keys() - {"reward", "error"} or not isinstance(error, str | None) or not is_reward:
        raise RequestError(
            f'the body is {shorten(raw)}; send {{"reward": NUMBER}}, {WANTED}, {{}}, or {{"error": TEXT}}'
        )
    return EndOfEpisode(reward, None if error is None else error[:MAX_ERROR_CHARACTERS])
