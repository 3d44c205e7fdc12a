"""Console output: which steps have a line, what is in it, and the status line on a terminal."""

import io
import os
import pty
import re
import subprocess
import sys
import termios

import pytest

from hybridrl.trainer.run.console import (
    MAX_COLUMNS,
    ConsoleProgress,
    format_duration,
    split_validation_name,
    step_line,
    validation_lines,
)

STEP = {
    "critic/score/mean": 0.5123,
    "response_length/mean": 14.24,
    "actor/kl_loss": 0.00123,
    "actor/entropy": 0.314,
    "actor/grad_norm": 0.421,
    "perf/total_num_tokens": 2345.0,
    "perf/time_per_step": 1.9,
}


def test_a_step_line_has_what_the_reward_returned_the_speed_of_generation_and_says_if_all_rewards_are_equal():
    more = {"reward_extra/acc/mean": 0.25, "timing_per_token_ms/gen": 2.5, "critic/advantages/max": 1.0}
    assert step_line(STEP | more, 3).startswith("step 3  reward 0.512  acc 0.250  len 14.2")
    assert "  gen 400 tok/s  1.90 s/step" in step_line(STEP | more, 3) and "all equal" not in step_line(STEP | more, 3)
    equal = {"critic/advantages/max": 0.0, "critic/advantages/min": 0.0}
    assert step_line(STEP | equal, 3).startswith("step 3  reward 0.512  all equal  len 14.2")


def test_a_validation_without_training_has_no_step():
    assert validation_lines({"val/loss": 0.25}, 0) == ["validation  loss 0.2500"]


def test_a_step_line_shows_only_what_was_measured():
    assert step_line(STEP, 12, total_steps=150, eta_s=252) == (
        "step 12/150  reward 0.512  len 14.2  kl 0.0012  entropy 0.31  grad 0.42  1234 tok/s  1.90 s/step  eta 4m12s"
    )
    assert step_line({"train/loss": 1.5, "train/lr": 3e-4}, 3) == "step 3  loss 1.5000  lr 3.0e-04"


def test_a_kl_that_is_exactly_zero_is_not_shown_and_a_reward_of_zero_is():
    assert step_line({"actor/ppo_kl": 0.0, "critic/score/mean": 0.0}, 3) == "step 3  reward 0.000"
    assert step_line({"actor/ppo_kl": 1e-3}, 3) == "step 3  ppo_kl 0.0010"


def test_throughput_excludes_validation_time():
    metrics = {"perf/total_num_tokens": 3000.0, "perf/time_per_step": 2.5, "timing_s/testing": 1.0}
    assert step_line(metrics, 3) == "step 3  2000 tok/s  1.50 s/step"


def test_of_many_fast_steps_the_first_the_last_and_one_every_five_seconds_have_a_line(monkeypatch):
    clock = iter([100.0 + i for i in range(61)])  # a step a second
    monkeypatch.setattr("hybridrl.trainer.run.console.time.monotonic", lambda: next(clock))
    stream = io.StringIO()
    progress = ConsoleProgress(100, start_step=40, stream=stream)
    for step in range(41, 101):
        progress.log({"train/loss": 1.0} | ({"val/loss": 2.0} if step == 63 else {}), step)
    steps = [int(line.split("/")[0].removeprefix("step ")) for line in stream.getvalue().splitlines()]
    assert steps == [*range(41, 51), 55, 60, 63, 63, 68, 73, 78, 83, 88, 93, 98, 100]


def test_a_step_line_fits_the_terminal_and_shows_nan_as_it_is():
    wild = dict.fromkeys([*STEP, "actor/ppo_kl", "critic/vf_loss", "train/loss", "train/lr"], 1e30) | {
        "critic/score/mean": float("nan")
    }
    line = step_line(wild, 10**6, total_steps=10**7, eta_s=1e6)
    assert len(line) <= MAX_COLUMNS and "reward nan" in line


def test_validation_has_a_line_per_data_source():
    metrics = {
        "val-core/openai/gsm8k/acc/mean@4": 0.5,
        "val-core/openai/gsm8k/acc/best@4/mean": 0.75,
        "val-core/math/reward/mean@4": 0.1,
        "val-aux/math/reward/std@4": 9.0,
    }
    assert validation_lines(metrics, 10, total_steps=20) == [
        "step 10/20  validation  openai/gsm8k  acc mean@4 0.500  acc best@4/mean 0.750",
        "step 10/20  validation  math  reward mean@4 0.100",
    ]
    assert validation_lines({"val/loss": 0.25}, 10) == ["step 10  validation  loss 0.2500"]
    assert validation_lines(STEP, 10) == []


def test_a_validation_name_with_slashes_is_split():
    assert split_validation_name("val-core/a/b/c/acc/best@8/mean") == ("a/b/c", "acc", "best@8/mean")
    assert split_validation_name("val-core/math/reward/mean@1") == ("math", "reward", "mean@1")


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0s"), (48.4, "48s"), (59.6, "1m00s"), (252, "4m12s"), (7500, "2h05m"), (273600, "3d04h")]
)
def test_a_duration_has_two_units(seconds, text):
    assert format_duration(seconds) == text


