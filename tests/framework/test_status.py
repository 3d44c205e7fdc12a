"""Lines about long stages: how often, and that they end with the stage."""

import functools
import logging
import re
import threading
import time

import pytest

from hybridrl.framework import Task, status
from hybridrl.framework.stage import stage
from hybridrl.framework.status import report_long_stages, reporting
from hybridrl.single_controller.monitoring.work_done import report_work
from hybridrl.trainer.run.middleware import BatchContext

PERIODS = {"first_s": 0.02, "period_s": 0.05}


class Waiting(logging.Handler):
    """Sets `seen` after a number of lines."""

    def __init__(self, lines: int) -> None:
        super().__init__()
        self.lines, self.seen, self.texts = lines, threading.Event(), []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())
        if len(self.texts) >= self.lines:
            self.seen.set()


@pytest.fixture
def handler():
    log = logging.getLogger("hybridrl.framework.status")
    found = Waiting(2)
    level = log.level
    log.addHandler(found)
    log.setLevel(logging.INFO)
    yield found
    log.removeHandler(found)
    log.setLevel(level)


def test_what_takes_long_has_lines_until_it_ends(handler):
    with reporting("loading the models", **PERIODS):
        assert handler.seen.wait(10)
    assert all(text.startswith("loading the models: ") and text.endswith(" s so far") for text in handler.texts)
    num = len(handler.texts)
    time.sleep(3 * PERIODS["period_s"])
    assert len(handler.texts) == num


def test_one_thread_logs_for_all_blocks_and_ends_after_them(handler, monkeypatch):
    def threads():
        return [thread for thread in threading.enumerate() if thread.name == "status"]

    with reporting("the first", **PERIODS):
        found = threads()
        monkeypatch.setattr(threading.Thread, "start", lambda thread: pytest.fail("another thread"))
        with reporting("the second", **PERIODS):
            assert handler.seen.wait(10)
    with reporting("the third", **PERIODS):
        assert threads() == found and len(found) == 1
    found[0].join(10)
    assert {text.partition(":")[0] for text in handler.texts} == {"the first", "the second"} and not threads()


def test_a_line_that_does_not_end_holds_up_no_block_for_long(handler, monkeypatch):
    monkeypatch.setattr(status, "LINE_TIMEOUT_S", 0.1)
    goes_on = threading.Event()
    handler.emit = lambda record: (handler.seen.set(), goes_on.wait(20))
    with reporting("the first", **PERIODS):
        assert handler.seen.wait(10)
    with reporting("the second", **PERIODS):
        assert not goes_on.is_set()
    goes_on.set()


def test_a_line_has_what_the_call_in_progress_has_counted(handler):
    with reporting("step 3, gen (64 rows)", **PERIODS):
        report_work(1310, 3072, "tokens")
        assert handler.seen.wait(10)
    assert handler.texts[-1].startswith("step 3, gen (64 rows): 1,310 of 3,072 tokens, ")


def test_after_some_minutes_a_line_says_where_the_process_is(handler):
    def sleeps():
        assert handler.seen.wait(10)  # in threading.py

    with reporting("step 3, reward", place_s=0.0, **PERIODS):
        sleeps()
    assert all(re.search(r" s so far; this process is at \S+test_status.py:\d+ in sleeps$", t) for t in handler.texts)


@pytest.mark.parametrize("submits", [False, True])
def test_a_stage_is_named_with_its_step_and_rows_in_both_of_its_halves(handler, submits):
    def whole(ctx):
        ctx.batch = [1, 2, 3]

    def waits(ctx):
        assert handler.seen.wait(10)

    def waits_in_its_second_half(ctx):
        yield None
        assert handler.seen.wait(10)

    slow = stage("gen", submits=submits)(waits_in_its_second_half if submits else waits)
    with Task(ctx=BatchContext(first_step=6)) as task:
        task.use_wrapper(functools.partial(report_long_stages, **PERIODS))
        task.use(stage("whole")(whole))
        task.use(slow)
        task.run(max_step=1)
    assert handler.texts[0].startswith("step 6, gen (3 rows): ")
