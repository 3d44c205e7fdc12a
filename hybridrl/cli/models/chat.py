"""`hybridrl chat MODEL`: a conversation in the terminal, with answers shown as they are generated.

A model or a checkpoint is served to this process alone; a URL is any OpenAI-compatible endpoint.
"""

import argparse
import asyncio
import contextlib
import logging
import os
import sys
from collections.abc import AsyncIterator
from typing import Any

import aiohttp

from hybridrl.cli.models.export import model_directory
from hybridrl.cli.models.serve import loaded_model
from hybridrl.driver.terminal import show
from hybridrl.evaluation.endpoint import EndpointModel, EndpointRefusal, client, find_model, stream_text
from hybridrl.serving.openai.access import api_key_of_environment
from hybridrl.serving.openai.server import Endpoint
from hybridrl.serving.openai.standalone import StandaloneModel, one_replica
from hybridrl.serving.router import ReplicaRouter

CLEAR, QUIT = "/clear", "/quit"
YOU = "you: "


def chat(arguments: argparse.Namespace) -> None:
    """Run `hybridrl chat` until the end of the input, /quit or Ctrl-C."""
    with asyncio.Runner() as runner:
        if "://" in arguments.model:
            logging.getLogger("hybridrl").setLevel(logging.WARNING)
            found = find_model(arguments.model, name=arguments.model_name, key_variable=arguments.key_variable)
            converse(runner, runner.run(found), arguments)
            return
        with model_directory(arguments.model, trust_remote_code=arguments.trust_remote_code) as path:
            logging.getLogger("hybridrl").setLevel(logging.WARNING)  # a conversion is logged, which takes a while
            model = loaded_model(arguments, path)
            with one_replica(model.setup()) as replicas:
                opened = contextlib.AsyncExitStack()
                own = runner.run(opened.enter_async_context(_own_endpoint(model, replicas)))
                try:
                    converse(runner, own, arguments)
                finally:
                    runner.run(opened.aclose())


@contextlib.asynccontextmanager
async def _own_endpoint(model: StandaloneModel, replicas: Any) -> AsyncIterator[EndpointModel]:
    """Serve the model at a free port of this machine."""
    async with ReplicaRouter(replicas) as router:
        endpoint = Endpoint(router, model.served(), host="127.0.0.1", port=0)
        await endpoint.start()
        try:
            yield EndpointModel(f"http://127.0.0.1:{endpoint.port}/v1", model.name, api_key_of_environment())
        finally:
            await endpoint.stop()


def converse(runner: asyncio.Runner, model: EndpointModel, arguments: argparse.Namespace) -> None:
    """Read lines and show the model's answers.

    Ctrl-C ends an answer, or the conversation where a line is awaited.
    """
    beginning = [{"role": "system", "content": arguments.system}] if arguments.system else []
    parameters: dict[str, Any] = {"temperature": arguments.temperature}
    if arguments.max_tokens is not None:
        parameters["max_tokens"] = arguments.max_tokens
    messages = [*beginning]
    show(f"{model.name}; {CLEAR} forgets the conversation, {QUIT} or Ctrl-D ends it\n")
    while (line := _read_line()) is not None:
        if line == CLEAR:
            messages = [*beginning]
        elif line:
            messages.append({"role": "user", "content": line})
            messages = _answered(runner, model, messages, parameters)


def _read_line() -> str | None:
    """Return a line without spaces around it, None at the end."""
    try:
        line = input(YOU if sys.stdin.isatty() else "").strip()
    except (EOFError, KeyboardInterrupt):
        show("\n" if sys.stdin.isatty() else "")
        return None
    return None if line == QUIT else line


def _answered(
    runner: asyncio.Runner, model: EndpointModel, messages: list[dict[str, str]], parameters: dict[str, Any]
) -> list[dict[str, str]]:
    """Show the answer and return the conversation with it; without the last question if there is no answer."""
    parts: list[str] = []
    try:
        runner.run(_show(model, {"messages": messages, **parameters}, parts))
    except KeyboardInterrupt:
        show(" [ended]\n")
    except (EndpointRefusal, aiohttp.ClientError, OSError, TimeoutError) as error:
        show(f"[no answer: {error or type(error).__name__}]\n")
        return messages[:-1]
    return [*messages, {"role": "assistant", "content": "".join(parts)}]


async def _show(model: EndpointModel, body: dict[str, Any], parts: list[str]) -> None:
    show(f"{os.path.basename(model.name)}: ")
    async with client(model) as session:
        async for part in stream_text(session, model, body):
            parts.append(part)
            show(part)
    show("\n")
