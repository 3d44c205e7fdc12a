"""A standby process starts commands by a fork; without it they start all the same. Real processes, without Ray."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest

from hybridrl.single_controller.processes.standby import request
from hybridrl.single_controller.processes.standby.loaded_modules import loaded_modules

ROOT = Path(__file__).parents[4]
WORKER = """
import json, os, sys
found = {"argv": sys.argv[1:], "pid": os.getpid(), "parent": os.getppid(), "group": os.getpgid(0), "name": __name__}
found |= {"variable": os.environ.get("VARIABLE"), "directory": os.getcwd(), "imported": "wave" in sys.modules}
print(json.dumps(found), flush=True)
"""
TIMEOUT_S = 60.0


class StartedStandby:
    """A standby process of this test's process, and requests to it."""

    def __init__(self, folder, *modules, path=()):
        self.folder, self.address = folder, f"test-standby-{uuid.uuid4().hex}"
        self.worker = folder / "worker.py"
        self.worker.write_text(WORKER)
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(request.abstract(self.address))
            listener.listen(8)
            module = "hybridrl.single_controller.processes.standby.process"
            self.process = subprocess.Popen(
                [sys.executable, "-m", module, str(listener.fileno()), str(os.getpid())],
                pass_fds=[listener.fileno()],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                cwd=ROOT,
                text=True,
            )
        with self.process.stdin as stdin:
            json.dump({"modules": modules, "path": [*sys.path, *map(str, path)]}, stdin)
        self.answer = json.loads(self.process.stdout.readline())

    def start_worker(self, *arguments):
        """Have a worker started, and return what it printed."""
        command = [sys.executable, "-I", "-S", request.__file__, self.address, sys.executable, str(self.worker)]
        environment = os.environ | {"VARIABLE": "of the request"}
        starter = subprocess.Popen(
            [*command, *arguments], env=environment, cwd=self.folder, stdout=subprocess.PIPE, text=True
        )
        with starter.stdout as printed:  # not up to its end: a stopped standby process keeps the pipe open
            line = printed.readline()
        assert starter.wait(TIMEOUT_S) == 0
        return json.loads(line)

    def close(self):
        self.process.kill()
        self.process.wait(TIMEOUT_S)
        self.process.stdout.close()


@pytest.fixture
def standby(tmp_path):
    started = StartedStandby(tmp_path, "wave")
    yield started
    started.close()


def test_two_workers_are_forks_with_the_imports_and_the_surroundings_of_their_requests(standby, tmp_path):
    assert standby.answer == {"imported": 1}
    first, second = standby.start_worker("--one", "two words"), standby.start_worker()
    assert first["argv"] == ["--one", "two words"] and second["argv"] == []
    for worker in (first, second):
        assert worker["imported"] and worker["parent"] == standby.process.pid and worker["name"] == "__main__"
        assert (worker["variable"], worker["directory"]) == ("of the request", str(tmp_path))
        assert worker["group"] == worker["pid"]
    assert first["pid"] != second["pid"]


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGSTOP])
def test_a_killed_or_stopped_standby_process_delays_a_worker_and_no_more(standby, sent):
    standby.process.send_signal(sent)
    if sent == signal.SIGKILL:
        standby.process.wait(TIMEOUT_S)
    worker = standby.start_worker("again")
    assert worker["argv"] == ["again"] and not worker["imported"] and worker["parent"] != standby.process.pid
    assert (worker["variable"], worker["name"]) == ("of the request", "__main__")


def test_a_standby_process_that_was_stopped_runs_no_command_that_has_started_elsewhere(standby, tmp_path):
    standby.worker.write_text(f"open({str(tmp_path / 'starts')!r}, 'a').write('x')\n{WORKER}")
    standby.process.send_signal(signal.SIGSTOP)
    standby.start_worker()
    standby.process.send_signal(signal.SIGCONT)
    assert standby.start_worker()["parent"] == standby.process.pid  # it serves in order, so the first one is done with
    assert (tmp_path / "starts").read_text() == "xx"


def test_a_module_that_starts_a_thread_is_named_and_nothing_is_forked(tmp_path):
    thread = "threading.Thread(target=time.sleep, args=(99,), name='sampler', daemon=True)"
    code = f"import threading, time\n{thread}.start()"
    (tmp_path / "starts_a_thread.py").write_text(code)
    standby = StartedStandby(tmp_path, "wave", "starts_a_thread", "no_such_module", path=[tmp_path])
    try:
        assert standby.answer == {"refused": "an import started the threads sampler"}
        assert standby.process.wait(TIMEOUT_S) == 0
        assert not standby.start_worker()["imported"]
    finally:
        standby.close()


PARENT = """
import json, os, pathlib, signal, sys
folder, number = pathlib.Path(sys.argv[1]), int(sys.argv[2])
sys.path.insert(0, os.getcwd())
from tests.single_controller.processes.standby.test_process import StartedStandby
standby = StartedStandby(folder)
standby.worker.write_text("import sys, os; print(os.getpid(), flush=True); sys.stdin.read()")
print(json.dumps([standby.process.pid, standby.start_worker()]), flush=True)
if number:
    standby.process.send_signal(number)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("sent", [0, int(signal.SIGSTOP)])
def test_a_standby_process_ends_with_its_parent_and_its_workers_stay(tmp_path, sent):
    command = [sys.executable, "-c", PARENT, str(tmp_path), str(sent)]
    parent = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT)
    standby_id, worker_id = json.loads(parent.stdout.readline())
    parent.wait(TIMEOUT_S)
    wait_ended(standby_id)
    assert is_running(worker_id)
    parent.stdin.close()  # the worker reads up to here
    wait_ended(worker_id)
    parent.stdout.close()


def wait_ended(process_id):
    until = time.monotonic() + TIMEOUT_S
    while is_running(process_id):
        assert time.monotonic() < until, f"process {process_id} has not ended"
        time.sleep(0.01)


def is_running(process_id):
    try:
        state = Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state not in "ZX"


def test_modules_of_the_installation_and_the_library_are_listed_in_the_order_of_their_import(tmp_path, monkeypatch):
    (tmp_path / "code_of_a_user.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    import code_of_a_user  # noqa: F401

    found = loaded_modules()
    assert {"json", "pytest", "hybridrl.single_controller.processes.standby.request"} <= set(found)
    assert not {"code_of_a_user", "__main__"} & set(found)
    assert found.index("hybridrl") < found.index("hybridrl.single_controller.processes.standby.request")
