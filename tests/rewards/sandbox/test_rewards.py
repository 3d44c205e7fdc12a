"""From the settings of a run to scores: reward processes run programs, and a run without a sandbox is refused."""

import json
from collections.abc import Iterator

import pytest
import torch

from hybridrl.config import PPOConfig, from_dict
from hybridrl.rewards import RewardManager, load_reward_manager
from hybridrl.rewards.sandbox import http
from tests.support.sandbox_server import serve_sandbox

TRUTH = json.dumps({"fn_name": "f", "inputs": [[1, 2], [3, 4]], "outputs": [3, 8]})


def load(**reward_model) -> RewardManager:
    model = {"num_processes": 2, "timeout_s": 60.0, **reward_model}
    return load_reward_manager(from_dict(PPOConfig, {"reward_model": model}), tokenizer=None)


def sample(source: str, text: str, truth: str) -> dict:
    return {"data_source": source, "solution_str": text, "ground_truth": truth, "extra_info": {}}


@pytest.fixture
def manager(sandbox) -> Iterator[RewardManager]:
    made = load()
    yield made
    made.close()


def test_programs_and_other_responses_of_one_batch_are_scored(manager):
    samples = [
        sample("apps", "```python\ndef f(a, b): return a + b\n```", TRUTH),
        sample("openai/gsm8k", "#### 5", "5"),
        sample("apps", "no program", TRUTH),
        sample("apps", "```python\ndef f(a, b): return a + b\n```", "{}"),
    ]
    right, other, none, broken = manager.run_calls(samples)
    assert (right.value["score"], right.value["acc"]) == (0.5, 0.0)
    assert other.value == 1.0 and none.value["score"] == 0.0
    assert broken.failure == "error" and "ground_truth has no tests" in broken.reason


def test_a_source_whose_rows_run_programs_has_its_sandbox_tried_before_training(manager, monkeypatch):
    monkeypatch.setattr(http, "BACK_OFF_S", 0.01)
    assert manager.check_source("apps") is None
    gone = load(sandbox_fusion={"url": "http://127.0.0.1:9/run_code"})
    assert gone.check_source("openai/gsm8k") is None
    problem = gone.check_source("apps")
    assert problem.startswith(
        "data_source='apps' runs programs of the policy, and reward_model.sandbox_fusion.url=http"
    )
    late = load(sandbox_fusion={"timeout_s": 50.0})
    assert "set reward_model.timeout_s=101 or more" in late.check_source("mbpp")


@pytest.mark.slow
def test_a_response_that_makes_a_built_in_function_hang_or_fail_counts_as_empty_and_a_broken_row_is_left_out():
    manager = load(timeout_s=8.0, limits={"memory_mb": 1500})
    bombs = [r"\boxed{9^{9^{9^{9}}}}", r"\boxed{" + "(" * 3000 + "}", r"\boxed{10^{10^{10}}!}"]
    samples = [sample("lighteval/MATH", text, r"\frac{1}{2}") for text in [*bombs, r"\boxed{0.5}", "none"]]
    samples.append(sample("aime_2024", "Answer: 9^{9^{9^{9}}}", "42"))
    samples.append(sample("lighteval/MATH", r"\boxed{2}", None))
    try:
        scores = manager._scores(samples, torch.ones(len(samples), dtype=torch.int64), by_model={})
    finally:
        manager.close()
    assert [score.value for score in scores] == [0.0] * len(bombs) + [1.0, 0.0, -1.0, 0.0]
    assert [score.valid for score in scores] == [True] * (len(bombs) + 3) + [False]
    assert scores[-2].extra == {"acc": False, "pred": None}
    assert scores[-1].failure == "error"


@pytest.mark.slow
def test_a_remote_sandbox_that_dies_leaves_samples_without_a_score(sandbox):
    with serve_sandbox() as server:
        remote = load(sandbox_fusion={"url": server.url}, num_processes=1)
        text = "```python\ndef f(a, b): return a + b\n```"
        assert remote.run_calls([sample("apps", text, TRUTH)])[0].value["score"] == 0.5
        server.failures = [503] * 4
        [failed] = remote.run_calls([sample("apps", text, TRUTH)])
        remote.close()
    assert failed.failure == "error" and "failed 4 times: HTTP status 503" in failed.reason
