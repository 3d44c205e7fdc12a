"""What strangers send to the endpoint: each request gets an answer of its own, and all others are still served."""

import asyncio
import contextlib
import copy
import gzip
import http.client
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from tokenizers import Tokenizer, normalizers

from hybridrl.config.schema.rollout import RolloutConfig
from hybridrl.errors import RequestFailed
from hybridrl.serving.openai import Endpoint, ServedModel, connections, server
from hybridrl.serving.router import ReplicaRouter
from hybridrl.serving.sessions.session import EpisodeLimits
from hybridrl.workers.rollout import RolloutSetup, SamplingParams, make_rollout
from hybridrl.workers.rollout.base import load_special_tokens
from hybridrl.workers.rollout.request_engine import SLICE_S
from hybridrl.workers.rollout.requests import Request
from hybridrl.workers.rollout.sampling.logits import MAX_DETECTORS
from tests.support.serving.local_replicas import LocalReplicas

PROMPT, RESPONSE = 64, 64
DECOMPOSED = "e\u0301"  # as a Mac types it; the tokenizer composes it


class Site:
    """An endpoint with its router on an event loop in a thread."""

    def __init__(self, rollout, served: ServedModel, **settings):
        self.rollout, self.served = rollout, served
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, daemon=True).start()
        self.run(self._open(settings))

    async def _open(self, settings: dict) -> None:
        self.router = await ReplicaRouter(LocalReplicas([self.rollout], slice_s=SLICE_S)).__aenter__()
        self.endpoint = Endpoint(self.router, self.served, host="127.0.0.1", port=0, **settings)
        await self.endpoint.start()

    def run(self, work):
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(60)

    def close(self) -> None:
        self.run(self.endpoint.stop())
        self.run(self.router.close(wait=True))
        self.loop.call_soon_threadsafe(self.loop.stop)

    def send(self, method: str, path: str, body: bytes = b"", **headers: str) -> tuple[int, dict]:
        connection = http.client.HTTPConnection("127.0.0.1", self.endpoint.port, timeout=60)
        names = {name.replace("_", "-"): value for name, value in headers.items()}
        with contextlib.closing(connection):
            connection.request(method, path, body, {"Content-Type": "application/json"} | names)
            answer = connection.getresponse()
            return answer.status, json.loads(answer.read())

    def complete(self, **changes) -> tuple[int, dict]:
        body = {"model": "tiny", "prompt": [50], "max_tokens": 4} | changes
        return self.send("POST", "/v1/completions", json.dumps(body).encode())

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.endpoint.port), timeout=60)

    def serves(self) -> bool:
        status, health = self.send("GET", "/health")
        return self.complete()[0] == 200 and (status, health["generating"]) == (200, True)


def wait_until(is_true: Callable[[], bool]) -> None:
    until = time.monotonic() + 60
    while not is_true():
        assert time.monotonic() < until
        time.sleep(0.01)


def open_connections(site: Site) -> int:
    return len(site.endpoint._connections._server.connections)


@pytest.fixture(scope="module")
def model(tiny_qwen2, tmp_path_factory) -> Path:
    """The tiny model with a tokenizer that composes characters, as those of Qwen do."""
    import shutil

    folder = tmp_path_factory.mktemp("model") / "tiny"
    shutil.copytree(tiny_qwen2, folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="module")
def rollout(model):
    tokens = load_special_tokens(str(model))
    config = RolloutConfig(name="hf", dtype="float32")
    return make_rollout("hf", RolloutSetup(str(model), config, tokens.eos_ids, tokens.pad_id, PROMPT, RESPONSE))


@pytest.fixture(scope="module")
def served(model) -> ServedModel:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    return ServedModel("tiny", tokenizer, PROMPT + RESPONSE, RESPONSE, len(tokenizer))


@pytest.fixture
def site(rollout, served) -> Iterator[Site]:
    found = Site(rollout, served)
    yield found
    found.close()


