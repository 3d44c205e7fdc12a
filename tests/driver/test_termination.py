"""SIGTERM: kept until a boundary, heard at once elsewhere, and never for longer than the grace."""

import logging
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from hybridrl.driver.termination import EXIT_CODE, Notice, Terminated


def terminate() -> None:
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(5)  # the handler ends it


def test_outside_of_training_the_notice_is_an_exception_at_once():
    notice, before = Notice(), signal.getsignal(signal.SIGTERM)
    with pytest.raises(Terminated) as raised, notice.heard():
        terminate()
    assert raised.value.code == EXIT_CODE == 143 and notice.received and signal.getsignal(signal.SIGTERM) is before
    with notice.heard():
        assert not notice.received  # another run in this process is another matter


def test_in_training_the_first_notice_is_kept_and_the_second_is_not(caplog):
    caplog.set_level(logging.WARNING)
    notice = Notice()
    with pytest.raises(Terminated), notice.heard(), notice.kept(grace_s=60):
        os.kill(os.getpid(), signal.SIGTERM)
        assert notice.received
        with pytest.raises(Terminated):
            notice.leave_if_received()
        terminate()
    assert "this step is finished and committed, then the run leaves, within trainer.grace_s=60 s" in caplog.text


def test_grace_that_is_over_ends_the_step_where_it_is(caplog):
    notice, began = Notice(), time.monotonic()
    with pytest.raises(Terminated), notice.heard(), notice.kept(grace_s=0.3):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(20)
    assert 0.3 <= time.monotonic() - began < 10 and "are over: the run leaves now" in caplog.text


def test_a_process_that_hears_no_exception_ends_all_the_same():
    code = (
        "import ctypes, os, signal\n"
        "from hybridrl.trainer import leaving\n"
        "leaving.LEAVE_S = 0.2\n"
        "with leaving.NOTICE.kept(grace_s=0.2):\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
        "    end = ctypes.CDLL(None).sleep\n"  # no Python code runs in the main thread meanwhile
        "    while True: end(1000)\n"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode in (EXIT_CODE, -signal.SIGTERM)


def test_another_librarys_handler_does_not_stay_in_the_way():
    notice = Notice()
    with notice.heard():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        notice.listen_again()
        with notice.kept(grace_s=60):
            os.kill(os.getpid(), signal.SIGTERM)
            assert notice.received


def test_a_thread_hears_nothing_and_does_not_mind():
    notice, before = Notice(), signal.getsignal(signal.SIGTERM)

    def work() -> None:
        with notice.heard(), notice.kept(grace_s=1):
            assert signal.getsignal(signal.SIGTERM) is before

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert not notice.received
