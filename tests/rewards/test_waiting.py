"""A batch that waits for its reward function says so: which samples run, for how long, and how many are done."""

import logging
import re

import pytest

from hybridrl.rewards import process_pool
from hybridrl.rewards.function_address import FunctionAddress
from hybridrl.rewards.process_pool import ScoreJob, ScoreProcessPool

FUNCTION = """
import time
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    time.sleep(float(solution_str))
    return 1.0
"""


@pytest.fixture
def pool(tmp_path, monkeypatch):
    monkeypatch.setattr(process_pool, "REPORT_AFTER_S", 0.5)
    (tmp_path / "reward.py").write_text(FUNCTION)
    made = ScoreProcessPool(FunctionAddress(str(tmp_path / "reward.py")), num_processes=2, timeout_s=4)
    assert made.check() is None
    yield made
    made.close()


def sample(seconds: float, index: int) -> dict:
    return {
        "data_source": "letters",
        "solution_str": str(seconds),
        "ground_truth": "",
        "extra_info": {"index": index},
    }


@pytest.mark.timeout(120)
def test_a_hanging_function_is_reported_with_its_samples_after_growing_pauses(pool, caplog):
    with caplog.at_level(logging.WARNING):
        results = pool.map([sample(60, 70), sample(0, 71), sample(60, 72), sample(60, 73)])
    assert [result.failure for result in results] == ["timeout", None, "timeout", "timeout"]
    said = [message for message in caplog.messages if message.startswith("the reward function has taken")]
    assert re.fullmatch(
        r"the reward function has taken \d s: [01] of 4 samples are done; running: "
        r"sample \d \(data_source='letters', index=7\d\) for \d s.*",
        said[0],
    )
    # At 0.5 s, 1 s, 2 s, 4 s and so on: the pause is the time so far.
    taken = [float(re.search(r"taken (\d+) s", text)[1]) for text in said]
    assert 2 <= len(said) <= 6 and taken == sorted(taken)
    assert any("of them stopped at reward_model.timeout_s" in text for text in said[1:])


def test_a_batch_that_is_done_in_time_says_nothing(pool, caplog):
    pool.map([sample(0, 1)] * 4)
    assert not [message for message in caplog.messages if "has taken" in message]


def test_the_pauses_between_reports_double():
    job = ScoreJob([{}])
    job.report([], now=job.started + 20)
    assert job.next_report == pytest.approx(job.started + 40)
    job.report([], now=job.next_report)
    assert job.next_report == pytest.approx(job.started + 80)


def test_a_function_that_does_not_load_is_reported(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(process_pool, "REPORT_AFTER_S", 0.5)
    (tmp_path / "reward.py").write_text(f"import time\ntime.sleep(3)\n{FUNCTION}")
    made = ScoreProcessPool(FunctionAddress(str(tmp_path / "reward.py")))
    with caplog.at_level(logging.WARNING):
        assert made.check() is None
    made.close()
    assert any("1 of 1 processes load it" in message for message in caplog.messages)
