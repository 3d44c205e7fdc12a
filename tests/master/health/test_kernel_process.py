import os
import signal
import subprocess
import sys
import time

import pytest

from hybridrl.master.health.kernel_process import PidfdWatch, describe_exit_status
from hybridrl.system.process_stat import read_process_stat

SLEEP = [sys.executable, "-c", "import time; time.sleep(60)"]


def started(*command):
    return subprocess.Popen(command)


def until(true, timeout_s=60):
    end = time.monotonic() + timeout_s
    while not true():
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.mark.parametrize(
    "how, words",
    [
        ("kill -9 $$", "killed by SIGKILL"),
        ("kill -11 $$", "killed by SIGSEGV"),
        ("exit 3", "it ended by itself with exit code 3"),
    ],
)
def test_the_exit_reason_is_read_from_the_kernel(how, words):
    process = started("sh", "-c", f"read x < /dev/null; sleep 0.3; {how}")
    watch = PidfdWatch(process.pid)
    assert not watch.is_dead and watch.exit_reason() is None
    process.wait(20)
    assert watch.is_dead
    if watch.exit_reason() is None:
        pytest.skip("this kernel does not report exit statuses (Linux before 6.15)")
    assert watch.exit_reason() == words
    watch.close()


def test_a_sigkill_while_the_machine_ran_out_of_memory_is_reported_as_oom():
    assert (
        describe_exit_status(signal.SIGKILL, out_of_memory=True)
        == "killed by the kernel because the machine ran out of memory (OOM)"
    )
    assert describe_exit_status(signal.SIGSEGV, out_of_memory=True) == "killed by SIGSEGV"


def test_a_stopped_process_is_distinguished_from_a_sleeping_one():
    process = started(*SLEEP)
    try:
        until(lambda: read_process_stat(process.pid).state == "S")
        os.kill(process.pid, signal.SIGSTOP)
        until(lambda: read_process_stat(process.pid).state == "T")
        os.kill(process.pid, signal.SIGCONT)
        until(lambda: read_process_stat(process.pid).state == "S")
    finally:
        process.kill()
        process.wait(20)
    assert read_process_stat(process.pid).state == ""


def test_a_process_that_is_gone_has_no_exit_reason():
    process = started("true")
    process.wait(20)
    watch = PidfdWatch(process.pid)
    assert watch.is_dead and watch.exit_reason() is None