def test_without_a_terminal_there_are_plain_lines_only():
    stream = io.StringIO()
    progress = ConsoleProgress(2, stream=stream)
    progress.log({"val-core/s/acc/mean@1": 0.2}, 0)
    progress.log(STEP, 1)
    progress.log(STEP | {"val-core/s/acc/mean@1": 0.4}, 2)
    progress.close()
    lines = stream.getvalue().splitlines()
    heads = [line.split("  ")[:2] for line in lines]
    assert heads == [
        ["step 0/2", "validation"],
        ["step 1/2", "reward 0.512"],
        ["step 2/2", "reward 0.512"],
        ["step 2/2", "validation"],
    ]
    assert lines[2].endswith("eta 0s") and "\r" not in stream.getvalue()


def test_the_time_left_follows_the_speed_of_the_latest_steps(monkeypatch):
    clock = iter([100.0, 110.0, 112.0, 115.0])
    monkeypatch.setattr("hybridrl.trainer.run.console.time.monotonic", lambda: next(clock))
    progress = ConsoleProgress(10, start_step=4, stream=io.StringIO())
    assert progress.eta_s() is None
    progress.log({"train/loss": 1.0}, 5)
    assert progress.eta_s() is None  # 10 s, in which models were loaded
    progress.log(STEP, 6)
    assert progress.eta_s() == 8.0  # 4 steps left at 2 s
    progress.log(STEP, 7)
    assert progress.eta_s() == 7.5  # 3 steps left at the median of 2 and 3 s


# `timing_s/step` of a run of SmolLM2-135M on two cores, of which other programs took more and more.
RECORDED = (
    *(17.9, 29.0, 27.4, 21.8, 27.5, 43.7, 49.7, 37.7, 31.5, 38.8, 36.3, 34.5, 30.9, 45.7, 33.4, 29.8),
    *(36.8, 48.1, 56.2, 50.0, 80.3, 75.2, 49.7, 44.1, 47.0, 54.6, 57.5, 68.7, 51.8, 63.5, 47.0),
)
LOADING_S, VALIDATION_S = 2000.0, 300.0  # planted: far from what steps take


def test_of_a_recorded_run_the_time_left_has_neither_loading_nor_validations_in_its_steps(monkeypatch):
    testing = [VALIDATION_S if step % 10 == 0 or step == len(RECORDED) else 0.0 for step in range(1, len(RECORDED) + 1)]
    clock = [LOADING_S + sum(RECORDED[:n]) + sum(testing[:n]) for n in range(1, len(RECORDED) + 1)]
    times = iter([0.0, *clock])
    monkeypatch.setattr("hybridrl.trainer.run.console.time.monotonic", lambda: next(times))
    progress, ratios = ConsoleProgress(len(RECORDED), test_freq=10, stream=io.StringIO()), {}
    for step, (seconds, testing_s, now) in enumerate(zip(RECORDED, testing, clock, strict=True), 1):
        own = {"perf/time_per_step": seconds + testing_s, "timing_s/testing": testing_s}
        progress.log(own | ({"val/loss": 1.0} if testing_s else {}), step)
        unseen = sum(testing[step:]) if step < 10 else 0.0  # no validation has been measured
        ratios[step] = progress.eta_s() / max(1.0, clock[-1] - now - unseen)
    assert ratios.pop(len(RECORDED)) == 0.0 and ratios.pop(1) > 0.3  # of the first step alone
    # The machine became slower by half, which no estimate can foresee.
    assert min(ratios.values()) > 0.5 and max(ratios.values()) < 1.5
    assert all(0.75 < ratios[step] < 1.25 for step in range(20, len(RECORDED)))


def test_on_a_terminal_a_status_line_is_below_what_is_logged_and_is_removed_at_the_end():
    program = (
        "import logging, sys\n"
        "logging.basicConfig(format='%(message)s', stream=sys.stderr)\n"
        "from hybridrl.trainer.run.console import ConsoleProgress\n"
        "progress = ConsoleProgress(4, start_step=1)\n"
        f"progress.log({STEP!r}, 2)\n"
        "logging.warning('a warning')\n"
        "print('printed', file=sys.stderr)\n"
        "progress.close()\n"
        "logging.warning('the end')\n"
    )
    leader, follower = pty.openpty()
    termios.tcsetwinsize(follower, (30, 120))
    environment = {**os.environ, "TERM": "xterm"}
    command = [sys.executable, "-c", program]
    subprocess.run(command, stdout=follower, stderr=follower, check=True, timeout=60, env=environment)
    text = os.read(leader, 65536).decode()  # all of it: less than a terminal's buffer
    assert "step 2/4  reward 0.512" in text
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)
    assert re.search(r"step 2/4 .* reward 0.512  len 14.2  1234 tok/s", shown)
    lines = [line.split("\r")[-1].strip() for line in shown.splitlines()]
    assert {"a warning", "printed", "the end"} <= set(lines)
    assert not text.rstrip().endswith("\x1b[?25l")


def test_a_validation_by_the_evaluator_is_labelled_with_the_step_whose_weights_it_used():
    metrics = {"val-core/letters/reward/mean@1": 0.5, "val/version": 4.0}
    assert validation_lines(metrics, 6, total_steps=6) == ["step 4/6  validation  letters  reward mean@1 0.500"]
