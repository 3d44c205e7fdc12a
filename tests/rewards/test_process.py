"""What a reward function returns, sends, starts, prints and allocates stays with it. Real processes, real attacks."""

import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hybridrl.config import PPOConfig, from_dict
from hybridrl.config.reward_limits import RewardLimits
from hybridrl.errors import ConfigError
from hybridrl.rewards import process
from hybridrl.rewards.function_address import FunctionAddress
from hybridrl.rewards.process_pool import ScoreProcessPool
from hybridrl.rewards.sample_score import read_score
from hybridrl.system.child_process import pickled_call
from tests.support.processes import is_alive

ROOT = Path(__file__).parents[2]

FUNCTIONS = """
import importlib, json, os, re, signal, socket, struct, subprocess, sys, time

class Evil:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.system, (f"echo executed > {self.path}",)

def connection():
    for name in os.listdir("/proc/self/fd"):
        try:
            if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                return int(name)
        except FileNotFoundError:
            pass

def answer(what, argument=None):
    if what == "evil":
        return {"score": 1.0, "extra": Evil(argument)}
    if what == "fork and return":
        os.fork()
    if what == "forge":
        payload = argument.encode()
        os.write(connection(), struct.pack("!I", len(payload)) + payload)
        time.sleep(600)
    if what == "repeat as another process":
        if os.fork() == 0:
            os.write(connection(), argument)
            os._exit(0)
    if what == "claim":
        os.write(connection(), struct.pack("!I", argument))
        for _ in range(200):
            os.write(connection(), bytes(1 << 20))
        time.sleep(600)
    if what == "large":
        return "x" * argument
    if what == "huge":
        return 10 ** argument
    if what == "allocate":
        return len(bytearray(argument))
    if what == "write":
        with open(argument, "wb") as file:
            file.write(bytes(3 << 20))
    if what == "many":
        [subprocess.Popen(["sleep", "600"]) for _ in range(argument)]
        time.sleep(600)
    if what == "print":
        for _ in range(argument):
            print("y" * (1 << 20))
    if what == "environment":
        return dict(os.environ)
    if what == "regular expression":
        print(os.getpid(), flush=True)
        re.match(r"(a+)+b", "a" * 60)
    if what == "start a session":
        child = subprocess.Popen(["sleep", "600"], start_new_session=True)
        with open(argument, "w") as file:
            file.write(str(child.pid))
        time.sleep(600)
    if what == "kill the guard":
        child = subprocess.Popen(["sleep", "600"], start_new_session=True)
        with open(argument, "w") as file:
            file.write(str(child.pid))
        os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(600)
    if what == "import":
        for number in range(argument):
            importlib.import_module(f"slow_{number}")
    if what == "import for ever":
        number = 0
        while True:
            number += 1
            try:
                importlib.import_module(f"missing_{number}")
            except ImportError:
                time.sleep(0.01)
    return what
"""


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("functions")
    (folder / "functions.py").write_text(FUNCTIONS)
    for number in range(5):
        (folder / f"slow_{number}.py").write_text("import time; time.sleep(0.4)\n")
    return str(folder / "functions.py")


@pytest.fixture
def pool(path):
    pools = []

    def start(*, timeout_s=30.0, num_processes=1, **limits):
        function = FunctionAddress(path, "answer", arguments=("what",))
        settings = {"num_processes": num_processes, "timeout_s": timeout_s}
        pools.append(ScoreProcessPool(function, **settings, **({"limits": RewardLimits(**limits)} if limits else {})))
        return pools[-1]

    yield start
    for each in pools:
        each.close()


def call(what, argument=None):
    return {"what": what, "argument": argument}


def wait_until_gone(pid: int, seconds: float = 60.0) -> bool:
    stop = time.monotonic() + seconds
    while is_alive(pid) and time.monotonic() < stop:
        time.sleep(0.02)
    return not is_alive(pid)


# -- what it returns


