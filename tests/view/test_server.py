"""The page's server: who may ask, what each route sends, and what it refuses."""

import asyncio
import json
import socket
import time
import zlib
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp.test_utils import TestClient, TestServer

from hybridrl import cli
from hybridrl.errors import ConfigError
from hybridrl.master.service.journal import EVENTS
from hybridrl.view.readers import metrics
from hybridrl.view.readers.storage import Folder
from hybridrl.view.runs import open_runs
from hybridrl.view.server import ViewServer
from tests.support.view.run_files import LOST, sample, write_journal, write_metrics, write_samples, write_trace

LOCAL = "127.0.0.1"
HOSTILE = "<script>document.title='stolen'</script><img src=x onerror=alert(1)>"


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("runs") / "mine"
    write_metrics(path, range(1, 4), loss=float("nan"))
    write_samples(path, 1, [sample(1, 0, answer=HOSTILE, score=float("inf")), sample(1, 1)])
    write_trace(path, 3)
    write_journal(path, LOST)
    (path / "config.json").write_text(json.dumps({"trainer": {"total_training_steps": 3}}))
    return path


def served(run: Path, ask: Callable[[TestClient, ViewServer], Awaitable[Any]], *, host: str = LOCAL) -> Any:
    """Return what `ask` returns, called with a client of the page of one run."""

    async def main() -> Any:
        server = ViewServer(open_runs([str(run)]), host=host, port=0)
        server.take_port()
        async with TestClient(TestServer(server.application(), host=LOCAL)) as client:
            return await ask(client, server)

    return asyncio.run(asyncio.wait_for(main(), 60))


def answer(run: Path, path: str, *, host: str = LOCAL, **headers: str) -> tuple[int, Any]:
    """Return status and JSON of one request."""

    async def ask(client: TestClient, _: ViewServer) -> tuple[int, Any]:
        response = await client.get(path, headers=headers)
        return response.status, json.loads(await response.text())

    return served(run, ask, host=host)


# -- what the routes send


def test_the_list_has_every_run_with_its_step(run):
    status, (found,) = answer(run, "/api/runs")
    assert status == 200 and (found["id"], found["step"], found["total_steps"]) == ("mine", 3, 3)


@pytest.mark.parametrize(
    ("view", "holds"),
    [
        ("metrics", lambda found: [metric["name"] for metric in found["metrics"]] == ["loss", "score"]),
        ("series?name=score", lambda found: found["series"]["score"] == [[1, 2, 3], [0.1, 0.2, 0.3]]),
        ("series?name=score&since=3&revision=1", lambda found: found["series"]["score"] == [[], []]),
        ("series?name=score&since=3&revision=9", lambda found: len(found["series"]["score"][0]) == 3),
        ("series?name=nosuch", lambda found: found["series"]["nosuch"] == [[], []]),
        ("samples", lambda found: [one["score"] for one in found["samples"]] == ["inf", 0.0]),
        ("samples?kind=validation", lambda found: found["samples"] == [] and found["steps"] is None),
        ("samples?text=SCRIPT", lambda found: [one["output"] for one in found["samples"]] == [HOSTILE]),
        ("samples?limit=1&after=1,0,0", lambda found: found["samples"][0]["place"] == [1, 0, 1]),
        ("tokens?step=1&id=x", lambda found: found["tokens"] is None),
        ("settings", lambda found: found["settings"][0]["name"] == "trainer.total_training_steps"),
        ("timeline?first=2&last=2", lambda found: (found["first"], found["last"]) == (2, 2)),
        ("failures", lambda found: found["journals"][0]["workers"][0]["restarts"] == 1),
        ("ledger", lambda found: found["steps"] == 0),
    ],
)
def test_each_view_has_its_answer(run, view, holds):
    status, found = answer(run, f"/api/runs/mine/{view}")
    assert status == 200 and holds(found), found


def test_a_second_page_of_samples_follows_the_first(run):
    async def ask(client: TestClient, _: ViewServer) -> list[list[int]]:
        first = json.loads(await (await client.get("/api/runs/mine/samples?limit=1")).text())
        after = ",".join(map(str, first["next"]))
        second = json.loads(await (await client.get(f"/api/runs/mine/samples?limit=1&after={after}")).text())
        return [one["place"] for one in first["samples"] + second["samples"]]

    assert served(run, ask) == [[1, 0, 0], [1, 0, 1]]


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("/api/runs/other/metrics", "there is no run other; there are mine"),
        ("/api/runs/mine/secrets", "there is no view secrets; there are metrics, series"),
        ("/api/runs/mine/samples?lowest=high", "lowest=high: must be a number"),
        ("/api/runs/mine/samples?first=inf", "first=inf: must be a number"),
        ("/api/runs/mine/samples?after=1,2", "after=1,2: must be three numbers"),
        ("/api/runs/mine/samples?prompt=../x", "prompt=../x: must be the 16 digits"),
        ("/api/runs/mine/samples?kind=secret", "kind=secret: there are rollout, validation"),
        ("/api/runs/mine/graph.svg", "only runs of PPO"),
        ("/page/nosuch.js", "there is no nosuch.js"),
    ],
)
def test_a_request_that_cannot_be_answered_says_why(run, path, says):
    status, found = answer(run, path)
    assert 400 <= status < 500 and says in found["error"]


