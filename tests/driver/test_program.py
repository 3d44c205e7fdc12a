"""What a program prints when a run is interrupted or fails (one true line), and which Ray cluster it connects to."""

import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from hybridrl.driver.program import run_program
from hybridrl.errors import CheckpointError, PlacementError
from hybridrl.trainer.checkpoint.store import CheckpointStore, newest_checkpoint


def interrupt():
    raise KeyboardInterrupt


def fail():
    raise CheckpointError("global_step_4 is damaged; take an earlier one")


def break_down():
    raise ZeroDivisionError("our own bug")


def commit(directory, *steps):
    for step in steps:
        CheckpointStore(str(directory)).commit(step, lambda path: None)


def test_an_interrupted_run_names_its_newest_commit(tmp_path, capsys):
    commit(tmp_path, 2, 10)
    log_directory = lambda: str(tmp_path)  # noqa: E731
    assert run_program(interrupt, log_directory=log_directory, newest_checkpoint=newest_checkpoint) == 130
    shown = capsys.readouterr().err
    assert shown.startswith(f"interrupted; {tmp_path}/global_step_10 is committed") and shown.count("\n") == 1


@pytest.mark.parametrize("directory", ["empty", "not_there", None])
def test_an_interrupted_run_without_a_commit_says_that_the_next_one_starts_from_step_0(tmp_path, capsys, directory):
    (tmp_path / "empty").mkdir()
    log_directory = lambda: directory and str(tmp_path / directory)  # noqa: E731
    assert run_program(interrupt, log_directory=log_directory, newest_checkpoint=newest_checkpoint) == 130
    shown = capsys.readouterr().err
    assert shown.startswith("interrupted; nothing was committed, the next run starts from step 0")
    assert ("trainer.save_freq=N" in shown) == (directory is not None)


def test_a_half_written_checkpoint_is_none(tmp_path, capsys):
    (tmp_path / "global_step_4.partial").mkdir()
    run_program(interrupt, log_directory=lambda: str(tmp_path), newest_checkpoint=newest_checkpoint)
    assert "nothing was committed" in capsys.readouterr().err


def test_an_error_of_ours_is_one_line_and_a_bug_shows_where_it_is(capsys):
    assert run_program(fail, log_directory=lambda: None) == 1
    assert capsys.readouterr().err == "error: global_step_4 is damaged; take an earlier one\n"
    assert run_program(break_down, log_directory=lambda: None) == 1
    shown = capsys.readouterr().err
    assert shown.startswith("error: ZeroDivisionError: our own bug\nTraceback") and "in break_down" in shown


def test_a_job_that_no_machine_can_hold_is_a_mistake_in_the_command(tmp_path, capsys):
    def request_too_much():
        raise PlacementError("no node can hold 99 worker processes")

    assert run_program(request_too_much, log_directory=lambda: str(tmp_path)) == 2
    assert capsys.readouterr().err == "no node can hold 99 worker processes\n"


def test_the_traceback_of_a_run_is_saved_in_its_directory(tmp_path, capsys):
    assert run_program(fail, log_directory=lambda: str(tmp_path)) == 1
    assert capsys.readouterr().err.splitlines()[1] == f"the full traceback is in {tmp_path}/error.log"
    assert "CheckpointError: global_step_4 is damaged" in (tmp_path / "error.log").read_text()


@pytest.mark.parametrize("program", ["hybridrl.main_ppo", "hybridrl.main_sft"])
def test_ctrl_c_while_libraries_are_imported_is_no_traceback(program):
    process = subprocess.Popen(
        [sys.executable, "-m", program],
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a test run in the background ignores it
    )
    deadline = time.monotonic() + 60
    while "libtorch" not in Path(f"/proc/{process.pid}/maps").read_text() and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode in (-signal.SIGINT, 130) and "Traceback" not in err


