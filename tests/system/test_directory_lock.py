"""One program at a time in a run's directory: who is refused, who waits, and who shares the lock."""

import fcntl
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time

import pytest

from hybridrl.errors import ConfigError
from hybridrl.system.directory_lock import ENDING_TIMEOUT_S, LOCK_FILE, lock_directory

HOLDER = """
    import os, signal, sys, time
    from hybridrl.system.directory_lock import lock_directory
    with lock_directory(sys.argv[1]):
        child = os.fork() if sys.argv[2] == "fork" else -1
        if child != 0:
            print(child, flush=True)
        time.sleep(60)
"""


def start_holder(directory, kind="alone"):
    command = [sys.executable, "-c", textwrap.dedent(HOLDER), str(directory), kind]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    return process, int(process.stdout.readline())


def test_a_second_program_is_refused_at_once_with_pid_and_host(tmp_path):
    holder, _ = start_holder(tmp_path)
    start = time.monotonic()
    refused = rf"{tmp_path} is in use by a run of process {holder.pid} on {os.uname()[1]}"
    with pytest.raises(ConfigError, match=refused), lock_directory(str(tmp_path)):
        pass
    assert time.monotonic() - start < ENDING_TIMEOUT_S / 2  # the holder lives: nothing is waited for
    holder.kill()
    holder.wait()
    with lock_directory(str(tmp_path)):
        assert str(os.getpid()) in (tmp_path / LOCK_FILE).read_text()


def test_the_driver_of_a_killed_program_is_waited_for(tmp_path, caplog):
    caplog.set_level("INFO")
    program, driver = start_holder(tmp_path, "fork")
    program.kill()
    program.wait()
    ended = threading.Timer(0.6, os.kill, [driver, signal.SIGKILL])
    start = time.monotonic()
    ended.start()
    with lock_directory(str(tmp_path), timeout_s=50):
        assert time.monotonic() - start > 0.5
    assert f"waiting for the last processes of process {program.pid}" in caplog.text


def test_a_driver_that_does_not_end_is_an_error_after_the_timeout(tmp_path):
    program, driver = start_holder(tmp_path, "fork")
    program.kill()
    program.wait()
    try:
        with pytest.raises(ConfigError, match="is in use"), lock_directory(str(tmp_path), timeout_s=0.3):
            pass
    finally:
        os.kill(driver, signal.SIGKILL)


def test_a_holder_that_has_not_said_who_it_is_is_an_error_after_the_timeout(tmp_path):
    holder, _ = start_holder(tmp_path)
    (tmp_path / LOCK_FILE).write_text("")
    try:
        refused = pytest.raises(ConfigError, match="in use by a run of another process")
        with refused, lock_directory(str(tmp_path), timeout_s=0.3):
            pass
    finally:
        holder.kill()
        holder.wait()


def test_a_started_program_does_not_keep_the_lock(tmp_path):
    with lock_directory(str(tmp_path)):
        sleeper = subprocess.Popen(["sleep", "30"])
    try:
        with lock_directory(str(tmp_path), timeout_s=0):
            pass
    finally:
        sleeper.kill()
        sleeper.wait()


def test_a_lock_that_cannot_be_opened_is_named(tmp_path):
    (tmp_path / LOCK_FILE).mkdir()
    with (
        pytest.raises(ConfigError, match=f"{tmp_path}/{LOCK_FILE}: the run's lock cannot be"),
        lock_directory(str(tmp_path)),
    ):
        pass


@pytest.mark.parametrize("text", ["{}", "[]", '{"pid": "x", "host": "h", "machine": "m"}', "[" * 100_000, "\0"])
def test_what_is_no_description_of_a_holder_is_none(tmp_path, text):
    with open(tmp_path / LOCK_FILE, "w", encoding="utf-8") as holder:
        holder.write(text)
        holder.flush()
        fcntl.flock(holder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        refused = pytest.raises(ConfigError, match="in use by a run of another process")
        with refused, lock_directory(str(tmp_path), timeout_s=0.01):
            pass