@pytest.mark.parametrize(
    "path",
    [
        "/api/runs/../../etc/passwd/metrics",
        "/api/runs/..%2F..%2Fetc/metrics",
        "/api/runs/%2e%2e/metrics",
        "/api/runs/mine/..%2Fconfig.json",
        "/page/..%2Fserver.py",
        "/page/%2e%2e/server.py",
        "/page//etc/passwd",
    ],
)
def test_nothing_outside_the_runs_and_the_page_can_be_named(run, path):
    async def ask(client: TestClient, _: ViewServer) -> tuple[int, str]:
        reader, writer = await asyncio.open_connection(LOCAL, client.port)
        writer.write(f"GET {path} HTTP/1.1\r\nHost: {LOCAL}\r\nConnection: close\r\n\r\n".encode())  # as it stands
        head, _, body = (await reader.read()).decode().partition("\r\n\r\n")
        writer.close()
        return int(head.split()[1]), body

    status, body = served(run, ask)
    assert status in (400, 404) and "root:" not in body and "import" not in body


def test_a_job_of_the_timeline_that_is_no_trace_is_not_read(run):
    status, found = answer(run, "/api/runs/mine/timeline?job=../../master")
    assert status == 200 and found["job"] == "job"


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE"])
def test_the_page_only_reads(run, method):
    async def ask(client: TestClient, _: ViewServer) -> int:
        return (await client.request(method, "/api/runs")).status

    assert served(run, ask) == 405


def test_a_change_is_sent_to_an_open_page(tmp_path):
    write_metrics(tmp_path / "live", [1])

    async def ask(client: TestClient, _: ViewServer) -> list[int]:
        response = await client.get("/api/events")
        steps = []
        async for line in response.content:
            if line.startswith(b"data: "):
                steps.append(json.loads(line[6:])["step"])
                if len(steps) == 2:
                    return steps
                write_metrics(tmp_path / "live", [2])
        return steps

    assert served(tmp_path / "live", ask) == [1, 2]


# -- who may ask


def test_the_page_runs_only_its_own_scripts_and_asks_nobody_else(run):
    async def ask(client: TestClient, _: ViewServer) -> tuple[str, str]:
        response = await client.get("/")
        return response.headers["Content-Security-Policy"], await response.text()

    policy, text = served(run, ask)
    assert "default-src 'none'" in policy and "script-src 'self'" in policy and "unsafe" not in policy
    assert "http://" not in text and "https://" not in text and "onload" not in text


@pytest.mark.parametrize(
    "headers",
    [
        {"Host": "evil.example"},
        {"Host": "evil.example:80"},
        {"Host": ""},
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
        {"Sec-Fetch-Site": "cross-site"},
    ],
)
def test_a_page_of_a_stranger_cannot_read_along(run, headers):
    status, found = answer(run, "/api/runs", **headers)
    assert status == 403 and "mine" not in json.dumps(found)


def test_a_loopback_address_needs_no_token_and_another_one_does(run):
    assert answer(run, "/api/runs")[0] == 200
    for headers in ({}, {"Cookie": "hybridrl_view=x"}):
        status, found = answer(run, "/api/runs", host="0.0.0.0", **headers)
        assert status == 401 and "open the link" in found["error"]
    assert answer(run, "/api/runs?token=wrong", host="0.0.0.0")[0] == 401


def test_the_link_opens_the_page_and_leaves_the_token_in_a_cookie_alone(run):
    async def ask(client: TestClient, server: ViewServer) -> tuple[str, int, str]:
        first = await client.get(f"/?{server.link.partition('?')[2]}", allow_redirects=False)
        cookie = first.headers["Set-Cookie"]
        later = await client.get("/api/runs", headers={"Cookie": cookie.partition(";")[0]})
        return first.headers["Location"], later.status, cookie

    location, status, cookie = served(run, ask, host="0.0.0.0")
    assert (location, status) == ("/", 200) and "HttpOnly" in cookie and "SameSite" in cookie


