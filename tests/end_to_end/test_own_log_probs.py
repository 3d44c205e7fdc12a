"""One optimizer step per batch needs no pass before it: the run with the stage `old_log_prob` is the same."""

import pytest

from tests.support.end_to_end.runs import largest_difference, train, weights
from tests.support.workers.megatron_models import NEEDS_MEGATRON

pytestmark = pytest.mark.timeout(300)
ACTOR = "actor_rollout_ref__actor__"
ONE_STEP = {
    f"{ACTOR}ppo_mini_batch_size": 4,
    f"{ACTOR}ppo_micro_batch_size_per_gpu": 5,
    "actor_rollout_ref__rollout__log_prob_micro_batch_size_per_gpu": 3,
    "actor_rollout_ref__rollout__temperature": 0.7,
    "trainer__total_training_steps": 3,
    "trainer__save_freq": 3,
    "trainer__test_freq": -1,
    "trainer__val_before_train": False,
}
TWO_RANKS = {"trainer__backend": "ray", "trainer__n_gpus_per_node": 2}
MEGATRON = {f"{ACTOR}strategy": "megatron"}
PIPELINE = MEGATRON | TWO_RANKS | {f"{ACTOR}megatron__pipeline_model_parallel_size": 2}
NEW = ("actor/entropy", "training/rollout_probs_diff_max", "training/rollout_probs_diff_mean", "rollout_corr/kl")
SAME = (*NEW, "actor/pg_loss", "actor/grad_norm", "critic/score/mean", "response_length/mean")


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({}, id="fsdp"),
        pytest.param({f"{ACTOR}shuffle": True, "trainer__lag": 1, f"{ACTOR}entropy_coeff": 0.01}, id="behind"),
        pytest.param(MEGATRON, id="megatron", marks=NEEDS_MEGATRON),
        pytest.param(TWO_RANKS, id="two ranks", marks=pytest.mark.slow),
        pytest.param(PIPELINE, id="pipeline", marks=[NEEDS_MEGATRON, pytest.mark.slow]),
    ],
)
def test_a_run_without_the_stage_trains_the_same_policy(tmp_path, tiny_qwen2, request, changes):
    if "trainer__backend" in changes:
        request.getfixturevalue("ray_cluster")
    found, policies = [], []
    for number, setting in enumerate(["null", "true"]):
        folder = tmp_path / str(number)
        found.append(train(folder, tiny_qwen2, **ONE_STEP, **changes, **{f"{ACTOR}calculate_old_log_probs": setting}))
        policies.append(weights(folder / "run/global_step_3", folder / "hf"))
    assert largest_difference(*policies) < 1e-6
    for own, before in zip(*found, strict=True):
        assert "timing_s/old_log_prob" not in own and "timing_s/old_log_prob" in before
        assert before.keys() - own.keys() == {
            "timing_s/old_log_prob",
            "timing_per_token_ms/old_log_prob",
            "perf/mfu/actor_infer",
        }
        for name in SAME:
            assert own[name] == pytest.approx(before[name], rel=1e-5, abs=1e-6), name
        assert own["actor/ppo_kl"] == 0 and before["actor/ppo_kl"] == pytest.approx(0, abs=1e-6)
