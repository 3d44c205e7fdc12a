"""Selection of samples, PF-PPO, over-sampling, length rewards and the likelihood loss in real runs."""

import json

import pytest

from hybridrl import main_ppo
from hybridrl.trainer.checkpoint.ledger_audit import audit
from hybridrl.trainer.checkpoint.step_ledger import FILE, read_ledger
from tests.support.end_to_end.runs import largest_difference, metrics, settings, train, weights

pytestmark = pytest.mark.timeout(300)
ACTOR = "actor_rollout_ref__actor__"
SHORT = {
    "actor_rollout_ref__rollout__n": 4,
    "algorithm__select_samples__k": 2,
    "trainer__total_training_steps": 3,
    "trainer__test_freq": -1,
    "trainer__val_before_train": False,
}
EVERYTHING = SHORT | {
    "algorithm__select_samples__method": "random",
    "algorithm__use_pf_ppo": True,
    "algorithm__pf_ppo__reweight_method": "max_random",
    "algorithm__filter_groups__order": "shortest",
    "data__gen_batch_size": 6,
    "reward_model__length_reward_coef": 0.1,
    f"{ACTOR}positive_nll_coef": 0.1,
    f"{ACTOR}loss_agg_mode": "seq-mean-token-sum-norm",
    f"{ACTOR}loss_scale_factor": 20,
    "trainer__lag": 1,
    "trainer__replay__groups": 1,
    "trainer__staleness": 2,
}
SAME = ("critic/score/mean", "actor/grad_norm", "actor/pg_loss", "actor/positive_nll_loss", "response_length/mean")


def test_a_step_scores_all_samples_and_trains_on_those_with_the_largest_variance(tmp_path, tiny_qwen2):
    rows = train(tmp_path, tiny_qwen2, **SHORT, trainer__rollout_data_dir=tmp_path / "rollouts", trainer__save_freq=-1)
    for step, row in enumerate(rows, start=1):
        lines = (tmp_path / f"rollouts/{step}.jsonl").read_text().splitlines()
        scores = [json.loads(line)["score"] for line in lines]
        assert row["training/select_samples/seq_reward_mean"] == pytest.approx(sum(scores) / len(scores))
        assert row["training/select_samples/left_out_samples"] == len(scores) / 2 and row["actor/grad_norm"] > 0
        # Two of four: the largest variance is that of the highest and the lowest score.
        ends = [f(scores[start : start + 4]) for start in range(0, len(scores), 4) for f in (min, max)]
        assert row["critic/score/mean"] == pytest.approx(sum(ends) / len(ends))


def test_a_resumed_run_with_every_choice_of_samples_ends_as_the_uninterrupted_one(tmp_path, tiny_qwen2):
    rows = train(tmp_path / "whole", tiny_qwen2, **EVERYTHING)
    assert all(row["training/filter_groups/evicted_samples"] == 0 for row in rows)
    assert sum(row["training/filter_groups/kept_groups"] for row in rows) > 0
    assert all(row["actor/positive_nll_loss"] > 0 for row in rows)
    ledger = audit(read_ledger(str(tmp_path / "whole/run" / FILE)))
    assert ledger.problems() == [] and all(len(entry["prompts"]) == 4 for entry in ledger.steps.values())
    start = tmp_path / "whole/run/global_step_1"
    (tmp_path / "again").mkdir()
    again = ["trainer.resume_mode=resume_path", f"trainer.resume_from_path={start}"]
    assert main_ppo.main([*settings(tmp_path / "again", tiny_qwen2, **EVERYTHING), *again]) == 0
    resumed = metrics(tmp_path / "again/run")
    assert [[row[name] for name in SAME] for row in resumed] == [[row[name] for name in SAME] for row in rows[1:]]
    policies = [weights(tmp_path / name / "run/global_step_3", tmp_path / f"{name}_hf") for name in ("whole", "again")]
    assert largest_difference(*policies) == 0
