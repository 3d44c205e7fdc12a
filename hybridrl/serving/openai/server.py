"""The web application between OpenAI's clients and a `Router`, on the router's event loop.

While the router is paused (weights are pushed, or the processes train) a request that is open waits and then goes on
with the new weights, and its tokens say which made them. A new request waits `WAIT_S` seconds for the router, then it
is refused with status 503 and a `Retry-After`. A client that hangs up has its responses aborted.
"""

import asyncio
import json
import logging
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import Any

from aiohttp import web

from hybridrl.errors import ConfigError, WorkerLost
from hybridrl.serving.continuation import pieces
from hybridrl.serving.openai.requests import Question, Refusal, read_question
from hybridrl.serving.openai.responses import Choice, answer, end_of_stream, error_body, piece_of_stream
from hybridrl.serving.router import Router
from hybridrl.workers.rollout.requests import TokenOutput

logger = logging.getLogger(__name__)

WAIT_S = 60.0  # a new request waits so long for weights; pushes take seconds, training steps minutes
RETRY_AFTER_S = 10
MOST_OPEN = 256  # responses of all clients together; the policy's own batches have no such limit
STREAM_TOKENS = 16  # of each piece of a stream
MOST_BYTES = 16 << 20  # of a request's body
HANG_UP_S = 2.0  # open connections have so long to end when the endpoint does

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass(frozen=True)
class Served:
    """The model as clients see it. max_length: of prompt and response together."""

    name: str
    tokenizer: Any
    max_length: int
    max_response_length: int
    vocab_size: int


