"""The holder of this machine's Ray cluster: what is frozen is killed, and a cluster without Ray's processes ends."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hybridrl.driver.cluster import watch as cluster_watch
from hybridrl.system.child_guard import children_of
from hybridrl.system.process_stat import read_process_stat

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="drivers are supervised on Linux only"),
    pytest.mark.timeout(120),
]
ROOT = Path(__file__).parents[3]


@pytest.fixture
def held(request, tmp_path):
    """A holder; its cluster's process ids: raylet, worker. Its parameter: seconds until a stopped process is lost."""
    command = [sys.executable, "-m", "tests.support.driver.held_cluster", str(tmp_path)]
    command += [str(getattr(request, "param", 1))]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, cwd=ROOT, text=True, **pipes) as program:
        raylet, worker = map(int, program.stdout.readline().split())
        yield program, raylet, worker
        program.kill()


def wait_until_gone(pid, within_s=60.0):
    until = time.monotonic() + within_s
    while read_process_stat(pid).state:
        assert time.monotonic() < until
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("number", "report"), [(signal.SIGKILL, ""), (signal.SIGSTOP, "raylet (pid {}) has been stopped (SIGSTOP) for")]
)
def test_a_lost_raylet_ends_the_cluster_and_all_its_processes(held, number, report):
    program, raylet, worker = held
    os.kill(worker, signal.SIGSTOP)  # it would not see that its raylet is gone
    os.kill(raylet, number)
    assert program.stdout.readline().strip() == "3"
    err = program.communicate(timeout=60)[1]
    assert report.format(raylet) in err
    assert "Ray's raylet has ended; stopping the Ray cluster" in err
    wait_until_gone(worker)


def test_a_frozen_worker_is_killed_and_the_cluster_goes_on(held):
    program, raylet, worker = held
    os.kill(worker, signal.SIGSTOP)
    wait_until_gone(worker)
    assert read_process_stat(raylet).state
    out, _ = program.communicate("\n", timeout=60)
    assert out.strip() == "0"
    wait_until_gone(raylet)


@pytest.mark.parametrize("held", [30], indirect=True)
def test_a_process_that_is_stopped_for_a_moment_is_left_alone(held):
    program, raylet, worker = held
    for pid in (raylet, worker):
        os.kill(pid, signal.SIGSTOP)
    time.sleep(1.2)  # two polls of 0.5 s or more; the limit is 30 s
    for pid in (raylet, worker):
        os.kill(pid, signal.SIGCONT)
    time.sleep(1.2)
    assert read_process_stat(raylet).state and read_process_stat(worker).state
    out, _ = program.communicate("\n", timeout=60)
    assert out.strip() == "0"


def test_a_frozen_holder_ends_with_its_parent(held):
    program, raylet, worker = held
    [holder] = children_of(program.pid)
    os.kill(holder, signal.SIGSTOP)
    program.kill()
    for pid in (holder, raylet, worker):
        wait_until_gone(pid)


def test_a_holder_whose_parent_ends_before_the_answer_leaves_no_cluster(tmp_path):
    command = [sys.executable, "-m", "tests.support.driver.held_cluster", str(tmp_path), "1", "orphan"]
    holder = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, timeout=60)
    assert holder.returncode == 0
    for pid in map(int, holder.stdout.split()):
        wait_until_gone(pid)


def test_what_a_killed_holder_leaves_ends_with_the_stop_of_its_cluster(tmp_path):
    command = [sys.executable, "-m", "tests.support.driver.held_cluster", str(tmp_path), "30", "killed"]
    program = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, timeout=60)
    assert program.returncode == 0
    raylet, worker = map(int, program.stdout.split())
    for pid in (raylet, worker):  # by themselves they would run for two minutes
        wait_until_gone(pid, within_s=5.0)


