"""Score processes with real timeouts, crashes and kills. Nothing here is simulated."""

import os
import signal
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from hybridrl.rewards.function_address import FunctionAddress
from hybridrl.rewards.process_pool import ScoreProcessPool
from tests.support.processes import is_alive

ROOT = Path(__file__).parents[2]
LIMIT_S = 0.5  # of the calls that are meant to run into it; generous for a trivial call on a busy machine

FUNCTIONS = """
import ctypes, os, subprocess, sys, time

import beside

def answer(what, argument=None):
    if what == "sleep":
        time.sleep(argument)
    if what == "loop":
        while True:
            pass
    if what == "exit":
        os._exit(argument)
    if what.startswith("note and"):
        again = os.path.exists(argument)
        with open(argument, "a") as file:
            file.write(f"{os.getpid()} ")
    if what == "note and hang at first" and not again:
        time.sleep(600)
    if what == "meet":
        open(os.path.join(argument, str(os.getpid())), "w").close()
        while len(os.listdir(argument)) < 2:
            time.sleep(0.01)
    if what == "note and die":
        os.kill(os.getpid(), 9)
    if what == "segfault":
        ctypes.string_at(0)
    if what == "raise":
        raise KeyError("no such\\nthing")
    if what == "leave":
        sys.exit("done")
    if what == "print":
        print("printed by the function")
        sys.stderr.write("written by the function\\n")
        os.write(1, b"x" * 100_000)
    if what == "start a child and hang":
        child = subprocess.Popen(["sleep", "600"])
        open(argument, "w").write(str(child.pid))
        time.sleep(600)
    if what == "modules":
        return sorted(set(argument) & set(sys.modules))
    if what == "unreadable":
        return type("Local", (), {})
    if what == "pid":
        return os.getpid()
    return beside.VALUE if what == "beside" else argument

async def later(what, argument=None):
    import asyncio
    await asyncio.sleep(argument or 0)
    return what
"""


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("functions")
    (folder / "beside.py").write_text("VALUE = 7\n")
    (folder / "functions.py").write_text(FUNCTIONS)
    return str(folder / "functions.py")


@pytest.fixture
def pool(path):
    pools = []

    def start(name="answer", *, timeout_s=30.0, num_processes=1, **kwargs):
        function = FunctionAddress(path, name, kwargs=kwargs, arguments=("what",))
        pools.append(ScoreProcessPool(function, num_processes=num_processes, timeout_s=timeout_s))
        return pools[-1]

    yield start
    for each in pools:
        each.close()


def call(what, argument=None):
    return {"what": what, "argument": argument}


def wait_until_gone(pids: list[int], seconds: float) -> list[int]:
    """Return those of `pids` that still run after `seconds`."""
    stop = time.monotonic() + seconds
    while (alive := [pid for pid in pids if is_alive(pid)]) and time.monotonic() < stop:
        time.sleep(0.05)
    return alive


def test_results_come_in_the_order_of_the_calls(pool):
    calls = [call("sleep", 0.05) if number % 100 == 0 else call("echo", number) for number in range(400)]
    expected = [0.05 if number % 100 == 0 else number for number in range(400)]
    assert [result.value for result in pool(num_processes=3).map(calls)] == expected


def test_no_calls_give_no_results(pool):
    assert pool().map([]) == []


def test_calls_of_one_batch_are_spread_over_the_processes(pool, tmp_path):
    scores = pool(num_processes=2)
    assert scores.check() is None
    scores.map([call("echo")] * 8)
    met = scores.map([call("meet", str(tmp_path))] * 8)  # each process waits for the other one
    assert [result.failure for result in met] == [None] * 8
    assert (
        len({result.value for result in scores.map([call("sleep", 0.05), call("pid")] * 20) if result.value != 0.05})
        == 2
    )


@pytest.mark.parametrize("hanging", [call("sleep", 600), call("loop")])
def test_a_call_that_takes_too_long_fails_alone_and_on_time(pool, hanging):
    scores = pool(timeout_s=LIMIT_S)
    (before,) = scores.map([call("pid")])
    start = time.monotonic()
    results = scores.map([call("echo", 1), call("echo", 2), hanging, call("echo", 3), call("pid")])
    assert LIMIT_S <= time.monotonic() - start < 60
    assert [result.failure for result in results] == [None, None, "timeout", None, None]
    assert results[2].reason == "it was not done after 0.5 s and was killed"
    assert [result.value for result in results[:4]] == [1, 2, None, 3]
    assert results[4].value != before.value and not is_alive(before.value)


def test_finished_calls_of_a_chunk_are_not_run_again(pool, tmp_path):
    log = tmp_path / "calls"

    def record(what):
        with open(log, "a") as file:
            file.write(what)
        if what == "h":
            time.sleep(600)
        return what

    scores = ScoreProcessPool(FunctionAddress.of(record, arguments=("what",)), timeout_s=LIMIT_S)
    scores.map([{"what": "."}] * 50)  # now chunks are large
    results = scores.map([{"what": letter} for letter in "abhcd"])
    scores.close()
    assert [result.value for result in results] == ["a", "b", None, "c", "d"]
    assert log.read_text() == "." * 50 + "abhcd"


