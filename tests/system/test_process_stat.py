"""Tests of hybridrl/system/process_stat.py: which stopped processes count as frozen."""

import os
import signal
import subprocess
import sys
import time

import pytest

from hybridrl.system import process_stat
from hybridrl.system.process_stat import FreezeWatch, StopClock, read_process_stat


@pytest.fixture
def sleeper():
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(120)"]) as process:
        yield process
        process.kill()


def wait_for(condition, within_s=30.0):
    until = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.02)


def test_a_process_is_frozen_when_it_has_been_stopped_for_the_timeout_and_not_before(sleeper):
    clock = StopClock(timeout_s=0.4)
    os.kill(sleeper.pid, signal.SIGSTOP)
    wait_for(lambda: read_process_stat(sleeper.pid).state == process_stat.STOPPED)
    start = time.monotonic()
    assert clock.check([sleeper.pid]) == []
    wait_for(lambda: clock.check([sleeper.pid]) == [sleeper.pid])
    assert time.monotonic() - start >= 0.4


def test_a_process_that_continues_counts_from_zero_again(sleeper):
    clock = StopClock(timeout_s=60.0)
    for _ in range(2):
        os.kill(sleeper.pid, signal.SIGSTOP)
        wait_for(lambda: read_process_stat(sleeper.pid).state == process_stat.STOPPED)
        clock.check([sleeper.pid])
        clock.timeout_s = 0.0  # frozen as soon as it is seen stopped
        assert clock.check([sleeper.pid]) == [sleeper.pid]
        clock.timeout_s = 60.0
        os.kill(sleeper.pid, signal.SIGCONT)
        wait_for(lambda: read_process_stat(sleeper.pid).state != process_stat.STOPPED)
        assert clock.check([sleeper.pid]) == []
        assert clock._stopped_s == {}


def test_a_clock_that_was_stopped_itself_counts_at_most_a_second_of_it(sleeper, monkeypatch):
    clock, now = StopClock(timeout_s=4.5), time.monotonic()
    os.kill(sleeper.pid, signal.SIGSTOP)
    wait_for(lambda: read_process_stat(sleeper.pid).state == process_stat.STOPPED)
    clock.check([sleeper.pid])
    monkeypatch.setattr(process_stat.time, "monotonic", lambda: now + 3600.0)  # Ctrl-Z, and fg an hour later
    assert clock.check([sleeper.pid]) == []
    assert clock._stopped_s == {sleeper.pid: 1.0}


def test_a_watch_kills_a_frozen_process_once_and_leaves_others_alone(sleeper, monkeypatch):
    monkeypatch.setattr(process_stat, "WATCH_PERIOD_S", 0.02)
    killed, found = [], [0, 0]  # the process is there from the third look on
    watch = FreezeWatch(
        "the sleeper",
        find=lambda: found.pop() if found else sleeper.pid,
        consequence="nothing follows",
        kill=killed.append,
        timeout_s=0.2,
    )
    os.kill(sleeper.pid, signal.SIGSTOP)
    wait_for(lambda: killed)
    time.sleep(0.5)
    watch.stop()
    assert killed == [sleeper.pid] and not found
