"""`ChildProcess`: it ends as the program did, and nothing of the program outlives it or its parent."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from hybridrl.system.child_process import ChildProcess, ProcessLimits
from tests.support.processes import is_alive

ROOT = Path(__file__).parents[2]

# Starts a process in a session of its own through one that ends at once, as a daemon does, and prints its id.
DAEMON = (
    "import os, subprocess, sys, time\n"
    "if os.fork() == 0:\n"
    "    print(subprocess.Popen(['sleep', '600'], start_new_session=True).pid, flush=True)\n"
    "    os._exit(0)\n"
    "time.sleep(600)\n"
)


def wait_until_gone(pid: int) -> bool:
    stop = time.monotonic() + 60
    while is_alive(pid) and time.monotonic() < stop:
        time.sleep(0.02)
    return not is_alive(pid)


@pytest.mark.parametrize(
    ("code", "exit_code", "words"),
    [
        ("", 0, "ended by itself with exit status 0"),
        ("raise SystemExit(7)", 7, "ended by itself with exit status 7"),
        ("import os; os.kill(os.getpid(), 15)", -15, "was killed by SIGTERM"),
        ("import ctypes; ctypes.string_at(0)", -11, "was killed by SIGSEGV"),
        ("import os; os.kill(os.getpid(), 9)", -9, "was killed by SIGKILL (the machine may be out of memory)"),
    ],
)
def test_the_exit_code_is_that_of_the_program(code, exit_code, words):
    child = ChildProcess([sys.executable, "-c", code])
    assert child.wait(20) == exit_code == child.end()
    assert child.describe_exit(exit_code) == words


def test_a_program_that_is_missing_ends_with_status_127(capfd):
    child = ChildProcess(["no-such-program"])
    assert child.wait(20) == 127
    assert "cannot start no-such-program" in capfd.readouterr().err


def test_what_a_program_prints_does_not_command_the_terminal(capfd):
    escapes = "\x1b]0;title\x07\x1b[2J\x9b31m\r\b\x7f\u202e"
    print_them = f"import sys; sys.stdout.write({escapes!r} + 'é\\n'); sys.stderr.write({escapes!r})"
    child = ChildProcess([sys.executable, "-X", "utf8", "-c", print_them])
    assert child.wait(30) == 0
    child.end()
    found = capfd.readouterr()
    assert not {*"\x1b\x07\x9b\r\b\x7f\u202e"} & {*found.out, *found.err}
    assert found.out.endswith("é\n") and "]0;title" in found.err


def test_end_kills_a_stopped_program_at_once():
    child = ChildProcess(["sleep", "600"])
    start = time.monotonic()
    assert child.poll() is None
    assert child.end() == -signal.SIGKILL and time.monotonic() - start < 60  # and not when it ends by itself


def test_a_child_outlives_the_thread_that_started_it():
    children = []
    thread = threading.Thread(target=lambda: children.append(ChildProcess(["sleep", "600"])))
    thread.start()
    thread.join()
    assert children[0].wait(0.7) is None
    children[0].end()


def start_daemon_in(tmp_path: Path, *, end: str) -> tuple[subprocess.Popen, int]:
    """Start a program whose child starts a daemon; return the program and the daemon's id."""
    code = (
        "import sys, time\nfrom hybridrl.system.child_process import ChildProcess\n"
        f"child = ChildProcess([sys.executable, '-c', {DAEMON!r}])\n" + end
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    parent = subprocess.Popen([sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, text=True)
    return parent, int(parent.stdout.readline())


def test_a_daemon_ends_with_the_parent_that_is_killed(tmp_path):
    parent, daemon = start_daemon_in(tmp_path, end="time.sleep(600)")
    assert is_alive(daemon)
    parent.kill()
    parent.wait(10)
    assert wait_until_gone(daemon)


def test_a_daemon_ends_with_its_parent_though_a_copy_of_the_parent_lives(tmp_path):
    """A fork holds the same pipe to the guard; the parent's process id tells that it has ended."""
    end = f"import os\nif os.fork() == 0:\n    time.sleep(20)\n    os._exit(0)\nopen({str(tmp_path / 'x')!r}, 'w')\n"
    parent, daemon = start_daemon_in(tmp_path, end=end + "time.sleep(600)")
    while not (tmp_path / "x").exists():
        time.sleep(0.02)
    parent.kill()
    parent.wait(10)
    assert wait_until_gone(daemon)


def test_a_reader_that_does_not_read_keeps_no_child_alive():
    code = (
        "import sys, time\nfrom hybridrl.system.child_process import ChildProcess\n"
        "child = ChildProcess([sys.executable, '-c', \"import os\\nprint(os.getpid(), flush=True)\\n"
        "while True: print('x' * 1000)\"])\ntime.sleep(600)"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    parent = subprocess.Popen([sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, text=True)
    pid = int(parent.stdout.readline())
    time.sleep(0.5)  # the pipe is full now
    parent.kill()
    parent.wait(10)
    assert wait_until_gone(pid)


def test_the_limits_are_those_of_the_program_and_not_of_the_guard(capfd):
    code = "import resource as r; print([r.getrlimit(k)[0] for k in (r.RLIMIT_DATA, r.RLIMIT_FSIZE, r.RLIMIT_CORE)])"
    child = ChildProcess([sys.executable, "-c", code], limits=ProcessLimits(memory_mb=512, file_mb=3))
    assert child.wait(20) == 0
    assert capfd.readouterr().out == f"[{512 << 20}, {3 << 20}, 0]\n"


@pytest.mark.parametrize("size", [(1 << 20) - 1, 1 << 20, (1 << 20) + 1, 3 << 20])
def test_output_up_to_its_limit_is_passed_on_and_the_first_byte_beyond_it_is_said(capfd, size):
    whole, rest = divmod(size, 4096)
    code = f"import os\nfor _ in range({whole}): os.write(1, b'y' * 4096)\nos.write(1, b'y' * {rest})"
    child = ChildProcess([sys.executable, "-c", code], limits=ProcessLimits(output_mb=1))
    assert child.wait(20) == 0
    printed = capfd.readouterr().out
    assert printed.count("y") == min(size, 1 << 20)
    assert printed.count("the rest is dropped") == (size > 1 << 20)
