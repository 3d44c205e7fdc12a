"""Real drivers, lost in real ways; their scenarios are in `tests/support/driver/supervised_driver.py`."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hybridrl.system.process_stat import read_process_stat

pytestmark = pytest.mark.skipif(not hasattr(signal, "sigtimedwait"), reason="drivers are supervised on Linux only")
ROOT = Path(__file__).parents[2]


def start(scenario, *words, **options):
    command = [sys.executable, "-m", "tests.support.driver.supervised_driver", scenario, *words]
    return subprocess.Popen(command, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options)


def run(scenario, *words):
    program = start(scenario, *words)
    out, err = program.communicate(timeout=60)
    return program.returncode, out.split("\n")[:-1], err


def is_running(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_a_killed_driver_is_restarted_under_the_same_run_id_and_its_exit_code_counts():
    code, lines, err = run("killed_twice")
    assert code == 5
    assert [line.split()[:2] for line in lines] == [["attempt", "1"], ["attempt", "2"], ["attempt", "3"]]
    assert len({line.split()[2] for line in lines}) == 1
    assert "killed by SIGKILL" in err or not err
    assert lines[0].endswith(" None")
    assert (
        "the driver (attempt 1) was lost after step 0 (killed by SIGKILL); the supervisor restarts the driver"
        in lines[1]
    )
    assert "(1 of 3 losses)" in lines[1] and "(2 of 3 losses)" in lines[2]


def test_four_losses_without_a_step_end_the_program():
    code, lines, _ = run("killed_always")
    assert code == 128 + signal.SIGKILL and len(lines) == 4


def test_the_decision_that_ends_the_program_is_reported_once_after_the_last_driver():
    code, lines, _ = run("reports_its_end")
    assert code == 128 + signal.SIGKILL and [line.split()[0] for line in lines] == ["attempt"] * 4 + ["end"]
    attempts, end = lines[:4], lines[4].split(maxsplit=2)
    assert {line.split()[2] for line in attempts} == {end[1]}  # the run id
    assert end[2].startswith("the driver (attempt 4) was lost after step 0")
    assert end[2].endswith("so the program ends; resume with trainer.resume_mode=auto")


def test_every_completed_step_resets_the_count_of_losses():
    code, lines, _ = run("killed_once_a_step")
    assert code == 0 and len(lines) == 7


def test_an_exit_without_a_report_is_a_loss_whatever_its_code():
    assert run("exits_without_report")[0] == 0


def test_an_exception_is_not_retried():
    code, lines, err = run("raises")
    assert code == 1 and lines == ["attempt 1"] and "a mistake" in err


def test_a_new_job_is_started_once_per_completed_step():
    code, lines, _ = run("requests_a_new_job")
    assert code == 1
    first, second = (line.split(maxsplit=3) for line in lines)
    assert first[2] != second[2]
    assert "after step 4 (no machine is left); the supervisor starts" in second[3]


def test_a_driver_stopped_by_sigstop_is_killed_and_restarted():
    code, lines, _ = run("freezes")
    assert code == 0 and lines == ["attempt 1", "attempt 2"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("receiver", ["parent", "process group"])
def test_a_signal_reaches_the_driver_once(number, receiver):
    program = start(
        "waits_for_signal",
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    assert program.stdout.readline().startswith("pid")
    (os.kill if receiver == "parent" else os.killpg)(program.pid, number)
    out, _ = program.communicate(timeout=30)
    assert out.split() == [number.name] and program.returncode == 143


@pytest.mark.parametrize("scenario", ["waits_for_signal", "stops_its_program"])
def test_a_driver_ends_with_its_program(scenario):
    program = start(scenario)
    pid = int(program.stdout.readline().split()[-1])
    program.kill()
    program.communicate(timeout=30)
    until = time.monotonic() + 60
    while is_running(pid) and time.monotonic() < until:
        time.sleep(0.05)
    assert not is_running(pid)


def test_a_cluster_that_does_not_stop_is_killed_and_late_signals_change_nothing():
    program = start("leaves_a_stopped_cluster")
    pid = int(program.stdout.readline())
    until = time.monotonic() + 60
    while is_running(pid):  # the driver would end by these signals
        assert time.monotonic() < until
        time.sleep(0.02)
    for number in (signal.SIGHUP, signal.SIGTERM):
        program.send_signal(number)
    _, err = program.communicate(timeout=60)
    assert program.returncode == 0 and err == ""


def test_a_cluster_that_freezes_while_a_driver_waits_for_it_is_started_again_with_the_driver(tmp_path):
    code, lines, err = run("waits_for_a_frozen_cluster", str(tmp_path / "frozen"))
    assert code == 0 and lines == ["attempt 2 an address"]
    assert "the process that starts Ray" in err and "killing the driver that uses it" in err


def test_a_driver_that_loses_its_cluster_after_its_report_is_killed_without_a_word():
    program = start("loses_its_cluster_while_it_exits")
    _, err = program.communicate(timeout=30)
    assert program.returncode == 1 and err == "error: found before\n"


def test_a_driver_that_ends_after_its_program_says_nothing():
    assert run("kills_its_program_and_ends") == (-signal.SIGKILL, [], "")


def test_a_frozen_driver_ends_with_its_program():
    program = start("freezes_for_ever")
    pid = int(program.stdout.readline())
    while read_process_stat(pid).state not in ("T", ""):  # it stops itself; the supervisor would kill it after 4.5 s
        time.sleep(0.02)
    program.kill()
    program.communicate(timeout=30)
    until = time.monotonic() + 30
    while read_process_stat(pid).state:
        assert time.monotonic() < until
        time.sleep(0.05)
