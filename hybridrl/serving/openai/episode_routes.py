"""Routes by which a program outside claims an episode and ends it.

    POST /v1/episodes             {"wait_s": 20}    the next row with its session; status 204 if none is offered
    POST /v1/episodes/NAME/end    {"reward": 1.0}, {} for the run's reward function, or {"error": "..."}

Used by `server`, on the router's event loop. The agent loop `outside_agent` offers the rows.
"""

import asyncio
import time

from aiohttp import web

from hybridrl.rewards.sample_score import as_number
from hybridrl.serving.openai.connections import Connections
from hybridrl.serving.openai.parameters import RequestError, shorten
from hybridrl.serving.openai.requests import read_json
from hybridrl.serving.sessions.episodes import EndOfEpisode, EpisodeQueue, row_as_json

MAX_WAIT_S = 60.0
POLL_PERIOD_S = 0.05
MAX_ERROR_CHARACTERS = 2000


def episode_routes(queue: EpisodeQueue, connections: Connections, *, model: str) -> list[web.RouteDef]:
    """Return the routes above. model: name of the policy."""

    async def claim(request: web.Request) -> web.Response:
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
    reward, error = body.get("reward"), body.get("error")
    number = None if reward is None else as_number(reward)
    is_finite = number is not None and abs(number) < float("inf")
    if body.keys() - {"reward", "error"} or not isinstance(error, str | None) or (reward is not None and not is_finite):
        raise RequestError(
            f'the body is {shorten(raw)}; send {{"reward": NUMBER}}, a finite one, {{}}, or {{"error": TEXT}}'
        )
    return EndOfEpisode(number, None if error is None else error[:MAX_ERROR_CHARACTERS])
