"""Which Ray cluster a program connects to, and what it says, soon, about one that does not answer or refuses it."""

import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from hybridrl.driver.cluster.ray_cluster import address_of_last_start
from tests.support.driver.one_process import run_in_one_process
from tests.support.driver.ray_head import free_port, own, ray_head

SUBMIT = (
    "from hybridrl.driver.program import run_program\n"
    "from hybridrl.master.jobs.builder import DLJobBuilder\n"
    "job = DLJobBuilder().device_type('CPU').role('echo').run('echo.py').build()\n"
    "raise SystemExit(run_program(lambda: job.submit('echo')))\n"
)
START = (
    "from hybridrl.driver.program import run_program, set_up_logging\n"
    "from hybridrl.driver.cluster.ray_cluster import start_ray\n"
    "def work():\n"
    "    start_ray(num_nodes={num_nodes})\n"
    "    import ray\n"
    "    print(ray.cluster_resources())\n"
    "set_up_logging()\n"
    "raise SystemExit(run_program(work))\n"
)
ACTOR = (
    "import time\n"
    "from hybridrl.driver.cluster.ray_cluster import start_ray\n"
    "start_ray()\n"
    "import ray\n"
    "counter = ray.remote(type('Counter', (), {'n': 0, 'count': lambda self, by: by})).remote()\n"
    "print(ray.get(counter.count.remote(1), timeout=60))\n"
    "time.sleep(3)\n"  # Ray asks after the actor's owner meanwhile
    "print(ray.get(counter.count.remote(2), timeout=60))\n"
)
TOKEN = "0123456789abcdef" * 4
NOBODY = 65534
FIND = "from hybridrl.driver.cluster import ray_cluster as r; print(r.clusters_here(), r.address_of_last_start())"
LS = "import sys; from hybridrl.cli import main; sys.exit(main(['job', 'ls']))"


def variables(**changes):
    return {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"} | changes


def start(code, **environment):
    return subprocess.Popen(
        [sys.executable, "-c", code],
        env=variables(**environment),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a test run in the background ignores it
    )


def run(code, **environment):
    process = start(code, **environment)
    out, err = process.communicate(timeout=100)
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def start_ray_elsewhere(num_nodes, **environment):
    """Call `start_ray` in a new process, which prints the cluster's resources; return the completed process."""
    return run(START.format(num_nodes=num_nodes), **environment)


@pytest.fixture(scope="module")
def head():
    """The directory and the address of a cluster, for the tests that leave it unharmed."""
    with ray_head() as found:
        yield found


def test_an_address_where_nothing_answers_is_one_line_at_once(tmp_path):
    address = f"127.0.0.1:{free_port()}"
    (tmp_path / "echo.py").write_text("")
    ways_out = {LS: "--address", SUBMIT: "ray start", START.format(num_nodes=1): "unset RAY_ADDRESS"}
    for done in run_in_one_process(list(ways_out), environment=variables(RAY_ADDRESS=address), cwd=tmp_path):
        assert done.returncode == 2 and done.stdout == "" and done.stderr.count("\n") == 1, done
        assert done.stderr.startswith(
            f"RAY_ADDRESS={address}: no Ray cluster answers there ([Errno 111] Connection refused"
        )
        assert ways_out[done.args] in done.stderr


def test_an_address_where_something_else_than_a_cluster_answers_is_one_line_at_once():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        process = start(LS, RAY_ADDRESS=address)
        connection, _ = listener.accept()
        connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        _, err = process.communicate(timeout=60)
    assert process.returncode == 2 and err.count("\n") == 1
    assert f"RAY_ADDRESS={address}: no Ray cluster answers there (what accepts connections there is no gRPC" in err


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_program_that_waits_for_a_silent_address_ends_by_a_signal(number):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        process = start(LS, RAY_ADDRESS=f"127.0.0.1:{listener.getsockname()[1]}")
        listener.settimeout(60)
        connection, _ = listener.accept()
        assert connection.recv(3) == b"PRI"  # it waits for an answer now
        process.send_signal(number)
        _, err = process.communicate(timeout=60)
    assert process.returncode == (143 if number == signal.SIGTERM else 130)
    assert err.splitlines()[-1] == ("terminated" if number == signal.SIGTERM else "interrupted")


@pytest.mark.slow
def test_a_cluster_that_requires_a_token_says_how_to_get_in():
    with tempfile.TemporaryDirectory() as elsewhere, ray_head(token=TOKEN) as (folder, address):
        codes = [LS, START.format(num_nodes=1)]
        for done in run_in_one_process(codes, environment=variables(**own(folder), RAY_ADDRESS=address)):
            assert done.returncode == 2 and "Traceback" not in done.stderr
            assert f"RAY_ADDRESS={address}: the Ray cluster there requires a token; set RAY_AUTH_MODE=" in done.stderr
        token = {"RAY_AUTH_MODE": "token"}
        done = run(LS, **own(folder) | token, RAY_ADDRESS=address)
        assert done.returncode == 0, done.stderr
        done = run(LS, **own(elsewhere) | token, RAY_ADDRESS=address)
        assert done.returncode == 2 and "there is no token in ~/.ray/auth_token" in done.stderr
        done = run(LS, **own(folder) | token | {"RAY_AUTH_TOKEN": TOKEN[::-1]}, RAY_ADDRESS=address)
        assert done.returncode == 2 and "refuses the token in ~/.ray/auth_token" in done.stderr


@pytest.mark.slow
def test_an_actor_lives_on_a_cluster_without_tokens():
    with ray_head(with_dashboard=True) as (folder, address):
        done = run(ACTOR, **own(folder), RAY_ADDRESS=address)
    assert done.returncode == 0 and done.stdout.split() == ["1", "2"], done.stderr


@pytest.mark.slow
def test_a_job_of_several_machines_connects_to_the_cluster_started_here_and_a_job_of_one_starts_its_own(head):
    folder, address = head
    for num_nodes, named in ((2, {}), (1, {"RAY_ADDRESS": address})):
        done = start_ray_elsewhere(num_nodes, **own(folder), **named)
        assert "'mark': 7.0" in done.stdout, done.stderr
        assert re.fullmatch(
            rf"connected to the Ray cluster at [0-9.]+:{address.rpartition(':')[2]}, machines: 1\n", done.stderr
        )
    done = start_ray_elsewhere(1, **own(folder))
    address = re.search(r"Ray runs at ([0-9.]+:\d+): hybridrl job ls --address \1\n", done.stderr)
    assert done.returncode == 0 and "'mark'" not in done.stdout and address, done.stderr


def test_a_job_of_several_machines_without_a_cluster_is_refused_unless_it_says_local():
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="r") as folder:
        done = start_ray_elsewhere(2, **own(folder))
        assert done.returncode == 2 and done.stdout == "" and done.stderr.count("\n") == 1
        assert "nnodes)=2: there is no cluster of several machines; run `ray start` on each" in done.stderr
        done = start_ray_elsewhere(2, **own(folder), RAY_ADDRESS="local")
    assert done.returncode == 0 and "CPU" in done.stdout


