"""The remote evaluator: training never waits for it, the newest request wins, its errors are raised."""

import threading
import time

import pytest

from hybridrl.trainer.ppo.policy.remote_evaluator import RemoteEvaluator
from hybridrl.trainer.run.report import merge_steps


class Gate:
    """An evaluation that ends when the test opens the gate."""

    def __init__(self):
        self.open, self.seen = threading.Semaphore(0), []

    def __call__(self, version, weights):
        self.seen.append(version)
        assert self.open.acquire(timeout=60)
        return {"val-core/score": float(weights)}


def one_that_runs_and_one_that_waits() -> tuple[Gate, RemoteEvaluator]:
    gate = Gate()
    evaluation = RemoteEvaluator(gate)
    evaluation.submit(1, 10)
    while gate.seen != [1]:
        time.sleep(0.005)
    evaluation.submit(2, 20)
    return gate, evaluation


def wait_for(evaluation: RemoteEvaluator, count: int) -> list[dict]:
    found, deadline = [], time.monotonic() + 60
    while len(found) < count and time.monotonic() < deadline:
        found += evaluation.poll()
        time.sleep(0.005)
    return found


def test_submit_does_not_wait_and_the_newest_request_wins():
    gate = Gate()
    evaluation = RemoteEvaluator(gate)
    evaluation.submit(1, 10)
    while gate.seen != [1]:
        time.sleep(0.005)
    for version in (2, 3, 4):
        evaluation.submit(version, version * 10)
    assert evaluation.poll() == []
    gate.open.release(2)
    assert wait_for(evaluation, 2) == [
        {"val-core/score": 10.0, "val/version": 1.0},
        {"val-core/score": 40.0, "val/version": 4.0},
    ]


def test_drain_waits_for_the_running_and_the_waiting_evaluation():
    gate, evaluation = one_that_runs_and_one_that_waits()
    threading.Timer(0.2, gate.open.release, [2]).start()
    assert [found["val/version"] for found in evaluation.drain()] == [1.0, 2.0]


def test_one_deadline_ends_the_wait_for_both(monkeypatch):
    monkeypatch.setattr("hybridrl.trainer.ppo.policy.remote_evaluator.DRAIN_TIMEOUT_S", 1.0)
    gate, evaluation = one_that_runs_and_one_that_waits()
    threading.Timer(0.6, gate.open.release).start()  # the second one is begun in time, and not ended
    start = time.monotonic()
    with pytest.raises(TimeoutError, match="the last evaluation was not finished 1 s after"):
        evaluation.drain()
    assert time.monotonic() - start < 1.5
    with pytest.raises(TimeoutError, match="the last evaluation"):
        evaluation.submit(3, 30)
        evaluation.drain()
    gate.open.release(9)


def test_a_closed_evaluator_does_not_begin_the_waiting_evaluation():
    gate, evaluation = one_that_runs_and_one_that_waits()
    threading.Timer(0.2, gate.open.release).start()
    evaluation.close()
    assert gate.seen == [1] and not evaluation._thread.is_alive()


def test_an_error_in_the_evaluator_is_raised_by_poll():
    def broken(version, weights):
        raise KeyError("planted")

    evaluation = RemoteEvaluator(broken)
    evaluation.submit(1, None)
    with pytest.raises(KeyError, match="planted"):
        wait_for(evaluation, 1)


def test_the_curve_shows_a_late_result_at_the_step_of_its_weights():
    history = [{"step": 1, "loss": 3.0}, {"step": 5, "loss": 2.0, "val-core/score": 0.5, "val/version": 1.0}]
    assert merge_steps(history) == [
        {"step": 1, "loss": 3.0, "val-core/score": 0.5},
        {"step": 5, "loss": 2.0, "val/version": 1.0},
    ]