# -- requests that no replica could serve


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"stop": [DECOMPOSED]}, "stop"),
        ({"stop": "\ud800"}, "stop"),
        ({"stop": ["x"] * 17}, "stop"),
        ({"stop": "x" * 257}, "stop"),
        ({"min_tokens": 2**70}, "min_tokens"),
        ({"min_tokens": 5}, "min_tokens"),
        ({"min_tokens": -1}, "min_tokens"),
        ({"presence_penalty": 10**400}, "presence_penalty"),
        ({"frequency_penalty": -(10**400)}, "frequency_penalty"),
        ({"frequency_penalty": float("nan")}, "frequency_penalty"),
        ({"presence_penalty": 2.1}, "presence_penalty"),
        ({"repetition_penalty": 10**400}, "repetition_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"repetition_penalty": float("inf")}, "repetition_penalty"),
        ({"temperature": 1e-320, "logprobs": 0}, "temperature"),
        ({"temperature": 10**400}, "temperature"),
        ({"top_k": 2**70}, "top_k"),
        ({"top_p": float("nan")}, "top_p"),
        ({"stop_token_ids": [50] * 1000}, "stop_token_ids"),
        ({"prompt": "\ud800"}, "prompt"),
        ({"prompt": [50] * 100_000}, "prompt"),
        ({"n": 10**400}, "n"),
        ({"seed": 10**400}, "seed"),
        ({"max_tokens": 10**400}, "max_tokens"),
        ({f"key{number}": None for number in range(500_000)}, None),
        ({"k" * 1_000_000: 1}, "k" * 80),
    ],
    ids=lambda value: repr(value)[:40],
)
def test_a_value_that_no_replica_can_use_is_rejected_and_the_endpoint_serves_on(site, changes, param):
    status, answer = site.complete(**changes)
    assert (status, answer["error"]["param"]) == (400, param) and len(json.dumps(answer)) < 1000
    assert site.serves()


def test_the_extremes_that_are_allowed_are_served(site):
    for changes in (
        {"presence_penalty": 2, "frequency_penalty": -2, "repetition_penalty": 2, "min_tokens": 4},
        {"temperature": 0.01, "top_k": 2**31 - 1, "logprobs": 0, "repetition_penalty": 0.01},
        {"stop": ["x" * 256] * 16},
        {"stop": "\u00e9"},
    ):
        status, answer = site.complete(**changes)
        assert status == 200, answer
        log_probs = (answer["choices"][0]["logprobs"] or {"token_logprobs": []})["token_logprobs"]
        assert all(-9999 <= value <= 0 for value in log_probs)


@pytest.mark.parametrize("body", [b"[" * 100_000, b'{"a":' * 50_000, b'{"n": ' + b"9" * 5000 + b"}", b"\xff", b"[]"])
def test_a_body_that_is_no_request_is_rejected(site, body):
    status, answer = site.send("POST", "/v1/completions", body)
    assert status == 400 and answer["error"]["type"] == "invalid_request_error" and site.serves()


def test_a_chat_with_half_a_surrogate_pair_is_rejected(site):
    for message in ({"role": "user", "content": "\ud800"}, {"role": "\ud800", "content": "x"}):
        body = json.dumps({"model": "tiny", "messages": [message]}).encode()
        assert site.send("POST", "/v1/chat/completions", body)[0] == 400
    assert site.serves()


def test_what_a_request_raises_in_a_replica_is_its_answer_alone(site):
    """Past the parser, as a client of the router may send it."""
    poison = Request("bad", (50, 60), SamplingParams(8, frequency_penalty=10**400), seed=1)
    good = [Request(str(number), (50, 60 + number), SamplingParams(8), seed=number) for number in range(4)]

    async def send_all():
        return await asyncio.gather(*map(site.router.generate, [*good, poison]), return_exceptions=True)

    *outputs, failure = site.run(send_all())
    assert isinstance(failure, RequestFailed) and "request bad cannot be served: OverflowError" in str(failure)
    assert all(output.finish_reason in ("stop", "length") for output in outputs)
    assert site.serves()


# -- time and memory


@pytest.mark.parametrize("prompt", ["Ab1 " * 1_500_000, ["Ab1 " * 1000] * 3000, ["Ab1 " * 500] * 100])
def test_long_prompts_are_rejected_quickly_and_block_nobody(site, prompt):
    assert site.complete()[0] == 200
    results: list = []
    attack = threading.Thread(target=lambda: results.append(site.complete(prompt=prompt)))
    start = time.monotonic()
    attack.start()
    slowest = 0.0
    while attack.is_alive():
        before = time.monotonic()
        site.send("GET", "/health")
        slowest = max(slowest, time.monotonic() - before)
    assert results[0][0] == 400 and time.monotonic() - start < 30 and slowest < 10