@pytest.mark.slow
def test_with_two_clusters_on_the_machine_no_command_picks_one_and_both_are_named(head):
    folder, address = head
    with ray_head() as (_, other):
        codes = [LS, LS.replace("'ls'", "'status', 'job-1'"), LS.replace("'ls'", "'stop', 'job-1'")]
        for done in run_in_one_process(codes, environment=variables(**own(folder))):
            assert done.returncode == 2 and done.stdout == "" and done.stderr.count("\n") == 1
            assert "Ray clusters run on this machine: " in done.stderr and "--address HOST:PORT" in done.stderr
            for port in (address.rpartition(":")[2], other.rpartition(":")[2]):
                assert re.search(rf"[0-9.]+:{port}[,;]", done.stderr)
        done = run(LS.replace("'ls'", f"'ls', '--address', '{other}'"), **own(folder))
    printed = rf"no job runs on the Ray cluster at [0-9.]+:{other.rpartition(':')[2]}\n"
    assert done.returncode == 0 and re.fullmatch(printed, done.stdout), done.stderr


@pytest.mark.skipif(os.getuid() != 0, reason="only root starts processes of another user")
def test_the_token_goes_to_no_process_and_no_file_of_another_user():
    with (
        tempfile.TemporaryDirectory(dir="/tmp", prefix="r") as folder,
        socket.create_server(("127.0.0.1", 0)) as listener,
    ):
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        token, file = Path(folder, ".ray", "auth_token"), Path(folder, "ray", "ray_current_cluster")
        for path, text in ((token, TOKEN), (file, address)):
            path.parent.mkdir()
            path.write_text(text)
        os.chown(file, NOBODY, NOBODY)
        stranger = subprocess.Popen(
            ["raylet", "-c", "read line", f"--gcs-address={address}"],
            executable="/bin/sh",
            stdin=subprocess.PIPE,
            user=NOBODY,
        )
        environment = {name: value for name, value in own(folder).items() if name != "RAY_AUTH_MODE"}
        try:
            codes = [FIND, LS, LS.replace("'ls'", "'stop', 'job-1'")]
            done = run_in_one_process(codes, environment=variables(**environment))
        finally:
            stranger.communicate(b"end\n", timeout=20)
        assert all(address not in text for one in done for text in (one.stdout, one.stderr)), done
        listener.settimeout(0)
        with pytest.raises(BlockingIOError):  # nobody has connected
            listener.accept()


def test_a_link_in_place_of_the_clusters_file_is_ignored(tmp_path, monkeypatch):
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    (tmp_path / "ray").mkdir()
    (tmp_path / "elsewhere").write_text("127.0.0.1:6379\n")
    file = tmp_path / "ray" / "ray_current_cluster"
    file.symlink_to(tmp_path / "elsewhere")
    assert address_of_last_start() is None
    file.unlink()
    file.write_text("127.0.0.1:6379\n")
    assert address_of_last_start() == "127.0.0.1:6379"