def test_an_answer_executes_nothing_in_the_calling_process(pool, tmp_path):
    (result,) = pool().map([call("evil", str(tmp_path / "proof"))])
    assert not (tmp_path / "proof").exists()
    assert result.value["score"] == 1.0 and "Evil object" in result.value["extra"]


def test_a_copy_of_the_process_does_not_answer(pool):
    calls = [call(f"call {number}") for number in range(6)]
    results = pool().map([call("fork and return"), *calls, call("fork and return"), call("last")])
    wanted = ["fork and return", *(each["what"] for each in calls), "fork and return", "last"]
    assert [(result.value, result.failure) for result in results] == [(value, None) for value in wanted]


@pytest.mark.parametrize("forged", ['["pid", 0, "ok", 1.0]', "[" * 100_000, "{}", "[1, 2, 3, [4]]", "no JSON"])
def test_a_forged_answer_ends_its_process_and_fails_its_call(pool, forged):
    results = pool().map([call("before"), call("forge", forged), call("after")])
    assert [result.value for result in results] == ["before", None, "after"]
    assert results[1].failure == "error" and "was killed: " in results[1].reason


def test_an_answer_from_another_process_is_refused(pool):
    scores = pool()
    frame = b"\0\0\0\x18" + b'[1, 2, "ok", 123456789 ]'
    assert len(frame) == 28
    results = scores.map([call("repeat as another process", frame), *(call("after") for _ in range(5))])
    values = [result.value for result in results]
    for _ in range(5):  # the other process may write late, and then fails one more call
        assert 123456789 not in values
        values = [result.value for result in scores.map([call("x"), call("y")])]
        if values == ["x", "y"]:
            break
    assert values == ["x", "y"]


def test_an_answer_that_claims_gigabytes_is_not_collected(pool):
    scores, before = pool(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    results = scores.map([call("claim", 4_000_000_000), call("after")])
    assert results[0].failure == "error" and "at most 64" in results[0].reason and results[1].value == "after"
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50_000  # kB; it sends 200 MB


def test_a_result_that_is_too_large_fails_its_call_alone(pool):
    scores = pool(memory_mb=2048)
    before, too_large, after = scores.map([call("before"), call("large", 65 << 20), call("after")])
    assert (before.value, after.value) == ("before", "after")
    assert "its result has 65 MB; at most 64" in too_large.reason


def test_a_number_that_no_float_holds_is_a_failed_sample(pool):
    scores = [read_score(result) for result in pool().map([call("huge", 400), call("huge", 5000), call("huge", 39)])]
    assert [score.failure for score in scores] == ["error"] * 3
    assert all("more than float32 can hold" in score.reason for score in scores)
    assert read_score(process.CallResult(value=10**400)).failure == "error"


# -- what it may use


def test_memory_beyond_the_limit_fails_the_call(pool):
    results = pool(memory_mb=300).map([call("allocate", 400 << 20), call("allocate", 100 << 20)])
    assert results[0].failure == "error" and results[0].reason.startswith("MemoryError")
    assert results[1].value == 100 << 20


def test_a_file_beyond_the_limit_fails_the_call(pool, tmp_path):
    results = pool(file_mb=2).map([call("write", str(tmp_path / "file")), call("after")])
    assert "File too large" in results[0].reason and results[1].value == "after"
    assert (tmp_path / "file").stat().st_size <= 2 << 20


def test_more_processes_than_allowed_are_killed(pool):
    results = pool(processes=5, timeout_s=60).map([call("many", 10), call("after")])
    assert results[0].reason == "its process was killed with more than 5 processes" and results[1].value == "after"


def test_output_beyond_the_limit_is_dropped_and_said(pool, capfd):
    scores = pool(output_mb=2)
    assert [result.value for result in scores.map([call("print", 5), call("print", 5)])] == ["print", "print"]
    scores.close()
    printed = capfd.readouterr().out
    assert printed.count("y") <= 2 << 20 and printed.count("more than 2 MB of output, the rest is dropped") == 1


def test_secrets_of_the_environment_are_not_seen_unless_named(pool, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "secret")
    monkeypatch.setenv("JUDGE_KEY", "for the judge")
    (seen,) = (result.value for result in pool(env=("JUDGE_KEY",)).map([call("environment")]))
    assert "WANDB_API_KEY" not in seen and seen["JUDGE_KEY"] == "for the judge" and seen["PATH"] == os.environ["PATH"]


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"memory": 3}, "reward_model.limits.memory: there is no such key; there are env, file_mb, memory_mb"),
        ({"memory_mb": 0}, "reward_model.limits.memory_mb=0: must be > 0"),
        ({"processes": 1.5}, "reward_model.limits.processes=1.5: must be a whole number"),
        ({"env": [None]}, "reward_model.limits.env=[null]: must be text"),
    ],
)
def test_limits_that_are_none_are_refused(limits, message):
    config = from_dict(PPOConfig, {"reward_model": {"limits": limits}})
    with pytest.raises(ConfigError) as caught:
        RewardLimits.of(config.reward_model.limits)
    assert message in str(caught.value)