def test_a_body_that_never_ends_is_given_up(site, monkeypatch):
    monkeypatch.setattr(connections, "BODY_TIMEOUT_S", 0.5)
    with site.connect() as client:
        client.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
            b"Content-Length: 1000\r\n\r\n{"
        )
        assert client.recv(100).startswith(b"HTTP/1.1 408")
    assert site.serves()


def test_bodies_together_have_a_limit(site, monkeypatch):
    monkeypatch.setattr(connections, "MAX_BODIES_BYTES", 100_000)
    head = b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nContent-Length: "
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(site.connect()) for _ in range(3)]
        for number, client in enumerate(clients[:2], start=1):
            client.sendall(head + b"60000\r\n\r\n" + b" " * 45_000)
            wait_until(lambda number=number: site.endpoint._connections._num_bytes == number * 45_000)
        clients[2].sendall(head + b"60000\r\n\r\n" + b" " * 45_000)
        assert clients[2].recv(100).startswith(b"HTTP/1.1 503")
    assert site.serves()


def test_a_connection_that_sends_no_request_is_closed(site, monkeypatch):
    monkeypatch.setattr(connections, "IDLE_TIMEOUT_S", 0.5)
    with site.connect() as half, site.connect() as silent:
        half.sendall(b"GET /health HTTP/1.1\r\nHo")
        start = time.monotonic()
        for client in (half, silent):
            with contextlib.suppress(ConnectionResetError):
                assert client.recv(100) == b""
        assert time.monotonic() - start < 60


def test_connections_above_the_limit_are_refused(site, monkeypatch):
    monkeypatch.setattr(connections, "MAX_CONNECTIONS", 3)
    wait_until(lambda: open_connections(site) == 0)  # those of the tests before
    with contextlib.ExitStack() as stack:
        for _ in range(3):
            stack.enter_context(site.connect())
        wait_until(lambda: open_connections(site) == 3)
        with site.connect() as refused:
            assert refused.recv(100).startswith(b"HTTP/1.1 503")
    wait_until(lambda: open_connections(site) == 0)
    assert site.serves()


class NewWeights:
    """A policy whose requests wait for new weights."""

    async def generate(self, request, *, conversation=None):
        await asyncio.Event().wait()


def test_connections_of_episodes_that_wait_do_not_count(site, monkeypatch):
    monkeypatch.setattr(connections, "MAX_CONNECTIONS", 2)
    wait_until(lambda: open_connections(site) == 0)
    limits = EpisodeLimits(NewWeights(), SamplingParams(8), 1, 0, 200, 300)
    url = f"/sessions/{site.endpoint.sessions.open_episode(limits).name}/v1/chat/completions"
    body = json.dumps({"model": "tiny", "messages": [{"role": "user", "content": "How many?"}]}).encode()
    head = f"POST {url} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    known = site.endpoint._connections._of_episodes
    with contextlib.ExitStack() as stack:
        for number in range(1, 5):
            client = stack.enter_context(site.connect())
            client.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
            wait_until(lambda number=number: len(known) == number)
        assert site.serves()
    wait_until(lambda: not known)


def test_a_stream_that_nobody_reads_gives_its_places_back(site, monkeypatch):
    monkeypatch.setattr(server, "WRITE_TIMEOUT_S", 0.5)
    body = {"model": "tiny", "prompt": [50], "max_tokens": 60, "n": 128, "stream": True, "logprobs": 0}
    raw = json.dumps(body | {"ignore_eos": True, "return_token_ids": True}).encode()
    listener = site.endpoint._connections._listener.sockets[0]
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)  # or the kernel takes the whole answer
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(("127.0.0.1", site.endpoint.port))
        client.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
            + f"Content-Length: {len(raw)}\r\n\r\n".encode()
            + raw
        )
        stop = time.monotonic() + 40
        while site.endpoint._num_open == 0 and time.monotonic() < stop:
            time.sleep(0.01)
        assert site.endpoint._num_open == 128
        while site.endpoint._num_open and time.monotonic() < stop:
            time.sleep(0.1)
        assert site.endpoint._num_open == 0
        received = 0
        with contextlib.suppress(ConnectionResetError):
            while data := client.recv(1 << 20):
                received += len(data)
                assert b"[DONE]" not in data
        assert site.serves()


