"""The rollout correction through the trainer: presets, rejections, bypass mode, and what the cut does not change."""

import logging

import pytest

from tests.support.end_to_end.runs import largest_difference, metrics, train, weights

pytestmark = pytest.mark.timeout(300)
KEY = "algorithm__rollout_correction__"
LOSS = "actor_rollout_ref__actor__policy_loss__"
SHORT = {"trainer__val_before_train": False, "trainer__test_freq": -1, "trainer__save_freq": 2}
TOLERANCE = 1e-4  # a hundredth of the learning rate: Adam divides rounding errors by gradients that are as small
BEHIND = SHORT | {"trainer__lag": 1, "actor_rollout_ref__actor__optim__lr": 1e-2}  # step 2 trains on older weights


def trained(folder, model, **changes):
    rows = train(folder, model, **changes)
    return rows, weights(folder / "run/global_step_2", folder / "hf")


def test_rejected_tokens_leave_the_loss_and_the_rows_stay(tmp_path, tiny_qwen2):
    rejects = {f"{KEY}rollout_rs": "token_k3", f"{KEY}rollout_rs_threshold": 2e-2}
    [first, second], some = trained(tmp_path / "some", tiny_qwen2, **BEHIND, **rejects)
    assert first["rollout_corr/rollout_rs_masked_fraction"] == 0
    assert 0.05 < second["rollout_corr/rollout_rs_masked_fraction"] < 0.95
    assert second["actor/grad_norm"] > 0
    [_, plain], every = trained(tmp_path / "none", tiny_qwen2, **BEHIND)
    assert plain["response_length/mean"] == second["response_length/mean"]  # the batch itself is not changed
    assert largest_difference(some, every) > 0


@pytest.mark.parametrize(
    ("preset", "bounds"), [("decoupled_seq_is_rs", "0.4_2.5"), ("bypass_pg_geo_rs_token_tis", "0.9_1.1")]
)
def test_micro_batches_do_not_change_a_corrected_update(tmp_path, tiny_qwen2, preset, bounds):
    found, norms = [], []
    for rows in (1, 6):
        changes = {"actor_rollout_ref__actor__ppo_micro_batch_size_per_gpu": rows, f"{KEY}preset": preset}
        changes[f"{KEY}rollout_rs_threshold"] = bounds
        logged, policy = trained(tmp_path / str(rows), tiny_qwen2, **BEHIND, **changes)
        found.append(policy)
        norms.append([row["actor/grad_norm"] for row in logged])
        assert 0 < logged[1]["rollout_corr/rollout_rs_masked_fraction"] < 1
    assert norms[0] == pytest.approx(norms[1], rel=1e-4)
    assert largest_difference(*found) < TOLERANCE


def test_a_batch_that_is_rejected_whole_changes_nothing_and_is_reported(tmp_path, tiny_qwen2, caplog):
    changes = {f"{KEY}rollout_rs": "seq_max_k2", f"{KEY}rollout_rs_threshold": 1e-30}
    with caplog.at_level(logging.WARNING):
        rows, after = trained(tmp_path / "all", tiny_qwen2, **BEHIND, **changes)
    assert rows[1]["rollout_corr/rollout_rs_masked_fraction"] == 1
    assert "actor/grad_norm" not in rows[1]
    assert "step 2: rollout correction or staleness left no token of 12 responses" in caplog.text
    alone = {"trainer__total_training_steps": 1, "trainer__save_freq": 1}
    train(tmp_path / "first", tiny_qwen2, **BEHIND | changes | alone)
    before = weights(tmp_path / "first/run/global_step_1", tmp_path / "hf_first")
    assert largest_difference(before, after) == 0


def test_a_mini_batch_that_the_loss_rejects_whole_takes_no_step(tmp_path, tiny_qwen2):
    changes = {f"{KEY}bypass_mode": True, f"{KEY}rollout_rs": "seq_max_k2", f"{KEY}rollout_rs_threshold": 1e-30}
    rows, _ = trained(tmp_path, tiny_qwen2, **BEHIND, **changes)
    assert rows[1]["actor/empty"] == 1 and rows[1]["actor/skipped"] == 0
    assert rows[1]["actor/num_updates"] == rows[0]["actor/num_updates"]
    assert rows[1]["rollout_corr/rollout_rs_masked_fraction"] == pytest.approx(1)


def test_bypass_mode_saves_a_forward_pass_and_on_policy_changes_little(tmp_path, tiny_qwen2):
    [row, _], bypassed = trained(tmp_path / "bypass", tiny_qwen2, **SHORT, **{f"{KEY}preset": "bypass_ppo_clip"})
    [plain, _], usual = trained(tmp_path / "usual", tiny_qwen2, **SHORT)
    assert "timing_s/old_log_prob" not in row and "timing_s/old_log_prob" in plain
    assert row["actor/grad_norm"] == pytest.approx(plain["actor/grad_norm"], rel=1e-3)
    assert largest_difference(bypassed, usual) < 1e-3


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {f"{KEY}preset": "decoupled_k3_rs_token_tis", f"{KEY}rollout_rs_threshold": 1e-4},
        {f"{KEY}preset": "bypass_pg_geo_rs_seq_tis", f"{KEY}rollout_rs_threshold": "0.999_1.001"},
        {f"{LOSS}loss_mode": "clip_cov", f"{LOSS}clip_cov_ratio": 0.2, f"{LOSS}clip_cov_lb": 0},
        {f"{LOSS}loss_mode": "kl_cov", f"{LOSS}kl_cov_ratio": 0.2},
    ],
)
def test_two_ranks_train_as_one_process_does(tmp_path, tiny_qwen2, ray_cluster, changes):
    settings = SHORT | {"actor_rollout_ref__actor__ppo_epochs": 2} | changes  # the learning rate is a tenth of BEHIND's
    _, local = trained(tmp_path / "local", tiny_qwen2, **settings)
    _, ray = trained(tmp_path / "ray", tiny_qwen2, trainer__backend="ray", trainer__n_gpus_per_node=2, **settings)
    assert metrics(tmp_path / "ray/run")
    assert largest_difference(local, ray) < TOLERANCE / 5