# -- its time


def test_imports_do_not_count_against_the_limit_of_a_call(pool):
    results = pool(timeout_s=1.0).map([call("import", 5), call("after")])  # 2 s of imports
    assert [(result.value, result.failure) for result in results] == [("import", None), ("after", None)]


def test_a_function_that_imports_for_ever_is_ended(pool, monkeypatch):
    monkeypatch.setattr(process, "LOAD_TIMEOUT_S", 3.0)
    scores = pool(timeout_s=0.5)
    assert scores.check() is None
    start = time.monotonic()
    (result,) = scores.map([call("import for ever")])
    assert result.failure == "timeout" and 2.5 < time.monotonic() - start < 60


# -- its end


@pytest.mark.parametrize("how", ["timeout", "close"])
def test_a_process_in_a_session_of_its_own_ends_too(pool, tmp_path, how):
    scores = pool(timeout_s=3.0 if how == "timeout" else 60)
    if how == "timeout":
        (result,) = scores.map([call("start a session", str(tmp_path / "pid"))])
        assert result.failure == "timeout"
    else:
        scores._start_missing()
        [child] = scores._processes
        while not child.loaded:
            child.receive()
        child.send_calls([0], [pickled_call("score", **call("start a session", str(tmp_path / "pid")))])
        while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
            time.sleep(0.02)
        scores.close()
    assert wait_until_gone(int((tmp_path / "pid").read_text()))


def test_what_it_started_ends_also_if_it_kills_its_guard(pool, tmp_path):
    results = pool(timeout_s=60).map([call("kill the guard", str(tmp_path / "pid")), call("after")])
    assert results[0].failure == "error" and results[1].value == "after"
    assert wait_until_gone(int((tmp_path / "pid").read_text()))


PARENT = """
import sys, threading, time
from hybridrl.rewards.process_pool import ScoreProcessPool
from hybridrl.rewards.function_address import FunctionAddress

pool = ScoreProcessPool(FunctionAddress(sys.argv[1], "answer", arguments=("what",)), timeout_s=600)
pool.map([{"what": sys.argv[2], "argument": sys.argv[3]}])
"""


@pytest.mark.parametrize("what", ["regular expression", "start a session"])
def test_it_ends_with_its_parent_also_without_the_interpreters_lock(path, tmp_path, what):
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", PARENT, path, what, str(tmp_path / "pid")]
    parent = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    if what == "regular expression":
        pid = int(parent.stdout.readline())
    else:
        while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
            time.sleep(0.02)
        pid = int((tmp_path / "pid").read_text())
    assert is_alive(pid)
    time.sleep(0.3)
    parent.send_signal(signal.SIGKILL)
    parent.wait(10)
    assert wait_until_gone(pid)