def test_what_a_hanging_function_started_is_killed_with_it(pool, tmp_path):
    (result,) = pool(timeout_s=2.0).map([call("start a child and hang", str(tmp_path / "pid"))])
    assert result.failure == "timeout"
    assert wait_until_gone([int((tmp_path / "pid").read_text())], 60) == []


@pytest.mark.parametrize(
    ("crash", "reason"),
    [
        (call("exit", 3), "its process ended by itself with exit status 3"),
        (call("exit", 0), "its process ended by itself with exit status 0"),
        (call("segfault"), "its process was killed by SIGSEGV"),
    ],
)
def test_a_call_that_takes_its_process_down_fails_alone(pool, crash, reason):
    results = pool().map([call("echo", 1), crash, call("echo", 2), crash, call("echo", 3)])
    assert [result.value for result in results] == [1, None, 2, None, 3]
    assert [(result.failure, result.reason) for result in results if result.failure] == [("error", reason)] * 2


def test_exceptions_become_one_line_reasons_with_their_location_and_keep_the_process(pool, path):
    scores = pool()
    results = scores.map([call("pid"), call("raise"), call("leave"), call("unreadable"), call("pid")])
    assert [result.failure for result in results] == [None, "error", "error", "error", None]
    assert results[1].reason.startswith("KeyError: 'no such\\nthing'") and f"{path}:" in results[1].reason
    assert results[2].reason.startswith("SystemExit: done")
    assert "Local" in results[3].reason
    assert results[0].value == results[4].value


def test_arguments_that_cannot_be_sent_fail_alone(pool):
    results = pool().map([call("echo", 1), call("echo", lambda: None), call("echo", 2)])
    assert [result.value for result in results] == [1, None, 2]
    assert "cannot be sent" in results[1].reason


def test_async_functions_work_and_have_the_same_limit(pool):
    results = pool("later", timeout_s=LIMIT_S).map([call("a"), call("b", 0.01), call("c", 600), call("d")])
    assert [result.value for result in results] == ["a", "b", None, "d"]
    assert results[2].failure == "timeout"


def test_printing_goes_to_standard_output_and_breaks_nothing(pool, capfd):
    scores = pool()
    results = scores.map([call("print", 1), call("echo", 2), call("print", 3)])
    assert [result.value for result in results] == [1, 2, 3]
    scores.close()  # what was printed arrives beside the results, at the latest now
    printed = capfd.readouterr()
    assert printed.out.count("printed by the function") == 2 and printed.out.count("x") == 200_000
    assert printed.err.count("written by the function") == 2


def test_large_arguments_and_results_pass(pool):
    texts = ["a" * 3_000_000, "b" * 3_000_000]
    assert [result.value for result in pool().map([call("echo", text) for text in texts])] == texts


def test_a_process_that_is_stopped_in_the_middle_of_a_transfer_is_replaced_and_its_call_runs_again(pool):
    scores = pool(timeout_s=3.0)
    (pid,) = (result.value for result in scores.map([call("pid")]))
    time.sleep(0.3)  # it reports that it is idle only after its last result
    os.kill(pid, signal.SIGSTOP)
    results = scores.map([call("echo", "a" * 3_000_000), call("echo", 2)])
    assert [(result.failure, result.value) for result in results] == [(None, "a" * 3_000_000), (None, 2)]
    assert not is_alive(pid)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["kill", "stop"])
def test_a_call_whose_process_somebody_else_ends_runs_once_more(pool, tmp_path, number):
    def harm_first():
        while not (tmp_path / "pids").exists() or not (tmp_path / "pids").read_text():
            time.sleep(0.01)
        os.kill(int((tmp_path / "pids").read_text().split()[0]), number)

    harmer = threading.Thread(target=harm_first)
    harmer.start()
    results = pool(timeout_s=3.0).map([call("note and hang at first", str(tmp_path / "pids")), call("echo", 2)])
    harmer.join(10)
    assert [(result.failure, result.value) for result in results] == [(None, str(tmp_path / "pids")), (None, 2)]
    assert len(set((tmp_path / "pids").read_text().split())) == 2


def test_a_function_that_ends_its_process_again_fails_its_call(pool, tmp_path):
    results = pool().map([call("note and die", str(tmp_path / "pids")), call("echo", 2)])
    assert [result.failure for result in results] == ["error", None]
    assert results[0].reason == "its process was killed by SIGKILL (the machine may be out of memory)"
    assert len((tmp_path / "pids").read_text().split()) == 2


