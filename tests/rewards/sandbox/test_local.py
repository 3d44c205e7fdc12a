"""Programs on this machine: what goes in, what comes out, and a machine without a sandbox."""

import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace

import pytest

from hybridrl.rewards.sandbox import Limits, LocalSandbox, Program, SandboxFailed, SandboxUnavailable, Verdict, local
from hybridrl.rewards.sandbox.job import Outcome
from hybridrl.serving.agent_loop.failures import FailureSort, sort_failure


def test_a_program_reads_its_input_and_files_and_returns_what_it_prints_and_writes(sandbox):
    code = (
        "import sys\nfrom helper.double import double\nprint(double(int(input())), sys.argv, __name__)\n"
        "open('out/result', 'wb').write(open('helper/data', 'rb').read()[::-1])\n"
        "print('note', file=sys.stderr)\nexit(0)"
    )
    files = {"helper/double.py": b"def double(x): return 2 * x", "helper/data": b"\x00\xff", "out/keep": b""}
    outcome = sandbox.run(Program(code, stdin="21\n", files=files, fetch=("out/result", "missing")))
    assert outcome.stdout == "42 ['main.py'] __main__\n"
    assert (outcome.verdict, outcome.exit_status, outcome.stderr) == (Verdict.OK, 0, "note\n")
    assert outcome.files == {"out/result": b"\xff\x00"}
    assert outcome.cpu_s > 0


def test_a_script_of_the_shell_runs_and_its_status_is_the_outcomes(sandbox):
    outcome = sandbox.run(Program("read name; echo hello $name; exit 7", language="bash", stdin="you"))
    assert (outcome.stdout, outcome.exit_status, outcome.verdict) == ("hello you\n", 7, Verdict.RUNTIME_ERROR)
    assert outcome.detail == "it ended with status 7"


def test_a_signal_is_a_negative_status_and_a_traceback_is_seen(sandbox):
    killed = sandbox.run(Program("import os; os.kill(os.getpid(), 11)"))
    raised = sandbox.run(Program("1 / 0"))
    assert (killed.exit_status, killed.detail) == (-signal.SIGSEGV, "it ended by signal 11")
    assert raised.exit_status == 1 and raised.stderr.endswith("ZeroDivisionError: division by zero\n")


def test_an_unknown_language_says_nothing_about_the_program(sandbox):
    with pytest.raises(SandboxFailed, match="language='cpp': the local sandbox runs python and bash"):
        sandbox.run(Program("int main(){}", language="cpp"))


@pytest.mark.parametrize("name", ["/etc/passwd", "../x", "a/../../x", ".", "main.py", "a//b", ""])
def test_a_file_outside_the_directory_is_refused(name):
    with pytest.raises(ValueError, match="is no name of a file below"):
        Program("", files={name: b""})


def test_programs_of_several_threads_have_their_own_files_and_outputs(sandbox):
    found = {}

    def run(number):
        code = f"open('own', 'w').write('{number}'); print(open('own').read(), len(__import__('os').listdir('.')))"
        found[number] = sandbox.run(Program(code)).stdout

    threads = [threading.Thread(target=run, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert found == {number: f"{number} 2\n" for number in range(4)}


def test_a_pickled_sandbox_keeps_its_isolation(sandbox):
    assert pickle.loads(pickle.dumps(sandbox)).check() == sandbox.check()


def test_the_sandbox_ends_with_the_process_that_started_it(sandbox):
    code = (
        "from hybridrl.rewards.sandbox import Limits, LocalSandbox, Program\n"
        "code = \"open('/proc/self/comm', 'w').write('orphan-test'); import time; time.sleep(600)\"\n"
        "LocalSandbox().run(Program(code, limits=Limits(wall_s=600)))"
    )
    with subprocess.Popen([sys.executable, "-c", code]) as parent:
        wait_until(lambda: processes_called("orphan-test"))
        parent.kill()
    wait_until(lambda: not processes_called("orphan-test"))


def processes_called(name: str) -> list[str]:
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/comm") as file:
                found += [pid] if file.read().strip() == name else []
        except OSError:
            pass
    return found


def wait_until(condition, timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.02)


def test_where_no_wall_works_programs_are_refused_with_reason_and_way_out(monkeypatch):
    monkeypatch.setattr(local, "python_file", lambda: "/nowhere/python3")
    local.find_isolation.cache_clear()
    with pytest.raises(SandboxUnavailable) as raised:
        LocalSandbox().run(Program("print(1)"))
    local.find_isolation.cache_clear()
    text = str(raised.value)
    assert "no sandbox (namespaces: /nowhere/python3 cannot be started" in text
    assert "--cap-add SYS_ADMIN" in text and "reward_model.sandbox_fusion.url" in text


def test_bwrap_that_is_not_installed_is_named():
    with pytest.raises(SandboxFailed, match="/nowhere/bwrap cannot be started"):
        LocalSandbox("bwrap", bwrap="/nowhere/bwrap").run(Program(""))


def test_what_a_sandbox_fails_at_is_an_infrastructure_failure_for_agents():
    assert sort_failure(SandboxFailed("the server is gone")) is FailureSort.INFRASTRUCTURE


@pytest.mark.parametrize(
    ("ended", "status", "stderr", "verdict"),
    [
        ("ended", 0, "MemoryError", Verdict.OK),
        ("ended", 1, "Traceback\nMemoryError\n", Verdict.MEMORY),
        ("ended", 1, "ValueError: x", Verdict.RUNTIME_ERROR),
        ("ended", -9, "", Verdict.RUNTIME_ERROR),
        ("timeout", None, "", Verdict.TIMEOUT),
        ("memory", None, "", Verdict.MEMORY),
        ("processes", None, "", Verdict.RUNTIME_ERROR),
        ("files", None, "", Verdict.RUNTIME_ERROR),
    ],
)
def test_the_verdict_follows_from_how_the_program_ended(ended, status, stderr, verdict):
    outcome = Outcome(Verdict.OK, exit_status=status, stderr=stderr, cpu_s=0.5)
    assert local.judged(outcome, ended, Limits(wall_s=1)).verdict is verdict


def test_a_program_that_used_its_time_up_and_was_killed_for_it_is_late():
    late = Outcome(Verdict.OK, exit_status=-signal.SIGXCPU, cpu_s=2.0)
    assert local.judged(late, "ended", Limits(wall_s=2)).verdict is Verdict.TIMEOUT
    assert local.judged(replace(late, cpu_s=0.1), "ended", Limits(wall_s=2)).verdict is Verdict.RUNTIME_ERROR