def test_a_raylet_that_freezes_after_the_reported_end_is_killed_without_a_word(tmp_path):
    command = [sys.executable, "-m", "tests.support.driver.held_cluster", str(tmp_path), "1", "reported"]
    program = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert program.returncode == 0 and program.stderr == ""
    for pid in map(int, program.stdout.split()):
        wait_until_gone(pid, within_s=5.0)


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.parametrize(("how", "number"), [("program", "SIGSTOP"), ("submit", "SIGKILL")])
def test_a_program_without_a_supervisor_ends_with_its_cluster_and_one_error(how, number):
    command = [sys.executable, "-m", "tests.support.driver.lost_cluster", how, number]
    with subprocess.Popen(command, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as program:
        try:
            pids = [int(pid) for pid in program.stdout.readline().split()]
            err = program.communicate(timeout=120)[1]
            assert program.returncode == 1, err
            assert err.count("error: ") == 1 and err.splitlines()[-1].startswith("error: Ray's GCS on this machine has")
            assert "Traceback" not in err and "start the same command again" in err
            for pid in pids:
                wait_until_gone(pid, within_s=90.0)
        finally:
            program.kill()


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_program_that_ends_while_rays_gcs_is_frozen_has_the_last_word_and_leaves_nothing():
    command = [sys.executable, "-m", "tests.support.driver.lost_cluster", "end", "SIGSTOP"]
    with subprocess.Popen(command, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as program:
        try:
            pids = [int(pid) for pid in program.stdout.readline().split()]
            err = program.communicate(timeout=120)[1]
            assert program.returncode == 1 and err.splitlines()[-1] == "error: it was found before", err
            for pid in pids:  # Ray's agents would outlive it for more than 70 s
                wait_until_gone(pid, within_s=40.0)
        finally:
            program.kill()


@pytest.mark.timeout(120)
def test_a_killed_program_without_a_supervisor_leaves_nothing_of_its_cluster():
    command = [sys.executable, "-m", "tests.support.driver.lost_cluster", "killed", "SIGKILL"]
    program = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, timeout=100)
    assert program.returncode == -signal.SIGKILL
    for pid in map(int, program.stdout.split()):  # Ray's agents would outlive it for more than 60 s
        wait_until_gone(pid, within_s=10.0)


@pytest.mark.timeout(120)
def test_a_program_that_loses_its_raylet_while_it_exits_keeps_its_exit_code():
    """A child of process 1: there Ray's library would end it with code 1."""
    apart = ["unshare", "--user", "--map-root-user", "--pid", "--fork", "--kill-child", "--mount-proc"]
    if shutil.which("unshare") is None or subprocess.run([*apart, "true"], capture_output=True).returncode:
        pytest.skip("no namespaces for processes here")
    command = f"{sys.executable} -m tests.support.driver.lost_cluster exit SIGKILL; exit $?"
    program = subprocess.run([*apart, "sh", "-c", command], cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert program.returncode == 7, program.stderr


def test_the_end_of_a_raylet_ends_the_wait_for_the_next_look_at_the_cluster(tmp_path, monkeypatch):
    raylet = tmp_path / "raylet"  # the kernel names a process after its file
    shutil.copy(shutil.which("sleep"), raylet)
    monkeypatch.setattr(cluster_watch, "POLL_PERIOD_S", 300.0)
    with subprocess.Popen([raylet, "600"]) as process:
        while Path(f"/proc/{process.pid}/comm").read_text() != "raylet\n":
            time.sleep(0.01)
        watch = cluster_watch.ClusterWatch()
        assert watch.check() == ""
        process.kill()
        start = time.monotonic()
        watch.sleep()
        assert time.monotonic() - start < 100
        assert watch.check() == "Ray's raylet"


def test_a_program_whose_reader_is_gone_ends_with_its_cluster_all_the_same():
    code = (
        "import ray; from hybridrl.driver.cluster import watch as w; print('step 1'); "
        "w._end_program('a raylet', w.ClusterWatch())"
    )
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "env": os.environ | {"PYTHONUNBUFFERED": ""}}
    with subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, text=True, **options) as program:
        program.stdout.close()  # the line waits in the program's buffer
        err = program.stderr.read()
    assert program.returncode == 1 and err.startswith("error: a raylet on this machine has ended") and "\n" in err
    assert "Traceback" not in err


def test_a_holder_whose_parent_is_gone_does_not_wait_for_ray_to_start():
    start = "lambda: (print('starts', flush=True), time.sleep(1000))"
    ours, theirs = socket.socketpair()
    code = "import socket, time; from hybridrl.driver.cluster.holder import hold_cluster as hold; "
    code += f"hold({start}, socket.socket(fileno={theirs.fileno()}), mask=set(), ignored=())"
    options = {"stdout": subprocess.PIPE, "pass_fds": [theirs.fileno()]}
    with subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, text=True, **options) as holder:
        theirs.close()
        try:
            assert holder.stdout.readline() == "starts\n"
            ours.close()
            assert holder.wait(timeout=60) == 0
        finally:
            holder.kill()
