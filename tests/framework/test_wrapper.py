"""StepTimer: seconds per stage."""

import logging
import subprocess
import sys
import time

import pytest

from hybridrl.framework import Context, OnlineRLContext, StepTimer, Task, stage

TICK = 0.01  # seconds; sleep takes at least this long


@stage("gen")
def _slow(ctx):
    time.sleep(TICK)


@stage("log")
def _both_halves(ctx):
    time.sleep(TICK)
    yield
    time.sleep(TICK)


def test_both_halves_of_a_generator_are_counted_and_other_stages_are_not():
    timer, start = StepTimer(), time.perf_counter()
    with Task(ctx=OnlineRLContext()) as task:
        task.use_wrapper(timer).use(_both_halves).use(stage("long")(lambda ctx: time.sleep(5 * TICK))).run(max_step=1)
    elapsed = time.perf_counter() - start
    assert timer.last["log"] >= 2 * TICK and timer.last["long"] >= 5 * TICK
    assert timer.last["log"] + timer.last["long"] <= elapsed
    assert task.ctx.timing == pytest.approx(timer.last)


def test_stages_of_one_name_add_up_in_the_step():
    timer = StepTimer()
    with Task(ctx=OnlineRLContext()) as task:
        task.use_wrapper(timer).use(_slow).use(_slow).run(max_step=2)
    assert len(timer.records["gen"]) == 4
    assert task.ctx.timing["gen"] == pytest.approx(sum(list(timer.records["gen"])[2:])), (
        "the second step starts from zero"
    )


def test_the_first_half_is_in_the_timing_before_the_step_ends():
    seen = {}
    with Task(ctx=Context()) as task:
        task.use_wrapper(StepTimer()).use(_both_halves).use(lambda ctx: seen.update(ctx.timing)).run(max_step=1)
    assert TICK <= seen["log"] < task.ctx.timing["log"]


def test_a_failed_stage_leaves_its_time_but_no_record():
    def fail(ctx):
        time.sleep(TICK)
        raise ValueError

    timer = StepTimer()
    with Task() as task, pytest.raises(ValueError):
        task.use_wrapper(timer).use(_both_halves).use(fail).run(max_step=1)
    assert task.ctx.timing["fail"] >= TICK and timer.records == {}


def test_records_hold_the_latest_runs_only():
    timer = StepTimer(print_per_step=2, smooth_window=3)
    with Task() as task:
        task.use_wrapper(timer).use(stage("a")(lambda ctx: None)).run(max_step=20)
    assert len(timer.records["a"]) == 6


def test_a_line_per_stage_every_few_steps(caplog):
    with caplog.at_level(logging.INFO), Task() as task:
        task.use_wrapper(StepTimer(print_per_step=2)).use(_both_halves).run(max_step=4)
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 2 and all(line.startswith("stage log took ") for line in lines)


def test_zero_steps_print_nothing(caplog):
    with caplog.at_level(logging.DEBUG), Task() as task:
        task.use_wrapper(StepTimer(print_per_step=0)).use(stage("a")(lambda ctx: None)).run(max_step=4)
    assert not caplog.records


PROGRAM = """
import logging
from hybridrl.framework import Task
from hybridrl.framework.wrapper import StepTimer
{settings}
with Task() as task:
    task.use_wrapper(StepTimer()).use(print).run(max_step=2)
"""


@pytest.mark.parametrize("settings", ["", "logging.basicConfig()", "logging.getLogger().setLevel(logging.INFO)"])
def test_a_program_shows_its_lines_without_any_setting_of_logging(settings):
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(settings=settings)],
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
    )
    assert done.stderr.count("stage print took ") == 2
