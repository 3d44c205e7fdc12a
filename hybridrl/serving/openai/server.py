"""The web application between clients and a `ReplicaRouter`, on the router's event loop. `apis` has their formats.

While the router is paused (a weight push, or the processes train), an open request waits and continues with the new
weights. Its tokens carry the version that sampled them. A new request waits up to `WEIGHTS_TIMEOUT_S` seconds, then it
gets status 503 with `Retry-After`. When a client disconnects, or reads nothing for `WRITE_TIMEOUT_S` seconds, its
responses are aborted.
"""

import asyncio
import json
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Iterator
from contextlib import aclosing, contextmanager
from functools import partial
from typing import Any

from aiohttp import web

from hybridrl.errors import ConfigError, WorkerLost
from hybridrl.serving.agent_loop.tools.tool_threads import ToolHangs, call_in_thread
from hybridrl.serving.continuation import generate_in_chunks
from hybridrl.serving.openai.access import API_KEY_VARIABLE, api_key_of_environment, check_access
from hybridrl.serving.openai.agent_routes import episode_routes, session_of, session_routes
from hybridrl.serving.openai.apis.api import Api, Event
from hybridrl.serving.openai.apis.completions import ChatApi, CompletionsApi
from hybridrl.serving.openai.apis.messages import COUNTED_NAMES, MessagesApi
from hybridrl.serving.openai.apis.responses import ResponsesApi
from hybridrl.serving.openai.choice import Choice
from hybridrl.serving.openai.connections import MAX_BODY_BYTES, Connections
from hybridrl.serving.openai.parameters import RequestError, ServedModel
from hybridrl.serving.openai.requests import CompletionRequest, check_model, plan_chat
from hybridrl.serving.router import ReplicaRouter
from hybridrl.serving.sessions.episodes import EpisodeQueue
from hybridrl.serving.sessions.session import Session
from hybridrl.serving.sessions.store import SessionHost, SessionStore
from hybridrl.system.web_origin import is_loopback
from hybridrl.workers.rollout.requests import TokenOutput

logger = logging.getLogger(__name__)

WEIGHTS_TIMEOUT_S = 60.0  # of a new request, for the router to resume; pushes take seconds, training steps minutes
RETRY_AFTER_S = 10
MAX_OPEN_RESPONSES = 256  # of all clients together; the trainer's own batches have no such limit
STREAM_CHUNK_TOKENS = 16
WRITE_TIMEOUT_S = 30.0  # for a client to read a part of a stream
NUM_PARSERS = 2  # threads that tokenize
PARSE_TIMEOUT_S = 30.0  # of one of them; megabytes take a second

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
COMPLETIONS, CHAT = CompletionsApi(), ChatApi()
MESSAGES, COUNTED_MESSAGES = MessagesApi(), MessagesApi(COUNTED_NAMES)


