"""An evaluation beside training: it is never waited for, the newest request wins, its mistakes are heard of."""

import threading
import time

import pytest

from hybridrl.trainer.ppo.validation import Evaluation
from hybridrl.trainer.run.report import merge_steps


class Gate:
    """An evaluation that ends when it is told to."""

    def __init__(self):
        self.open, self.seen = threading.Semaphore(0), []

    def __call__(self, version, weights):
        self.seen.append(version)
        assert self.open.acquire(timeout=10)
        return {"val-core/score": float(weights)}


def wait_for(evaluation: Evaluation, count: int) -> list[dict]:
    found, deadline = [], time.monotonic() + 10
    while len(found) < count and time.monotonic() < deadline:
        found += evaluation.finished()
        time.sleep(0.005)
    return found


def test_requests_do_not_wait_and_the_newest_wins():
    gate = Gate()
    evaluation = Evaluation(gate)
    start = time.monotonic()
    evaluation.request(1, 10)
    while gate.seen != [1]:
        time.sleep(0.005)
    for version in (2, 3, 4):
        evaluation.request(version, version * 10)
    assert evaluation.finished() == [] and time.monotonic() - start < 5
    gate.open.release(2)
    assert wait_for(evaluation, 2) == [
        {"val-core/score": 10.0, "val/version": 1.0},
        {"val-core/score": 40.0, "val/version": 4.0},
    ]


def test_the_end_waits_for_what_is_running_and_waiting():
    gate = Gate()
    evaluation = Evaluation(gate)
    evaluation.request(1, 10)
    while gate.seen != [1]:
        time.sleep(0.005)
    evaluation.request(2, 20)
    threading.Timer(0.2, gate.open.release, [2]).start()
    assert [found["val/version"] for found in evaluation.finish()] == [1.0, 2.0]


def test_a_mistake_over_there_is_raised_over_here():
    def broken(version, weights):
        raise KeyError("planted")

    evaluation = Evaluation(broken)
    evaluation.request(1, None)
    with pytest.raises(KeyError, match="planted"):
        wait_for(evaluation, 1)


def test_the_curve_shows_a_late_result_at_the_step_it_is_about():
    history = [{"step": 1, "loss": 3.0}, {"step": 5, "loss": 2.0, "val-core/score": 0.5, "val/version": 1.0}]
    assert merge_steps(history) == [
        {"step": 1, "loss": 3.0, "val-core/score": 0.5},
        {"step": 5, "loss": 2.0, "val/version": 1.0},
    ]
