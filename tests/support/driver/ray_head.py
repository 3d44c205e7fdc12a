"""A Ray cluster from `ray start`, in a directory of its own: it shares neither files nor token with others."""

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.support.end_to_end.ports import free_port

START_TIMEOUT_S = 60.0
ATTEMPTS = 3  # `ray start` ends if another process takes its port before it listens
OBJECT_STORE_BYTES = 100_000_000


def own(folder: str) -> dict[str, str]:
    """Return the environment of programs of the cluster; `ray.init` of an earlier test may have turned tokens on."""
    return {"RAY_TMPDIR": folder, "HOME": folder, "RAY_AUTH_MODE": "disabled"}


@contextmanager
def ray_head(*, token: str | None = None, with_dashboard: bool = False) -> Iterator[tuple[str, str]]:
    """Start a cluster of 3 cores and 7 `mark`; yield its directory, which is its HOME too, and its address.

    Args:
        token: The cluster requires this one.
        with_dashboard: As `ray start` does by itself, with the machine's address as the node's.
    """
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="r") as folder:  # short: sockets in it have long names
        environment = os.environ | own(folder)
        if token is not None:
            environment["RAY_AUTH_MODE"] = "token"
            (Path(folder) / ".ray").mkdir()
            (Path(folder) / ".ray" / "auth_token").write_text(token)
        process, address = _start(Path(folder), environment, with_dashboard=with_dashboard)
        try:
            yield folder, address
        finally:
            process.send_signal(signal.SIGTERM)  # `ray start --block` ends the processes that it started
            process.wait(timeout=60)


def _start(folder: Path, environment: dict[str, str], *, with_dashboard: bool) -> tuple[subprocess.Popen, str]:
    printed = folder / "printed.txt"
    for _ in range(ATTEMPTS):
        port = free_port()
        command = [str(Path(sys.executable).with_name("ray")), "start", "--head", "--block", f"--port={port}"]
        command += ["--num-cpus=3", '--resources={"mark": 7}']
        command += [] if with_dashboard else ["--node-ip-address=127.0.0.1", "--include-dashboard=false"]
        command += [f"--object-store-memory={OBJECT_STORE_BYTES}", "--disable-usage-stats"]
        with printed.open("w") as output:
            process = subprocess.Popen(command, env=environment, stdout=output, stderr=output)
        deadline = time.monotonic() + START_TIMEOUT_S
        while process.poll() is None and time.monotonic() < deadline:
            if _is_up(folder / "ray" / "ray_current_cluster"):
                return process, f"127.0.0.1:{port}"
            time.sleep(0.2)
        process.kill()
        process.wait()
    raise TimeoutError(f"ray start did not come up {ATTEMPTS} times; it printed: {printed.read_text()[-2000:]}")


def _is_up(address_file: Path) -> bool:
    """Return whether `ray start` has written its address file and accepts connections there (it writes first)."""
    try:
        host, _, port = address_file.read_text().strip().rpartition(":")
        socket.create_connection((host, int(port)), timeout=5).close()
    except (OSError, ValueError):
        return False
    return True
