"""SIGTERM and Ctrl-C: deferred to the end of a step, raised at once elsewhere, and after the grace period."""

import logging
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from hybridrl.driver.signals import (
    EXIT_CODE,
    Terminated,
    TerminationSignal,
    acknowledged_interrupts,
    is_terminating,
    keep_sigterm_handler,
)


def terminate() -> None:
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(60)  # the handler interrupts it


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
        until = time.monotonic() + 60
        while not caplog.records and time.monotonic() < until:  # a thread logs
            time.sleep(0.01)
        terminate()
    assert "commits this step, then exits, within trainer.grace_s=60" in caplog.text


def test_the_end_of_the_grace_period_interrupts_the_step(caplog):
    sigterm, start = TerminationSignal(), time.monotonic()
    with pytest.raises(Terminated), sigterm.handle_sigterm(), sigterm.defer_sigterm(grace_s=0.3):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(60)
    assert 0.3 <= time.monotonic() - start < 60 and "are over: the run exits now" in caplog.text


@pytest.fixture
def default_ctrl_c():
    """Python's own handler of Ctrl-C: a test run in the background ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def press_ctrl_c() -> None:
    os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.usefixtures("default_ctrl_c")
def test_in_training_a_first_ctrl_c_is_deferred_and_ends_the_run_after_the_step(caplog):
    caplog.set_level(logging.WARNING)
    run = TerminationSignal()
    with acknowledged_interrupts(run), run.defer_sigterm(grace_s=60):
        press_ctrl_c()
        assert run.received and run.exit_code == 130
        with pytest.raises(KeyboardInterrupt):
            run.raise_if_received()
        until = time.monotonic() + 60
        while not caplog.records and time.monotonic() < until:  # a thread logs
            time.sleep(0.01)
    assert "Ctrl-C: the run finishes and commits this step" in caplog.text and "Ctrl-C again" in caplog.text
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.usefixtures("default_ctrl_c")
@pytest.mark.parametrize("second", ["key", "grace"])
def test_a_second_ctrl_c_or_the_end_of_the_grace_period_interrupts_the_step(second, capfd):
    run = TerminationSignal()
    with acknowledged_interrupts(run):
        with (
            pytest.raises(KeyboardInterrupt),
            run.handle_sigterm(),
            run.defer_sigterm(grace_s=60 if second == "key" else 0.2),
        ):
            press_ctrl_c()
            if second == "key":
                press_ctrl_c()
            time.sleep(60)
        assert not run.defer_interrupt()  # outside of training
    assert "interrupted: stopping the workers" in capfd.readouterr().err


def test_a_process_stuck_in_c_code_is_ended_all_the_same():
    code = (
        "import ctypes, os, signal\n"
        "from hybridrl.driver import signals\n"
        "signals.EXIT_TIMEOUT_S = 0.2\n"
        "with signals.TerminationSignal().defer_sigterm(grace_s=0.2):\n"
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
import atexit, os, select, sys, time
from hybridrl.driver.program import run_program
from hybridrl.driver.run_context import RunContext
def stop_slowly():
    print("stopping", flush=True)
    while not select.select([0], [], [], 0.1)[0]:  # takes as long as the test wants
        pass  # not one long read: a signal just before it is handled only after it
    os.read(0, 1)
    print("stopped", flush=True)
def work():
    try:
        print("working", flush=True)
        while True:
            time.sleep(0.1)
    finally:
        stop_slowly()
atexit.register(stop_slowly)  # as Ray registers its own shutdown
code = run_program(work, context=RunContext())
print("ended", flush=True)
sys.exit(code)
"""


def start_interruptible() -> subprocess.Popen:
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    assert process.stdout.readline() == "working\n"
    return process


def interrupt(process: subprocess.Popen) -> None:
    process.send_signal(signal.SIGINT)


def let_stop(process: subprocess.Popen) -> None:
    process.stdin.write("\n")
    process.stdin.flush()


@pytest.mark.timeout(60)
def test_ctrl_c_is_acknowledged_at_once_and_a_second_one_changes_nothing():
    process = start_interruptible()
    interrupt(process)
    assert [process.stderr.readline() for _ in range(2)][1].startswith("interrupted: stopping the workers")
    assert process.stdout.readline() == "stopping\n"
    interrupt(process)  # while the workers are stopped
    assert [process.stderr.readline() for _ in range(2)][1].startswith("still stopping; Ctrl-C once more ends")
    let_stop(process)
    assert [process.stdout.readline() for _ in range(3)] == ["stopped\n", "ended\n", "stopping\n"]
    out, err = process.communicate("\n", timeout=50)
    assert (process.returncode, out) == (130, "stopped\n") and "Traceback" not in err
    assert err.startswith("interrupted; nothing was committed")


@pytest.mark.timeout(60)
def test_a_second_ctrl_c_while_python_exits_is_no_traceback():
    process = start_interruptible()
    interrupt(process)
    let_stop(process)
    assert [process.stdout.readline() for _ in range(4)] == ["stopping\n", "stopped\n", "ended\n", "stopping\n"]
    interrupt(process)
    while not (line := process.stderr.readline()).startswith("still stopping"):
        assert line
    let_stop(process)
    _, err = process.communicate(timeout=50)
    assert process.returncode == 130 and "Traceback" not in err


@pytest.mark.timeout(60)
def test_a_third_ctrl_c_ends_the_process():
    process = start_interruptible()
    interrupt(process)
    assert process.stdout.readline() == "stopping\n"
    interrupt(process)
    while not (line := process.stderr.readline()).startswith("still stopping"):  # two signals at once would be one
        assert line
    assert process.poll() is None
    interrupt(process)
    process.wait(timeout=50)
    out, err = process.stdout.read(), process.stderr.read()
    assert (process.returncode, out) == (130, "") and err.rstrip().endswith("ended before all workers had stopped")


def test_without_a_ctrl_c_the_handler_of_python_is_back_after_the_block():
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        pytest.skip("a test run in the background ignores Ctrl-C")
    with acknowledged_interrupts():
        assert signal.getsignal(signal.SIGINT) is not signal.default_int_handler
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
