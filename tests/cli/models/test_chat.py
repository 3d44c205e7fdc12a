"""`hybridrl chat`: lines in, answers out; with a model of one's own, and with an endpoint."""

import asyncio
import io
import json
import sys
import threading
from collections.abc import Iterator

import pytest
from aiohttp import web

from hybridrl import cli


def talk(monkeypatch, capsys, words: list[str], lines: list[str]) -> str:
    """Return what the conversation prints for these lines of input."""
    monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
    assert cli.main(["chat", *words, "--temperature", "0", "--max-tokens", "6"]) == 0
    return capsys.readouterr().out


@pytest.fixture
def echo() -> Iterator[str]:
    """Return the URL of an endpoint that answers with the messages that it gets, in two parts."""

    async def respond(request):
        body = await request.json()
        answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await answer.prepare(request)
        for part in (str(len(body["messages"])), f" messages, {body['messages'][0]['content']} first"):
            await answer.write(f"data: {json.dumps({'choices': [{'delta': {'content': part}}]})}\n\n".encode())
        await answer.write(b"data: [DONE]\n\n")
        return answer

    async def models(request):
        return web.json_response({"data": [{"id": "echo"}]})

    async def start():
        app = web.Application()
        app.add_routes([web.get("/v1/models", models), web.post("/v1/chat/completions", respond)])
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        return runner

    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    runner = asyncio.run_coroutine_threadsafe(start(), loop).result(60)
    yield f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
    asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result(60)
    loop.call_soon_threadsafe(loop.stop)


def test_an_answer_has_all_of_the_conversation_until_it_is_forgotten(echo, monkeypatch, capsys):
    lines = ["one", "", "two", "/clear", "three", "/quit", "never read"]
    assert talk(monkeypatch, capsys, [echo], lines).splitlines() == [
        "echo; /clear forgets the conversation, /quit or Ctrl-D ends it",
        "echo: 1 messages, one first",
        "echo: 3 messages, one first",
        "echo: 1 messages, three first",
    ]
    assert "2 messages, be brief first" in talk(monkeypatch, capsys, [echo, "--system", "be brief"], ["one"])


def test_a_model_and_its_endpoint_answer_the_same(tiny_qwen2, tiny_site, monkeypatch, capsys):
    url = f"http://127.0.0.1:{tiny_site.endpoint.port}/v1"
    by_url = talk(monkeypatch, capsys, [url], ["How many pens?", "And boxes?"])
    own = talk(monkeypatch, capsys, [str(tiny_qwen2), "--device", "cpu"], ["How many pens?", "And boxes?"])
    assert own.replace(tiny_qwen2.name, "tiny") == by_url and by_url.count("tiny: ") == 2


def test_a_question_that_is_refused_is_left_out_of_the_conversation(tiny_site, monkeypatch, capsys):
    url = f"http://127.0.0.1:{tiny_site.endpoint.port}/v1"
    shown = talk(monkeypatch, capsys, [url], ["pens " * 400, "How many pens?"])
    _, refused, answer = shown.split("tiny: ")
    assert refused.startswith("[no answer: status 400") and "[no answer" not in answer


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["http://127.0.0.1:9/v1"], "no OpenAI-compatible endpoint answers there"),
        (["no/such/model/there"], "no such directory"),
    ],
)
def test_a_model_that_is_not_there_is_one_error(words, text, capsys):
    assert cli.main(["chat", *words]) == 2
    assert text in capsys.readouterr().err
