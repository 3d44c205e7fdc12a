"""`trainer.page_port`: a run serves the page about itself as long as it lasts."""

import json
import socket
import time
import urllib.request
from contextlib import suppress

import pytest

from hybridrl.config.schema.trainer import TrainerConfig
from hybridrl.errors import ConfigError
from hybridrl.trainer.run import prepared_run_directory
from tests.support.end_to_end.ports import free_port
from tests.support.view.run_files import write_metrics


def listens(port: int) -> bool:
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=5):
        return True
    return False


def wait_until(condition) -> None:
    deadline = time.monotonic() + 100
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_the_page_is_there_while_the_run_lasts(tmp_path):
    port = free_port()
    config = TrainerConfig(default_local_dir=str(tmp_path / "mine"), page_port=port)
    with prepared_run_directory(config) as directory:
        wait_until(lambda: listens(port))
        write_metrics(tmp_path / "mine", [1, 2])
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/api/runs", timeout=60) as answer:
            (run,) = json.load(answer)
        assert (run["path"], run["step"]) == (directory, 2)
    wait_until(lambda: not listens(port))


def test_a_port_in_use_is_noticed_before_anything_starts(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        config = TrainerConfig(default_local_dir=str(tmp_path), page_port=port)
        with (
            pytest.raises(ConfigError, match=f"trainer.page_port={port}: cannot listen"),
            prepared_run_directory(config),
        ):
            pass
