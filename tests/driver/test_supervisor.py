"""Drivers in real processes, lost in real ways: `tests/support/driver/supervised_driver.py` has their lives."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(not hasattr(signal, "sigtimedwait"), reason="drivers are kept running on Linux")
ROOT = Path(__file__).parents[2]


def begin(scenario, **options):
    command = [sys.executable, "-m", "tests.support.driver.supervised_driver", scenario]
    return subprocess.Popen(command, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options)


def run(scenario):
    program = begin(scenario)
    out, err = program.communicate(timeout=60)
    return program.returncode, out.split("\n")[:-1], err


def is_there(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_a_driver_that_is_killed_is_started_again_under_its_name_and_its_word_counts():
    code, lines, err = run("killed_twice")
    assert code == 5
    assert [line.split()[:2] for line in lines] == [["life", "1"], ["life", "2"], ["life", "3"]]
    assert len({line.split()[2] for line in lines}) == 1
    assert "killed by SIGKILL" in err or not err


def test_a_driver_that_dies_again_and_again_without_a_step_ends_the_program():
    code, lines, _ = run("killed_always")
    assert code == 128 + signal.SIGKILL and len(lines) == 4


def test_every_step_that_ends_gives_new_patience():
    code, lines, _ = run("killed_once_a_step")
    assert code == 0 and len(lines) == 7


def test_an_exit_without_a_word_is_a_loss_whatever_its_code():
    assert run("ends_without_a_word")[0] == 0


def test_an_exception_is_not_tried_again():
    code, lines, err = run("raises")
    assert code == 1 and lines == ["life 1"] and "a mistake" in err


def test_a_lost_job_is_begun_anew_once_after_each_step():
    code, lines, _ = run("loses_the_job")
    assert code == 1
    (_, _, first), (_, _, second) = (line.split() for line in lines)
    assert first != second


def test_a_driver_that_is_stopped_while_its_program_is_not_is_ended_and_started_again():
    begun = time.monotonic()
    code, lines, _ = run("freezes")
    assert code == 0 and lines == ["life 1", "life 2"]
    assert time.monotonic() - begun < 30


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("whom", ["the parent", "all"])
def test_a_signal_reaches_the_driver_once(number, whom):
    program = begin(
        "hears", start_new_session=True, preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler)
    )
    assert program.stdout.readline().startswith("pid")
    (os.kill if whom == "the parent" else os.killpg)(program.pid, number)
    out, _ = program.communicate(timeout=30)
    assert out.split() == [number.name] and program.returncode == 143


def test_a_driver_ends_with_its_program():
    program = begin("hears")
    pid = int(program.stdout.readline().split()[1])
    program.kill()
    program.communicate(timeout=30)
    until = time.monotonic() + 5
    while is_there(pid) and time.monotonic() < until:
        time.sleep(0.05)
    assert not is_there(pid)
