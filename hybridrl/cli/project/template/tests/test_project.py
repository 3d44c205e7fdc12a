"""Tests of the project's parts, and short runs of it. `pytest` in the project's directory runs these."""

import json
import sys
from pathlib import Path

import pytest

from hybridrl.main_ppo import main

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

import make_data  # noqa: E402
import make_model  # noqa: E402
import reward  # noqa: E402

AGENT = [
    "actor_rollout_ref.rollout.mode=async",
    "actor_rollout_ref.rollout.agent.path=agent_loop.py",
    "actor_rollout_ref.rollout.agent.default_agent_loop=second_try",
]


@pytest.fixture(scope="session")
def inputs(tmp_path_factory):
    """Return a directory with data and a model."""
    folder = tmp_path_factory.mktemp("inputs")
    make_data.main(folder)
    make_model.main(folder / "model")
    return folder


@pytest.mark.parametrize(("answer", "score"), [("12", 1.0), ("7 or 12", 1.0), ("13", 0.2), ("none", 0.0), ("", 0.0)])
def test_the_right_number_has_the_highest_score(answer, score):
    assert reward.compute_score("sums", answer, "12")["score"] == pytest.approx(score)


def test_rows_have_what_the_reward_needs():
    row = make_data.row(3, 4, 5)
    assert row["prompt"][0]["content"] == "4 + 5 =" and row["reward_model"]["ground_truth"] == "9"


@pytest.mark.parametrize("agent", [[], AGENT], ids=["one turn", "agent loop"])
def test_a_run_logs_the_reward_and_the_stage(inputs, tmp_path, monkeypatch, agent):
    monkeypatch.chdir(ROOT)
    settings = {
        "data.train_files": inputs / "train.parquet",
        "data.val_files": inputs / "test.parquet",
        "actor_rollout_ref.model.path": inputs / "model",
        "trainer.total_training_steps": 2,
        "trainer.test_freq": -1,
        "trainer.save_freq": -1,
        "trainer.default_local_dir": tmp_path,
        "trainer.rollout_data_dir": tmp_path / "rollouts",
    }
    words = [f"{name}={value}" for name, value in settings.items()]
    assert main(["--config-path", ".", "--config-name", "config", *words, *agent]) == 0
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    trained = [row for row in rows if "train/share_of_prompts_solved" in row]
    assert len(trained) == 2 and all(0 < row["critic/score/mean"] < 1 for row in trained)
    assert all(0 < row["reward_extra/digits/mean"] < 1 for row in trained)
    assert all((row.get("rollout/num_turns/mean", 2) > 2) == bool(agent) for row in trained)
