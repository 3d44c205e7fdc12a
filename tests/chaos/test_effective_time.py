"""The effective training time ratio: the model agrees with arithmetic, with a simulation and with published figures.

`benchmarks/effective_time.py` measures it and compares the model with what it measured.
"""

import json
import math
import random

import pytest

from benchmarks._effective_time import Failure, Job, Recovery, expected_ratio, failures_per_hour, ratio_of_run
from benchmarks.effective_time import RATES, Run, predicted_ratio, read_run

JOB = Job(
    bytes_per_gpu=10e9,
    memory_bytes_per_s=5e9,
    storage_bytes_per_s=0.25e9,
    step_s=300.0,
    save_freq=10,
    detection_s=5.0,
    process_start_s=15.0,
    engine_start_s=120.0,
    machine_detection_s=6.0,
    job_start_s=34.0,
    replacement_s=300.0,
    machine_share=0.75,
)


def test_the_parts_of_a_failure_are_lost_work_detection_and_restart():
    assert JOB.process() == Failure(lost_work_s=150.0, detection_s=5.0, restart_s=15.0 + 120.0 + 2.0)
    assert JOB.machine() == Failure(lost_work_s=1500.0, detection_s=6.0, restart_s=300.0 + 34.0 + 120.0 + 40.0)
    assert JOB.overhead() == pytest.approx((2.0 + 40.0 / 10) / 300)


def test_a_job_loses_what_its_failures_and_its_checkpoints_take():
    # 1000 GPUs, 2e-5 failures per GPU-hour: 0.02 per hour, a quarter processes (292 s), the rest machines (2000 s)
    lost = (0.005 * 292 + 0.015 * 2000) / 3600
    assert JOB.ratio(2e-5, 1000) == pytest.approx((1 - lost) / 1.02)
    assert JOB.ratio(1e-3, 16384) is None  # 16 failures per hour


def test_a_run_and_a_rate_have_the_same_ratio():
    failure = Failure(2.0, 1.0, 7.0)
    # 80 s of steps and two failures of 10 s each: 100 s, 72 failures per hour
    assert ratio_of_run(80.0, [failure, failure]) == pytest.approx(0.8)
    assert expected_ratio({failure: 72.0}) == pytest.approx(0.8)
    assert expected_ratio({failure: 72.0}, overhead=0.25) == pytest.approx(0.64)
    assert expected_ratio({failure: 1e6}) == 0.0


@pytest.mark.parametrize("failures_in_an_hour", [0.01, 0.1, 0.5])
def test_the_closed_form_agrees_with_dalys_complete_model_while_little_is_lost(failures_in_an_hour):
    # Daly 2006 (doi:10.1016/j.future.2004.11.016): expected time of a segment of `period` seconds with restart `r`
    recovery = Recovery(detection_s=5.0, start_s=40.0, state_bytes=0.0, bytes_per_s=1.0, period_s=300.0)
    failure, rate = recovery.failure(), failures_in_an_hour / 3600
    segment_s = math.exp(rate * (failure.detection_s + failure.restart_s)) * math.expm1(rate * 300.0) / rate
    lost = rate * failure.cost_s
    assert expected_ratio({failure: failures_in_an_hour}) == pytest.approx(300.0 / segment_s, abs=2 * lost**2)


def test_the_closed_form_agrees_with_a_simulation():
    chance, step_s, restart_s, rate = random.Random(0), 10.0, 8.0, 1 / 400.0
    wall_s, steps = 0.0, 20_000
    for _ in range(steps):
        while (work_s := chance.expovariate(rate)) < step_s:  # it fails within the step, and the step starts again
            wall_s += work_s + restart_s
        wall_s += step_s
    failure = Failure(step_s / 2, 0.0, restart_s)
    assert expected_ratio({failure: rate * 3600}) == pytest.approx(steps * step_s / wall_s, abs=0.003)


def test_the_published_rates_give_the_published_times_between_failures():
    hours = {name: 1 / failures_per_hour(rate, 16384) for name, (rate, _) in RATES.items()}
    assert hours["RSC-1: 6.50 failures in 1000 node-days"] == pytest.approx(1.8, abs=0.01)  # as projected there
    llama = hours["Llama 3: 419 unexpected interruptions in 54 days of 16384 GPUs"]
    assert llama == pytest.approx(54 * 24 / 419)  # "every three hours"


def test_a_run_is_read_from_its_events(tmp_path):
    events = [
        {"what": "stage", "at": at, "name": "next_batch", "step": step, "pids": []}
        for at, step in ((20.0, 1), (30.0, 2), (40.0, 3), (58.0, 3), (68.0, 4))
    ]
    events += [
        {"what": "hit", "at": 46.0, "step": 3, "role": "actor", "rank": 0},
        {"what": "said", "at": 46.5, "text": "actor-0 was lost in update_actor of step 3 (...)"},
    ]
    (tmp_path / "log.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    run = read_run(tmp_path, start=5.0, steps=4)
    assert run == Run(1, wall_s=38.0, useful_s=20.0, start_s=15.0, failures=(Failure(6.0, 0.5, 11.5),))
    assert ratio_of_run(run.useful_s, run.failures) == pytest.approx(run.ratio)


def test_a_run_is_predicted_from_the_other_runs_alone():
    calm = Run(0, 100.0, 100.0, 5.0, ())
    one = Run(1, 112.0, 100.0, 5.0, (Failure(1.0, 1.0, 10.0),))
    two = Run(2, 146.0, 110.0, 5.0, (Failure(1.0, 1.0, 10.0), Failure(2.0, 2.0, 20.0)))
    runs = [calm, one, two]
    assert predicted_ratio(calm, runs) == 1.0
    assert predicted_ratio(one, runs) == pytest.approx(100 / (100 + 18))
    assert predicted_ratio(two, runs) == pytest.approx(100 / (100 + 2 * 12))
    assert predicted_ratio(one, [calm, one]) is None
