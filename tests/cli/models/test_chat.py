"""`hybridrl chat`: lines in, answers out; with a model of one's own, and with an endpoint."""

import asyncio
import contextlib
import io
import json
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest
from aiohttp import web

from hybridrl import cli
from hybridrl.evaluation.endpoint import find_model, respond_all


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


@pytest.mark.slow
def test_a_chat_with_a_model_whose_template_loops_goes_on_and_ends(tiny_qwen2, tmp_path):
    model = shutil.copytree(tiny_qwen2, tmp_path / "model")
    loop = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    (model / "chat_template.jinja").write_text(loop)
    code = "import sys; from hybridrl.cli.__main__ import main; from hybridrl.serving.openai import server; "
    code += f"server.PARSE_TIMEOUT_S = 1.0; sys.exit(main(['chat', {str(model)!r}]))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, input="a\nb\n")
    assert done.returncode == 0 and done.stdout.count("the chat template has not rendered the request within 1 s") >= 1


@pytest.fixture
def flood() -> Iterator[str]:
    """Return the URL of an endpoint that answers 200 MB, and a stream without the end of a line."""

    def serve(connection):
        with connection, contextlib.suppress(OSError):
            head = connection.recv(1 << 16)
            if b"/models" in head:
                body = b'{"data": [{"id": "flood"}]}'
                connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
                return
            connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 200000000\r\n\r\n")
            for _ in range(200):
                connection.sendall(b"x" * 1_000_000)

    def accept(listener):
        with contextlib.suppress(OSError):
            while True:
                threading.Thread(target=serve, args=(listener.accept()[0],), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=accept, args=(listener,), daemon=True).start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/v1"


def test_an_endpoint_that_floods_is_one_line_in_a_chat_and_a_reason_in_an_evaluation(flood, monkeypatch, capsys):
    assert "[no answer: the stream has a line that is too long]" in talk(monkeypatch, capsys, [flood], ["a"])

    async def respond():
        model = await find_model(flood, name=None, key_variable="NONE")
        return await respond_all(model, [([{"role": "user", "content": "a"}], {})], max_open=1)

    [response] = asyncio.run(respond())
    assert response.reason == "the answer has more than 64 MB"