def test_stop_texts_of_clients_do_not_accumulate(site, rollout):
    for number in range(MAX_DETECTORS + 20):
        assert site.complete(stop=f"stop {number}", max_tokens=1)[0] == 200
    assert len(rollout._stop_strings) <= MAX_DETECTORS


# -- who may ask


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"Content_Type": "text/plain"}, 415),
        ({"Content_Type": "application/json; charset=utf-8"}, 200),
        ({"Host": "attacker.example"}, 403),
        ({"Host": "localhost:8000"}, 200),
        ({"Origin": "http://attacker.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Origin": "http://127.0.0.1:3000"}, 200),
    ],
)
def test_a_web_page_of_another_origin_is_refused(site, headers, status):
    body = json.dumps({"model": "tiny", "prompt": [50], "max_tokens": 1}).encode()
    assert site.send("POST", "/v1/completions", body, **headers)[0] == status


def test_with_a_key_only_health_is_open(rollout, served, monkeypatch):
    monkeypatch.setenv("HYBRIDRL_API_KEY", "right")
    found = Site(rollout, served)
    try:
        assert found.complete()[0] == 401
        assert found.send("GET", "/v1/models", Authorization="Bearer wrong")[0] == 401
        assert found.send("GET", "/v1/models", Authorization="Bearer r\u00efght")[0] == 401
        assert found.send("GET", "/v1/models", Authorization="Bearer right")[0] == 200
        assert found.send("GET", "/health")[0] == 200
    finally:
        found.close()


# -- health


def test_health_is_503_once_generation_has_failed(site):
    assert site.send("GET", "/health") == (200, {"generating": True, "open_responses": 0})
    version, site.rollout._version = site.rollout._version, None  # as after a failed push
    try:
        assert site.complete()[0] == 500
        status, health = site.send("GET", "/health")
        assert (status, health["generating"]) == (503, False) and "StaleWeightsError" in health["error"]
    finally:
        site.rollout._version = version


@pytest.mark.parametrize("key", ["right", "wrong"])
def test_compressed_bodies_are_refused_and_never_inflated(rollout, served, key):
    site = Site(rollout, served, api_key="right")
    bomb = gzip.compress(bytes(100 << 20)) * 10  # 1 GB, of which a second of inflating would be seen below
    head = f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {key}\r\n"
    head += f"Content-Type: application/json\r\nContent-Encoding: gzip\r\nContent-Length: {len(bomb)}\r\n\r\n"
    try:
        before_s = time.process_time()
        for _ in range(4):
            with site.connect() as connection:
                connection.sendall(head.encode() + bomb)
                assert connection.recv(12) == (b"HTTP/1.1 415" if key == "right" else b"HTTP/1.1 401")
        assert time.process_time() - before_s < 1
    finally:
        site.close()


def test_a_chat_template_that_loops_fails_its_request_alone(rollout, served, monkeypatch):
    monkeypatch.setattr(server, "PARSE_TIMEOUT_S", 1.0)
    tokenizer = copy.deepcopy(served.tokenizer)
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    apply_template, over = tokenizer.apply_chat_template, threading.Event()

    def loop_or_apply(messages, **options):
        # A thread cannot be ended, nor a loop in a template, which gets plain data only: later tests would be slow.
        while messages[0]["content"] == "loop" and not over.is_set():
            pass
        return apply_template(messages, **options)

    tokenizer.apply_chat_template = loop_or_apply
    site = Site(rollout, replace(served, tokenizer=tokenizer))
    try:
        for word, expected in (("loop", 503), ("loop", 503), ("loop", 503), ("a", 200)):
            body = {"model": "tiny", "messages": [{"role": "user", "content": word}], "max_tokens": 2}
            status, answer = site.send("POST", "/v1/chat/completions", json.dumps(body).encode())
            assert status == expected, answer
        assert site.serves()
        loops = [thread for thread in threading.enumerate() if "_parsed" in thread.name]
        assert len(loops) == 3 and all(thread.daemon for thread in loops)  # the process can end
    finally:
        over.set()
        site.close()
    for loop in loops:
        loop.join(timeout=30)
    assert not any(loop.is_alive() for loop in loops)
