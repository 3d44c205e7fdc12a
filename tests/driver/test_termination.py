"""SIGTERM: deferred to the end of a step, raised at once elsewhere, deferred no longer than the grace period."""

import logging
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from hybridrl.driver.termination import (
    EXIT_CODE,
    Terminated,
    TerminationSignal,
    acknowledged_interrupts,
    is_terminating,
    keep_sigterm_handler,
)


def terminate() -> None:
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(5)  # the handler interrupts it


def test_outside_of_training_sigterm_raises_at_once():
    sigterm, before = TerminationSignal(), signal.getsignal(signal.SIGTERM)
    with pytest.raises(Terminated) as raised, sigterm.handle_sigterm():
        terminate()
    assert raised.value.code == EXIT_CODE == 143 and sigterm.received and signal.getsignal(signal.SIGTERM) is before
    with sigterm.handle_sigterm():
        assert not sigterm.received and not is_terminating()  # a new outermost block starts unset


def test_in_training_the_first_sigterm_is_deferred_and_the_second_raises(caplog):
    caplog.set_level(logging.WARNING)
    sigterm = TerminationSignal()
    with pytest.raises(Terminated), sigterm.handle_sigterm(), sigterm.defer_sigterm(grace_s=60):
        os.kill(os.getpid(), signal.SIGTERM)
        assert sigterm.received and is_terminating()
        with pytest.raises(Terminated):
            sigterm.raise_if_received()
        until = time.monotonic() + 5
        while not caplog.records and time.monotonic() < until:  # a thread logs
            time.sleep(0.01)
        terminate()
    assert "the run finishes and commits this step, then exits, within trainer.grace_s=60 s" in caplog.text


def test_the_end_of_the_grace_period_interrupts_the_step(caplog):
    sigterm, start = TerminationSignal(), time.monotonic()
    with pytest.raises(Terminated), sigterm.handle_sigterm(), sigterm.defer_sigterm(grace_s=0.3):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(20)
    assert 0.3 <= time.monotonic() - start < 10 and "are over: the run exits now" in caplog.text


def test_a_process_stuck_in_c_code_is_ended_all_the_same():
    code = (
        "import ctypes, os, signal\n"
        "from hybridrl.driver import termination\n"
        "termination.EXIT_TIMEOUT_S = 0.2\n"
        "with termination.TerminationSignal().defer_sigterm(grace_s=0.2):\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
        "    end = ctypes.CDLL(None).sleep\n"  # no Python code runs in the main thread meanwhile
        "    while True: end(1000)\n"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode in (EXIT_CODE, -signal.SIGTERM)


def test_the_handler_is_reinstalled_over_another_librarys():
    sigterm = TerminationSignal()
    with sigterm.handle_sigterm():
        with keep_sigterm_handler():
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        with sigterm.defer_sigterm(grace_s=60):
            os.kill(os.getpid(), signal.SIGTERM)
            assert sigterm.received


def test_in_another_thread_the_blocks_change_nothing():
    sigterm, before = TerminationSignal(), signal.getsignal(signal.SIGTERM)

    def work() -> None:
        with sigterm.handle_sigterm(), sigterm.defer_sigterm(grace_s=1):
            assert signal.getsignal(signal.SIGTERM) is before

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert not sigterm.received


PROGRAM = """
import atexit, os, sys, time
from hybridrl.driver.program import run_program
def stop_slowly():
    print("stopping", flush=True)
    time.sleep(float(sys.argv[1]))
    print("stopped", flush=True)
def work():
    try:
        print("working", flush=True)
        time.sleep(60)
    finally:
        stop_slowly()
atexit.register(stop_slowly)  # as Ray registers its own shutdown
code = run_program(work, log_directory=lambda: None)
print("ended", flush=True)
sys.exit(code)
"""


def start_interruptible(seconds: float) -> subprocess.Popen:
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(seconds)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    assert process.stdout.readline() == "working\n"
    return process


def interrupt(process: subprocess.Popen) -> None:
    process.send_signal(signal.SIGINT)


@pytest.mark.timeout(60)
def test_ctrl_c_is_acknowledged_at_once_and_a_second_one_changes_nothing():
    process = start_interruptible(1.5)
    interrupt(process)
    assert [process.stderr.readline() for _ in range(2)][1].startswith("interrupted: stopping the workers")
    assert process.stdout.readline() == "stopping\n"
    interrupt(process)  # while the workers are stopped
    assert [process.stderr.readline() for _ in range(2)][1].startswith("still stopping; Ctrl-C once more ends")
    assert [process.stdout.readline() for _ in range(3)] == ["stopped\n", "ended\n", "stopping\n"]
    out, err = process.communicate(timeout=30)
    assert (process.returncode, out) == (130, "stopped\n") and "Traceback" not in err
    assert err.startswith("interrupted; nothing was committed")


@pytest.mark.timeout(60)
def test_a_second_ctrl_c_while_python_exits_is_no_traceback():
    process = start_interruptible(1.0)
    interrupt(process)
    assert [process.stdout.readline() for _ in range(4)] == ["stopping\n", "stopped\n", "ended\n", "stopping\n"]
    interrupt(process)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 130 and "Traceback" not in err and "still stopping" in err


@pytest.mark.timeout(60)
def test_a_third_ctrl_c_ends_the_process():
    process = start_interruptible(50)
    interrupt(process)
    assert process.stdout.readline() == "stopping\n"
    for number in (2, 3):
        time.sleep(0.2)
        assert process.poll() is None, number
        interrupt(process)
    out, err = process.communicate(timeout=20)
    assert (process.returncode, out) == (130, "") and err.rstrip().endswith("ended before all workers had stopped")


def test_without_a_ctrl_c_the_handler_of_python_is_back_after_the_block():
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        pytest.skip("a test run in the background ignores Ctrl-C")
    with acknowledged_interrupts():
        assert signal.getsignal(signal.SIGINT) is not signal.default_int_handler
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