class Endpoint:
    """Answers at http://host:port/v1 from `start` to `stop`.

    port: 0 is any that is free; `port` says which after `start`.
    """

    def __init__(self, router: Router, served: Served, *, host: str, port: int):
        self.router, self.served, self.host, self.port = router, served, host, port
        self._started = int(time.time())
        self._num_open = 0

    async def start(self) -> None:
        """Listen. ConfigError if the port is taken."""
        app = web.Application(middlewares=[_errors_as_openai_writes_them], client_max_size=MOST_BYTES)
        app.add_routes(
            [
                web.get("/health", self._health),
                web.get("/v1/models", self._models),
                web.get("/v1/models/{name}", self._model),
                web.post("/v1/completions", partial(self._respond, "completions")),
                web.post("/v1/chat/completions", partial(self._respond, "chat")),
            ]
        )
        self._runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=HANG_UP_S)
        await self._runner.setup()
        try:
            await web.TCPSite(self._runner, self.host, self.port).start()
        except OSError as error:
            await self._runner.cleanup()
            raise ConfigError(
                f"the endpoint cannot listen on {self.host}:{self.port} ({error.strerror}); choose another port or host"
            ) from error
        self.port = self._runner.addresses[0][1]
        logger.info("the policy answers at http://%s:%d/v1 as model %r", self.host, self.port, self.served.name)

    async def stop(self) -> None:
        """Hang up on everybody."""
        await self._runner.cleanup()

    # -- what can be asked

    async def _health(self, _: web.Request) -> web.Response:
        return web.json_response({"generating": not self.router.is_paused, "open_responses": self._num_open})

    async def _models(self, _: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [self._card()]})

    async def _model(self, request: web.Request) -> web.Response:
        if (name := request.match_info["name"]) != self.served.name:
            raise Refusal(
                f"there is no model {name!r}; there is {self.served.name!r}", code="model_not_found", status=404
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

    async def _respond(self, kind: str, request: web.Request) -> web.StreamResponse:
        name = f"{'chatcmpl' if kind == 'chat' else 'cmpl'}-{uuid.uuid4().hex}"
        question = read_question(await _json(request), kind=kind, policy=self.served, name=name)
        num = len(question.requests)
        if num + self._num_open > MOST_OPEN:
            raise Refusal(
                f"{self._num_open} responses are open, and there may be {MOST_OPEN}", status=429, retry_after_s=1
            )
        self._num_open += num
        try:
            await self._wait_for_weights()
            choices = [Choice(i, one, question, self.served.tokenizer) for i, one in enumerate(question.requests)]
            about = {"name": name, "model": self.served.name, "created": int(time.time())}
            if question.stream:
                return await self._stream(request, question, choices, about)
            async with aclosing(self._pieces(choices, width=None)) as coming:
                async for choice, piece, is_last in coming:
                    choice.add(piece, is_last=is_last)
            return web.json_response(answer(question, choices, **about))
        finally:
            self._num_open -= num

    async def _wait_for_weights(self) -> None:
        try:
            await asyncio.wait_for(self.router.wait_until_running(), WAIT_S)
        except TimeoutError:
            raise Refusal(
                f"the policy has generated nothing for {WAIT_S:g} s, because its processes train or take "
                "new weights; try again later",
                status=503,
                retry_after_s=RETRY_AFTER_S,
            ) from None

    async def _stream(
        self, request: web.Request, question: Question, choices: list[Choice], about: dict
    ) -> web.StreamResponse:
        """Server-sent events, as pieces of the choices come. What goes wrong after the first is an event, too."""
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        await response.prepare(request)
        if question.is_chat:
            for choice in choices:
                first = {
                    "index": choice.index,
                    "delta": {"role": "assistant", "content": ""},
                    "logprobs": None,
                    "finish_reason": None,
                }
                await _send(response, piece_of_stream(question, choice, first, **about))
        try:
            async with aclosing(self._pieces(choices, width=STREAM_TOKENS)) as coming:
                async for choice, piece, is_last in coming:
                    said = choice.add(piece, is_last=is_last)
                    await _send(response, piece_of_stream(question, choice, said, **about))
            if question.include_usage:
                await _send(response, end_of_stream(question, choices, **about))
        except Exception as error:
            await _send(response, error_body(_refusal(error)))
        await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
        return response

    async def _pieces(
        self, choices: list[Choice], *, width: int | None
    ) -> AsyncIterator[tuple[Choice, TokenOutput, bool]]:
        """Yield pieces of all choices as they come, and whether it is the choice's last.

        Raises the first error, and ends the others.
        """
        came: asyncio.Queue[tuple[Choice, TokenOutput, bool] | BaseException] = asyncio.Queue()

        async def one(choice: Choice) -> None:
            try:
                left = choice.request.sampling.max_new_tokens
                async for piece in pieces(self.router, choice.request, width=width):
                    left -= len(piece.token_ids)
                    await came.put((choice, piece, piece.finish_reason in ("stop", "abort") or left == 0))
            except BaseException as error:
                await came.put(error)

        tasks = [asyncio.create_task(one(choice)) for choice in choices]
        num_left = len(choices)
        try:
            while num_left:
                item = await came.get()
                if isinstance(item, BaseException):
                    raise item
                num_left -= item[2]
                yield item
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def _json(request: web.Request) -> Any:
    try:
        return await request.json()
    except (ValueError, UnicodeDecodeError) as error:
        raise Refusal(f"the body is not JSON: {error}") from error


async def _send(response: web.StreamResponse, event: dict) -> None:
    await response.write(f"data: {json.dumps(event, ensure_ascii=False)}\n\n".encode())


def _refusal(error: Exception) -> Refusal:
    if isinstance(error, Refusal):
        return error
    if isinstance(error, web.HTTPException):
        return Refusal(error.reason, status=error.status)
    if isinstance(error, WorkerLost):
        return Refusal("the processes that answered were lost; try again", status=503, retry_after_s=RETRY_AFTER_S)
    logger.error("a request to the endpoint failed", exc_info=error)
    return Refusal(f"{type(error).__name__}: {error}", status=500)


@web.middleware
async def _errors_as_openai_writes_them(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except Exception as error:
        refusal = _refusal(error)
        headers = {} if refusal.retry_after_s is None else {"Retry-After": str(refusal.retry_after_s)}
        return web.json_response(error_body(refusal), status=refusal.status, headers=headers)
