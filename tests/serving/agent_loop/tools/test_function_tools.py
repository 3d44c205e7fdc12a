"""Tools that hang, exit, or answer with what no file holds: the run goes on, and the process ends."""

import asyncio
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from hybridrl.errors import ConfigError
from hybridrl.serving.agent_loop.tools import function_tools
from hybridrl.serving.agent_loop.tools.function_tools import call_tool, function_tool, row_arguments
from hybridrl.serving.agent_loop.tools.tool_agent import ToolAgentLoop

ROOT = Path(__file__).parents[4]


@pytest.fixture
def release():
    """An event that lets the hanging tools of a test return when it ends."""
    event = threading.Event()
    yield event
    event.set()


def test_hanging_tools_starve_no_other_tool(monkeypatch, release):
    monkeypatch.setattr(function_tools, "TOOL_TIMEOUT_S", 2.0)
    table = {"hang": function_tool(lambda: release.wait()), "good": function_tool(lambda: 7)}

    async def call_all() -> list[str]:
        hanging = [asyncio.create_task(call_tool(table, "hang", {})) for _ in range(40)]
        await asyncio.sleep(0.05)
        answers = [await call_tool(table, "good", {}) for _ in range(20)]
        assert not any(task.done() for task in hanging)
        return answers + await asyncio.gather(*hanging)

    answers = asyncio.run(call_all())
    assert answers[:20] == ["7"] * 20
    assert set(answers[20:]) == {"Error: hang did not answer within 2 s"}


def test_a_tool_that_never_returns_is_not_called_for_ever(monkeypatch, release):
    from hybridrl.serving.agent_loop.tools import tool_threads

    monkeypatch.setattr(function_tools, "TOOL_TIMEOUT_S", 0.05)
    monkeypatch.setattr(tool_threads, "MAX_ABANDONED", 3)
    table = {"hang": function_tool(lambda: release.wait() and 1)}
    answers = [asyncio.run(call_tool(table, "hang", {})) for _ in range(4)]
    assert answers[:3] == ["Error: hang did not answer within 0.05 s"] * 3
    assert answers[3] == "Error: ToolHangs: 3 earlier calls have not returned; it is not called any more"
    release.set()
    stop = time.monotonic() + 60
    while asyncio.run(call_tool(table, "hang", {})) != "1" and time.monotonic() < stop:
        time.sleep(0.02)
    assert asyncio.run(call_tool(table, "hang", {})) == "1"  # its threads have returned


def test_calls_that_wait_for_a_place_do_not_use_up_their_time(monkeypatch):
    from hybridrl.serving.agent_loop.tools import tool_threads

    monkeypatch.setattr(function_tools, "TOOL_TIMEOUT_S", 1.0)
    monkeypatch.setattr(tool_threads, "MAX_RUNNING", 2)
    table = {"slow": function_tool(lambda: time.sleep(0.35))}

    async def call_all() -> list[str]:
        return await asyncio.gather(*(call_tool(table, "slow", {}) for _ in range(8)))

    assert asyncio.run(call_all()) == ["null"] * 8  # the last ones wait for 1.05 s


def test_a_process_ends_while_tools_hang():
    code = (
        "import asyncio, threading\nfrom hybridrl.serving.agent_loop.tools import function_tools as tools\n"
        "tools.TOOL_TIMEOUT_S = 0.2\nhang = tools.function_tool(lambda: threading.Event().wait())\n"
        "async def main():\n"
        "    print(await asyncio.gather(*(tools.call_tool({'hang': hang}, 'hang', {}) for _ in range(3))))\n"
        "asyncio.run(main())\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0 and done.stdout.count("did not answer within 0.2 s") == 3


def exits() -> None:
    raise SystemExit("tired")


async def exits_later() -> None:
    raise SystemExit("tired")


def nests() -> list:
    value: list = []
    value.append(value)
    return value


@pytest.mark.parametrize(
    ("tool", "answer"),
    [
        (exits, "Error: ToolExit: it raised SystemExit: tired"),
        (exits_later, "Error: SystemExit: tired"),
        (lambda: next(iter(())), "Error: RuntimeError: the function raised StopIteration"),
        (nests, "Error: ValueError: Circular reference detected"),
        (lambda: "\ud800 half", "? half"),
        (lambda: "x" * 5_000_000, "x" * (1 << 20)),
    ],
)
def test_whatever_a_tool_does_is_an_answer(tool, answer):
    assert asyncio.run(call_tool({"tool": function_tool(tool)}, "tool", {})) == answer


def test_whatever_a_policy_writes_is_a_call_or_none():
    parse = ToolAgentLoop.parse_tool_calls
    [deep] = parse(None, f"<tool_call>{'[' * 100_000}</tool_call>")
    assert deep.error is not None and "RecursionError" in deep.error
    start = time.process_time()
    assert parse(None, "<tool_call>" + " " * 200_000) == []
    assert parse(None, "<tool_call>" * 20_000) == []
    assert time.process_time() - start < 1
    two = parse(None, 'a<tool_call> {"name": "x"} </tool_call>b<tool_call>\n{"name": "y"}</tool_call><tool_call>{}')
    assert [call.name for call in two] == ["x", "y"]


def test_a_row_gives_a_tool_arguments_that_the_policy_cannot_set():
    def check(answer: str, ground_truth: str, tolerance: float | None = None) -> bool:
        return answer == ground_truth

    kwargs = {"check": {"create_kwargs": {"ground_truth": "7", "tolerance": None}, "execute_kwargs": None}}
    given = row_arguments({"extra_info": {"tools_kwargs": kwargs}}, "check")
    assert given == {"ground_truth": "7"} and row_arguments({"extra_info": {}}, "check") == {}

    def call(arguments: dict, given: dict = given) -> str:
        return asyncio.run(call_tool({"check": check}, "check", arguments, given=given))

    assert call({"answer": "7"}) == "true" and call({"answer": "8"}) == "false"
    assert call({"answer": "8", "ground_truth": "8"}) == "Error: check has no argument 'ground_truth'"
    with pytest.raises(ConfigError, match="tools_kwargs.check: .*no parameter 'truth'.* answer, "):
        call({"answer": "7"}, {"truth": "7"})