class Endpoint:
    """Serves http://host:port/v1 from `start` to `stop`.

    Args:
        router: Answers token requests.
        served: The model as clients see it.
        host: Address to listen on.
        port: 0 takes any free port; after `start` the attribute has the real one.
        api_key: What clients must send as `Authorization: Bearer KEY`; default: the environment's, else none.
    """

    def __init__(self, router: ReplicaRouter, served: ServedModel, *, host: str, port: int, api_key: str | None = None):
        self.router, self.served, self.host, self.port = router, served, host, port
        self._api_key = api_key or api_key_of_environment()
        self._started = int(time.time())
        self._num_open = 0
        self._connections = Connections()
        self._responses = ResponsesApi()
        self.sessions, self.episodes = SessionStore(), EpisodeQueue()

    @property
    def session_host(self) -> SessionHost:
        """Return where agents of this machine find their sessions; call after `start`."""
        host = "127.0.0.1" if self.host in ("0.0.0.0", "::") else self.host
        url = f"http://[{host}]:{self.port}" if ":" in host else f"http://{host}:{self.port}"
        return SessionHost(self.sessions, self.episodes, url, self._api_key or "none", self.served.name)

    async def start(self) -> None:
        """Listen. Raises ConfigError if the port is in use."""
        app = web.Application(middlewares=[_format_errors, self._admit], client_max_size=MAX_BODY_BYTES)
        app.add_routes(
            [
                web.get("/health", self._health),
                web.get("/v1/models/{name}", self._model),
                web.post("/v1/completions", partial(self._respond, COMPLETIONS)),
                *(route for session in ("", "/sessions/{session}") for route in self._api_routes(session)),
                *session_routes(self.sessions, self._connections),
                *episode_routes(self.episodes, self._connections, model=self.served.name),
            ]
        )
        try:
            self.port = await self._connections.serve(app, self.host, self.port)
        except OSError as error:
            raise ConfigError(
                f"the endpoint cannot listen on {self.host}:{self.port} ({error.strerror}); choose another port or host"
            ) from error
        self._parsers = asyncio.Semaphore(NUM_PARSERS)
        logger.info("the policy is served at http://%s:%d/v1 as model %r", self.host, self.port, self.served.name)
        if self._api_key is None and not is_loopback(self.host):
            logger.warning("other machines can use the endpoint without a key; set %s to one", API_KEY_VARIABLE)

    async def stop(self) -> None:
        """Close all connections and stop listening."""
        await self._connections.stop()

    @web.middleware
    async def _admit(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Let a request in that may use the endpoint; its connection counts as in work meanwhile."""
        with self._connections.in_work(request):
            check_access(request, listens_on=self.host, api_key=self._api_key)
            return await handler(request)

    # -- routes

    def _api_routes(self, session: str) -> list[web.RouteDef]:
        """Return the routes below a path: that of the endpoint, or that of a session."""
        return [
            web.get(f"{session}/v1/models", self._models),
            web.post(f"{session}/v1/chat/completions", partial(self._respond, CHAT)),
            web.post(f"{session}/v1/responses", partial(self._respond, self._responses)),
            web.post(f"{session}/v1/messages", partial(self._respond, MESSAGES)),
            web.post(f"{session}/v1/messages/count_tokens", self._count_tokens),
        ]

    async def _health(self, _: web.Request) -> web.Response:
        """Report whether the policy generates; status 503 once generation has failed for good."""
        failure = self.router.failure
        state: dict[str, Any] = {
            "generating": failure is None and not self.router.is_paused,
            "open_responses": self._num_open,
        }
        if failure is None:
            return web.json_response(state)
        return web.json_response(state | {"error": f"{type(failure).__name__}: {failure}"}, status=503)

    async def _models(self, _: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [self._card()]})

    async def _model(self, request: web.Request) -> web.Response:
        if (name := request.match_info["name"]) != self.served.name:
            raise RequestError(
                f"there is no model {name!r}; use {self.served.name!r}", code="model_not_found", status=404
            )
        return web.json_response(self._card())

    def _card(self) -> dict[str, Any]:
        served = self.served
        return {
            "id": served.name,
            "object": "model",
            "created": self._started,
            "owned_by": "hybridrl",
            "max_model_len": served.max_length,
        }

    async def _respond(self, api: Api, request: web.Request) -> web.StreamResponse:
        """Handle a request for responses.

        Consumes: The request's body, parsed in another thread.
        Waits for: The body; a router that is not paused, up to `WEIGHTS_TIMEOUT_S` seconds; the policy's answers.
        Unblocked by: The client; `ReplicaRouter.resume`; the replicas' pumps. A client that is gone cancels it.
        """
        session = session_of(request, self.sessions) if api.is_chat else None
        is_episode = session is not None and session.episode is not None  # of the training batch, which has no limit
        if is_episode:
            self._connections.exempt(request)
        work = partial(api.parse, await self._read(request), policy=self.served, session=session)
        completion: CompletionRequest = await self._in_parser(work)
        if is_episode:
            return await self._answer(request, api, completion)
        num = len(completion.requests)
        if num + self._num_open > MAX_OPEN_RESPONSES:
            raise RequestError(
                f"{self._num_open} responses are open, of at most {MAX_OPEN_RESPONSES}; try again later",
                status=429,
                retry_after_s=1,
            )
        self._num_open += num
        try:
            await self._wait_for_weights()
            return await self._answer(request, api, completion)
        finally:
            self._num_open -= num

    async def _answer(self, request: web.Request, api: Api, completion: CompletionRequest) -> web.StreamResponse:
        """Generate, and send the answer."""
        choices = [Choice(index, completion) for index in range(len(completion.requests))]
        with _work_in(completion.session):
            if completion.stream:
                return await self._stream(request, api, choices)
            async with aclosing(self._chunks(choices, chunk_tokens=None)) as chunks:
                async for choice, chunk in chunks:
                    _add(api, choice, chunk)
        return web.json_response(api.answer(choices))

    async def _count_tokens(self, request: web.Request) -> web.Response:
        """Return how many tokens the policy would read, as part of a session those that it would read there."""
        session, raw = session_of(request, self.sessions), await self._read(request)

        def count() -> int:
            body = COUNTED_MESSAGES.read_body(raw, session)
            check_model(body, self.served)
            copy = Session("count", turns=[] if session is None else list(session.turns))
            chat = COUNTED_MESSAGES.to_chat(body)
            with COUNTED_MESSAGES.in_its_words():
                return len(plan_chat(chat, self.served, copy).prompt_ids)

        return web.json_response({"input_tokens": await self._in_parser(count)})

    async def _read(self, request: web.Request) -> bytes:
        if request.content_type != "application/json":
            raise RequestError("the header Content-Type must be application/json", status=415)
        return await self._connections.read_body(request)

    async def _in_parser(self, work: Callable[[], Any]) -> Any:
        """Return what `work` returns in a thread. A chat template may loop: nothing waits for its thread then."""
        async with self._parsers:
            try:
                return await call_in_thread(_parsed, {"work": work}, timeout_s=PARSE_TIMEOUT_S, has_slot=True)
            except (TimeoutError, ToolHangs) as error:
                what = f"the chat template has not rendered the request within {PARSE_TIMEOUT_S:g} s"
                raise RequestError(what, status=503) from error

    async def _wait_for_weights(self) -> None:
        try:
            await asyncio.wait_for(self.router.wait_until_running(), WEIGHTS_TIMEOUT_S)
        except TimeoutError:
            raise RequestError(
                f"the policy has generated nothing for {WEIGHTS_TIMEOUT_S:g} s, because its processes train or load "
                "new weights; try again later",
                status=503,
                retry_after_s=RETRY_AFTER_S,
            ) from None

    async def _stream(self, request: web.Request, api: Api, choices: list[Choice]) -> web.StreamResponse:
        """Send server-sent events as chunks arrive, until the client is gone or reads nothing."""
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        try:
            await response.prepare(request)
            await self._send_events(response, api, choices)
        except ConnectionError as error:
            logger.info("a stream ends early: %s", error)
            if request.transport is not None:
                request.transport.abort()
        return response

    async def _send_events(self, response: web.StreamResponse, api: Api, choices: list[Choice]) -> None:
        """Send all events of a stream. An error after the first event is an event, too."""
        writer = api.writer(choices)
        await _send(response, writer.begin())
        try:
            async with aclosing(self._chunks(choices, chunk_tokens=STREAM_CHUNK_TOKENS)) as chunks:
                async for choice, chunk in chunks:
                    await _send(response, writer.add(choice, _add(api, choice, chunk)))
            await _send(response, writer.end())
        except ConnectionError:
            raise
        except Exception as error:
            await _send(response, writer.fail(_to_request_error(error)))

    async def _chunks(
        self, choices: list[Choice], *, chunk_tokens: int | None
    ) -> AsyncGenerator[tuple[Choice, TokenOutput], None]:
        """Yield the chunks of all choices as they arrive.

        The first error ends the other choices and is raised.

        Consumes: What the tasks of the choices put into a queue, one task for each.
        Waits for: The next chunk of any choice.
        Unblocked by: The policy's answer to a choice, or its error; a client that is gone, which cancels the handler.
        """
        arrived: asyncio.Queue[tuple[Choice, TokenOutput] | BaseException] = asyncio.Queue()

        async def one(choice: Choice) -> None:
            try:
                session = choice.completion.session
                client = self.router if session is None or session.episode is None else session.episode.client
                async for chunk in generate_in_chunks(client, choice.request, chunk_tokens=chunk_tokens):
                    await arrived.put((choice, chunk))
            except BaseException as error:
                await arrived.put(error)

        tasks = [asyncio.create_task(one(choice)) for choice in choices]
        num_left = len(choices)
        try:
            while num_left:
                item = await arrived.get()
                if isinstance(item, BaseException):
                    raise item
                num_left -= item[1].finish_reason != "pause"
                yield item
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


def _parsed(work: Callable[[], Any]) -> Any:
    return work()


@contextmanager
def _work_in(session: Session | None) -> Iterator[None]:
    """Count a request of a session as open."""
    if session is None:
        yield
        return
    session.num_open += 1
    try:
        yield
    finally:
        session.num_open -= 1


def _add(api: Api, choice: Choice, chunk: TokenOutput) -> dict[str, Any]:
    """Append a chunk to a choice. Return what a stream shows of it."""
    content = choice.add(chunk)
    if choice.finish_reason is not None:
        api.answered(choice)
    return content


async def _send(response: web.StreamResponse, events: Iterable[Event]) -> None:
    for event in events:
        text = event.data if isinstance(event.data, str) else json.dumps(event.data, ensure_ascii=False)
        head = "" if event.name is None else f"event: {event.name}\n"
        await _write(response, f"{head}data: {text}\n\n".encode("utf-8", "replace"))


async def _write(response: web.StreamResponse, data: bytes) -> None:
    """Send a part of a stream. Raises ConnectionError if the client is gone or reads too slowly."""
    try:
        async with asyncio.timeout(WRITE_TIMEOUT_S):
            await response.write(data)
    except TimeoutError:
        raise ConnectionError(f"the client has read nothing for {WRITE_TIMEOUT_S:g} s") from None


def _to_request_error(error: Exception) -> RequestError:
    if isinstance(error, RequestError):
        return error
    if isinstance(error, web.HTTPException):
        return RequestError(error.reason, status=error.status)
    if isinstance(error, WorkerLost):
        return RequestError("the rollout processes were lost; try again", status=503, retry_after_s=RETRY_AFTER_S)
    logger.error("a request to the endpoint failed; its client gets status 500", exc_info=error)
    return RequestError(f"{type(error).__name__}: {error}", status=500)


@web.middleware
async def _format_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except Exception as error:
        request_error = _to_request_error(error)
        headers = {} if request_error.retry_after_s is None else {"Retry-After": str(request_error.retry_after_s)}
        api = MESSAGES if "/v1/messages" in request.path else CHAT
        return web.json_response(api.error_body(request_error), status=request_error.status, headers=headers)
