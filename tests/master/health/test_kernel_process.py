import os
import signal
import subprocess
import sys
import time

import pytest

from hybridrl.master.health.kernel_process import ProcessWatch, condition, in_words

SLEEP = [sys.executable, "-c", "import time; time.sleep(60)"]


def started(*command):
    return subprocess.Popen(command)


def until(true, timeout_s=20):
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
def test_the_kernel_says_how_a_process_ended(how, words):
    process = started("sh", "-c", f"read x < /dev/null; sleep 0.3; {how}")
    watch = ProcessWatch(process.pid)
    assert not watch.is_dead and watch.account() is None
    process.wait(20)
    assert watch.is_dead
    if watch.account() is None:
        pytest.skip("this kernel does not tell (Linux before 6.15)")
    assert watch.account() == words
    watch.close()


def test_a_kill_while_the_machine_ran_out_of_memory_is_said_to_be_for_that():
    assert (
        in_words(signal.SIGKILL, out_of_memory=True)
        == "killed by the kernel because the machine ran out of memory (OOM)"
    )
    assert in_words(signal.SIGSEGV, out_of_memory=True) == "killed by SIGSEGV"


def test_a_stopped_process_is_told_from_one_that_waits_and_one_that_works():
    process = started(*SLEEP)
    try:
        until(lambda: condition(process.pid).state == "S")
        os.kill(process.pid, signal.SIGSTOP)
        until(lambda: condition(process.pid).state == "T")
        os.kill(process.pid, signal.SIGCONT)
        until(lambda: condition(process.pid).state == "S")
    finally:
        process.kill()
        process.wait(20)
    assert condition(process.pid).state == ""


def test_a_process_that_is_gone_has_no_account():
    process = started("true")
    process.wait(20)
    watch = ProcessWatch(process.pid)
    assert watch.is_dead and watch.account() is None