def start_ray_elsewhere(num_nodes, **environment):
    """Call `start_ray` in a new process, which prints the cluster's resources; return the completed process."""
    code = (
        "from hybridrl.driver.program import run_program, set_up_logging\nfrom "
        "hybridrl.driver.ray_cluster import start_ray\n"
        "def work():\n"
        f"    start_ray(num_nodes={num_nodes})\n"
        "    import ray\n"
        "    print(ray.cluster_resources())\n"
        "set_up_logging()\n"
        "raise SystemExit(run_program(work, log_directory=lambda: None))\n"
    )
    base = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    return subprocess.run(
        [sys.executable, "-c", code], env=base | environment, timeout=100, capture_output=True, text=True
    )


def own(folder):
    """Return the environment of a Ray that shares neither files nor token with another one on this machine."""
    return {
        "RAY_TMPDIR": folder,
        "HOME": folder,
        "RAY_AUTH_MODE": "disabled",
    }  # `ray.init` of an earlier test may have turned tokens on


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def test_a_ray_address_that_answers_nothing_is_one_line_without_rays_own_attempts():
    address = f"127.0.0.1:{free_port()}"
    done = start_ray_elsewhere(1, RAY_ADDRESS=address)
    assert done.returncode == 2 and done.stdout == "" and done.stderr.count("\n") == 1
    assert (
        done.stderr.startswith(f"RAY_ADDRESS={address}: no Ray cluster answers there")
        and "unset RAY_ADDRESS" in done.stderr
    )


def is_up(address_file):
    """Return whether `ray start` has written its address file and accepts connections there (it writes first)."""
    try:
        host, _, port = address_file.read_text().strip().rpartition(":")
        socket.create_connection((host, int(port)), timeout=5).close()
    except (OSError, ValueError):
        return False
    return True


@pytest.fixture
def started_cluster():
    """A cluster started by `ray start` in a directory of its own; yields that directory and the cluster's address."""
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="r") as folder:  # short: sockets in it have long names
        process, address = start_cluster(Path(folder))
        try:
            yield folder, address
        finally:
            process.send_signal(signal.SIGTERM)  # `ray start --block` ends the processes that it started
            process.wait(timeout=30)


def start_cluster(folder, attempts=3):
    """Start a cluster, with retries: `ray start` ends if another process takes its port before it listens."""
    printed = folder / "printed.txt"
    for _ in range(attempts):
        address = f"127.0.0.1:{free_port()}"
        command = [
            str(Path(sys.executable).with_name("ray")),
            "start",
            "--head",
            "--block",
            f"--port={address.rpartition(':')[2]}",
        ]
        command += [
            "--node-ip-address=127.0.0.1",
            "--num-cpus=3",
            '--resources={"mark": 7}',
            "--include-dashboard=false",
        ]
        command += ["--object-store-memory=100000000", "--disable-usage-stats"]
        with printed.open("w") as output:
            process = subprocess.Popen(command, env=os.environ | own(str(folder)), stdout=output, stderr=output)
        deadline = time.monotonic() + 60
        while process.poll() is None and time.monotonic() < deadline:
            if is_up(folder / "ray" / "ray_current_cluster"):
                return process, address
            time.sleep(0.2)
        process.kill()
        process.wait()
    pytest.fail(
        f"ray start did not come up in {attempts} attempts; the last one printed: {printed.read_text()[-2000:]}"
    )


def test_a_job_of_several_machines_connects_to_the_cluster_started_here_and_a_job_of_one_does_not(
    started_cluster,
):
    folder, address = started_cluster
    for num_nodes, named in ((2, {}), (1, {"RAY_ADDRESS": address})):
        done = start_ray_elsewhere(num_nodes, **own(folder), **named)
        assert "'mark': 7.0" in done.stdout, done.stderr
        assert re.fullmatch(
            rf"connected to the Ray cluster at [0-9.]+:{address.rpartition(':')[2]}, machines: 1\n", done.stderr
        )
    done = start_ray_elsewhere(1, **own(folder))
    assert done.returncode == 0 and "'mark'" not in done.stdout


def test_without_a_cluster_all_machines_of_a_job_are_this_one_with_a_warning():
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="r") as folder:
        done = start_ray_elsewhere(2, **own(folder))
    assert done.returncode == 0 and "CPU" in done.stdout
    assert done.stderr.startswith(
        "no `ray start` was run here and RAY_ADDRESS names no cluster: all 2 machines of this job are this one\n"
    )