def test_a_child_loads_nothing_that_the_function_does_not_need(pool):
    heavy = ["torch", "ray", "numpy", "transformers", "hybridrl", "asyncio", "multiprocessing"]
    assert pool().map([call("modules", heavy)])[0].value == []


def test_a_file_finds_the_files_beside_it(pool):
    assert pool().map([call("beside")])[0].value == 7


def test_cheap_calls_do_not_cost_a_round_trip_each(pool):
    scores = pool()
    calls = [call("echo", number) for number in range(20_000)]
    scores.map(calls[:1000])
    round_trips_s, at_once_s = [], []
    for _ in range(3):
        start = time.monotonic()
        for each in calls[:1000]:
            scores.map([each])
        round_trips_s.append(time.monotonic() - start)
        start = time.monotonic()
        assert [result.value for result in scores.map(calls)] == list(range(20_000))
        at_once_s.append(time.monotonic() - start)
    # a round trip each would be 20 times as long as 1000 of them
    assert min(at_once_s) < 15 * statistics.median(round_trips_s)


@pytest.mark.parametrize(
    ("function", "kind", "reason"),
    [
        (FunctionAddress("missing.py"), "path", "no such file"),
        (FunctionAddress("missing_package.module"), "path", "no such module"),
        (FunctionAddress("reward_score.gsm8k", "nothing"), "name", "extract_solution, normalise, compute_score"),
        (FunctionAddress("reward_score.gsm8k"), "signature", "data_source"),
        (
            FunctionAddress("reward_score", "default_compute_score", kwargs={"solution_str": 1}),
            "signature",
            "solution_str",
        ),
    ],
)
def test_a_function_that_cannot_be_used_is_reported_before_any_call(function, kind, reason):
    scores = ScoreProcessPool(function, num_processes=2)
    failure = scores.check()
    assert failure.kind == kind and reason in failure.reason
    (result,) = scores.map([{}])
    scores.close()
    assert result.failure == "error" and failure.reason in result.reason


def test_a_file_that_fails_or_dies_while_loading_is_reported(tmp_path):
    for code, reason in (
        ("import no_such_thing", "No module named 'no_such_thing'"),
        ("import os; os._exit(5)", "exit status 5"),
    ):
        (tmp_path / "broken.py").write_text(code)
        failure = ScoreProcessPool(FunctionAddress(str(tmp_path / "broken.py"))).check()
        assert failure.kind == "import" and reason in failure.reason


def test_close_leaves_no_process_and_the_next_call_starts_new_ones(pool):
    scores = pool(num_processes=2)
    pids = {result.value for result in scores.map([call("sleep", 0.05), call("pid")] * 10)} - {0.05}
    scores.close()
    assert wait_until_gone(list(pids), 0) == []
    (pid,) = (result.value for result in scores.map([call("pid")]))
    assert pid not in pids


def test_a_pool_that_is_garbage_collected_leaves_no_process(path):
    scores = ScoreProcessPool(FunctionAddress(path, "answer", arguments=("what",)))
    (pid,) = (result.value for result in scores.map([call("pid")]))
    del scores
    assert wait_until_gone([pid], 60) == []


PARENT = """
import sys, threading, time
from hybridrl.rewards.process_pool import ScoreProcessPool
from hybridrl.rewards.function_address import FunctionAddress

def compute(what):
    import os
    print(os.getpid(), flush=True)
    while what == "loop":
        pass

function = FunctionAddress.of(compute, arguments=("what",))
idle, busy = (ScoreProcessPool(function, timeout_s=600) for _ in range(2))
idle.map([{"what": "idle"}])
if sys.argv[1] == "end":
    sys.exit()
threading.Thread(target=busy.map, args=([{"what": "loop"}],), daemon=True).start()
time.sleep(600)
"""


def start_parent(how: str, end: str, folder: Path) -> subprocess.Popen:
    """Start PARENT as a script, from `-c` or from standard input; `__main__` differs between them."""
    (folder / "parent.py").write_text(PARENT)
    command = {"script": [str(folder / "parent.py")], "-c": ["-c", PARENT], "stdin": ["-"]}[how]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    streams = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    parent = subprocess.Popen([sys.executable, *command, end], env=environment, cwd=folder, **streams)
    if how == "stdin":
        parent.stdin.write(PARENT)
    parent.stdin.close()
    return parent


@pytest.mark.parametrize("how", ["-c", "stdin"])
def test_children_idle_and_busy_end_when_the_parent_is_killed(how, tmp_path):
    parent = start_parent(how, "kill", tmp_path)
    pids = [int(parent.stdout.readline()) for _ in range(2)]
    assert all(map(is_alive, pids))
    parent.kill()
    parent.wait(timeout=10)
    assert wait_until_gone(pids, 60) == []


def test_children_end_when_the_parent_ends(tmp_path):
    parent = start_parent("script", "end", tmp_path)
    pid = int(parent.stdout.readline())
    assert parent.wait(timeout=30) == 0
    assert wait_until_gone([pid], 60) == []