def test_a_port_in_use_is_one_line_with_the_way_out(run):
    runs = open_runs([str(run)])
    first = ViewServer(runs, host=LOCAL, port=0)
    first.take_port()
    port = int(first.link.rstrip("/").rpartition(":")[2])
    with pytest.raises(ConfigError, match=f"--port {port}: cannot listen there .*--port 0"):
        ViewServer(runs, host=LOCAL, port=port).take_port()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], "name the directory of a run, or use --demo"),
        (["no/such/run"], "no/such/run: there is no such directory"),
        (["x", "--port", "70000"], "--port=70000: must be from 0"),
    ],
)
def test_a_mistake_on_the_command_line_is_one_line(words, says, capsys):
    assert cli.main(["view", *words]) == 2
    error = capsys.readouterr().err
    assert says in error and error.count("\n") == 1


# -- a run of a stranger


def strict(text: str) -> Any:
    """Parse JSON as browsers do."""

    def refuse(name: str) -> None:
        raise ValueError(f"{name} is no JSON")

    return json.loads(text, parse_constant=refuse)


LEVELS = [f"a{n}: &a{n} [{','.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 10)]
LAUGHS = "a0: &a0 [x,x,x,x,x,x,x,x,x]\n" + "".join(LEVELS)


@pytest.fixture
def foreign(tmp_path) -> Path:
    path = tmp_path / "foreign"
    (path / "global_step_1").mkdir(parents=True)
    (path / "global_step_1" / "config.yaml").write_text(LAUGHS)
    steps = ["1" + "0" * 400, "1e300", "NaN", "Infinity", '"x"', "[]", "null"]
    lines = [f'{{"step": {step}, "loss": 1}}' for step in steps]
    lines += [f'{{"step": 1, "loss": {steps[0]}, "val/version": {step}, "score": 2}}' for step in steps]
    (path / "metrics.jsonl").write_text("\n".join([*lines, '{"step": 2, "score": 0.5}', ""]))
    ledger = ['{"step": []}', '{"begin": "x"}', '{"step": 1, "prompts": 5}', '{"step": 1, "stages": 3}', '{"step": 1}']
    (path / "ledger.jsonl").write_text("\n".join([*ledger, ""]))
    (path / "failures.jsonl").write_text('{"detected_at": "x"}\n{"detected_at": NaN, "step": Infinity}\n')
    text = b'{"at": [], "n": 1}'
    (path / "master").mkdir()
    (path / "master" / "run").mkdir()
    (path / "master" / "run" / f"{EVENTS}0.jsonl").write_bytes(b"%08x %s\n" % (zlib.crc32(text), text))
    return path


@pytest.mark.parametrize("view", ["metrics", "series?name=score", "settings", "failures", "ledger", "samples"])
def test_what_a_stranger_wrote_into_a_run_is_left_out_and_each_view_answers(foreign, view):
    async def ask(client: TestClient, _: ViewServer) -> tuple[int, str]:
        response = await client.get(f"/api/runs/foreign/{view}")
        return response.status, await response.text()

    began = time.monotonic()
    status, text = served(foreign, ask)
    assert status == 200 and strict(text) is not None
    if view.startswith("series"):
        assert strict(text)["series"]["score"] == [[1, 2], [2.0, 0.5]]
    assert time.monotonic() - began < 20
    assert cli.main(["doctor", str(foreign)]) in (0, 1)


@pytest.mark.parametrize("named", ["http://127.0.0.1:{port}/x", "simplecache::http://127.0.0.1:{port}/x", "http:/x"])
def test_samples_of_a_local_run_are_not_asked_for_elsewhere(foreign, named):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        where = named.format(port=listener.getsockname()[1])
        (foreign / "config.json").write_text(json.dumps({"trainer": {"rollout_data_dir": where}}))
        status, found = answer(foreign, "/api/runs/foreign/samples")
        listener.settimeout(0)
        with pytest.raises(BlockingIOError):  # nobody has connected
            listener.accept()
    assert status == 200 and found["samples"] == []


def test_more_metrics_than_memory_is_for_are_left_out(tmp_path, monkeypatch):
    monkeypatch.setattr(metrics, "MAX_VALUES", 1000)
    lines = [json.dumps({"step": step} | {f"m{step % 50}-{n}": 1.0 for n in range(10)}) for step in range(200)]
    (tmp_path / "metrics.jsonl").write_text("\n".join([*lines, ""]))
    history = metrics.MetricHistory(Folder(str(tmp_path)))
    history.update()
    assert 0 < len(history) * len(history.names()) <= 1000
