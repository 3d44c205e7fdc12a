"""Every registered estimator, policy loss and aggregation takes real training steps through the trainer.

Runs share what they can: one run of an estimator generates, scores and estimates once per step, and updates the policy
with several losses. The full product is `slow`.
"""

import itertools
from collections.abc import Sequence
from dataclasses import replace

import pytest

from hybridrl import main_ppo
from hybridrl.algos import ADVANTAGE_ESTIMATORS, AGGREGATIONS, POLICY_LOSSES
from hybridrl.algos.policy_losses import OWN_AGG_MODES
from hybridrl.config import PPOConfig
from hybridrl.trainer.ppo.trainer import RayPPOTrainer
from hybridrl.trainer.run.middleware import BatchContext
from tests.support.algos.contract import LOSS_SETTINGS, run_settings
from tests.support.end_to_end.runs import largest_difference, settings, train, weights

SHORT = {
    "trainer__total_training_steps": 1,
    "trainer__val_before_train": False,
    "trainer__test_freq": -1,
    "actor_rollout_ref__actor__ppo_epochs": 2,  # in the second one the ratio is not 1
}
Combination = tuple[str, str]  # policy loss, aggregation
ESTIMATORS, LOSSES, MODES = sorted(ADVANTAGE_ESTIMATORS), sorted(POLICY_LOSSES), sorted(AGGREGATIONS)
BYPASS = "bypass_mode"
"""The loss that needs another step: it trains in a run of its own."""


def modes_of(loss: str) -> Sequence[str]:
    return (OWN_AGG_MODES[loss],) if loss in OWN_AGG_MODES else MODES


ALL = [(loss, mode) for loss in LOSSES if loss != BYPASS for mode in modes_of(loss)]


class EachCombination(RayPPOTrainer):
    """A trainer whose step updates the policy once per combination, each time with these settings in all processes."""

    combinations: Sequence[Combination]
    found: dict[Combination, dict[str, float]]

    def update_actor(self, ctx: BatchContext) -> None:
        before, metrics = self.config, ctx.metrics
        for combination in self.combinations:
            self._use(with_loss(before, *combination))
            ctx.metrics = self.found[combination] = dict(metrics)
            super().update_actor(ctx)
        self._use(before)

    def _use(self, config: PPOConfig) -> None:
        self.config = self.policy.actor.worker.config = config


def with_loss(config: PPOConfig, loss: str, mode: str) -> PPOConfig:
    """Return the settings with another policy loss and aggregation."""
    actor = config.actor_rollout_ref.actor
    policy_loss = replace(actor.policy_loss, loss_mode=loss, **LOSS_SETTINGS.get(loss, {}))
    actor = replace(actor, policy_loss=policy_loss, loss_agg_mode=mode)
    changed = replace(config, actor_rollout_ref=replace(config.actor_rollout_ref, actor=actor))
    main_ppo.validate_config(changed)
    return changed


def train_each(folder, model, estimator: str, combinations: Sequence[Combination]) -> dict[Combination, dict]:
    """Return the metrics of an update with each combination, after one step of the estimator up to its advantages."""
    changes = SHORT | run_settings(estimator) | {"algorithm__adv_estimator": estimator}
    changes |= {"trainer__save_freq": -1, "trainer__logger": "[console]"}
    changes["actor_rollout_ref__actor__optim__lr"] = 1e-6  # keeps the ratio inside the clip range to the last one
    trainer_cls = type("EachOfThese", (EachCombination,), {"combinations": combinations, "found": {}})
    assert main_ppo.main(settings(folder, model, **changes), trainer_cls=trainer_cls) == 0
    assert set(trainer_cls.found) == set(combinations)
    return trainer_cls.found


def assert_trained(found: dict[Combination, dict]) -> None:
    for combination, metrics in found.items():
        assert 0 < metrics["actor/grad_norm"] < 1000, combination


COVERING = {
    estimator: [ALL[(number * 3 + offset) % len(ALL)] for offset in range(3)]
    for number, estimator in enumerate(ESTIMATORS)
}
"""Three combinations for each estimator, so that each is there at least once."""


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_an_estimator_trains_with_some_losses_and_aggregations(tmp_path, tiny_qwen2, estimator):
    assert_trained(train_each(tmp_path, tiny_qwen2, estimator, COVERING[estimator]))


def test_the_short_test_has_every_combination_of_loss_and_aggregation():
    assert set(itertools.chain(*COVERING.values())) == set(ALL)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_an_estimator_trains_with_every_loss_and_aggregation(tmp_path, tiny_qwen2, estimator):
    assert_trained(train_each(tmp_path, tiny_qwen2, estimator, ALL))


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("mode", MODES)
def test_the_loss_of_bypass_mode_trains_with_every_aggregation(tmp_path, tiny_qwen2, mode):
    for estimator in ESTIMATORS:
        if "sum_pi_squared_BT" in ADVANTAGE_ESTIMATORS[estimator].needs:
            continue  # refused: that pass is left out
        changes = SHORT | run_settings(estimator, BYPASS)
        changes |= {"algorithm__adv_estimator": estimator, "actor_rollout_ref__actor__loss_agg_mode": mode}
        [row] = train(tmp_path / estimator, tiny_qwen2, trainer__save_freq=-1, **changes)
        assert 0 < row["actor/grad_norm"] < 1000, estimator


def test_vapo_trains_policy_and_critic_on_normalised_rewards(tmp_path, tiny_qwen2):
    [row] = train(tmp_path, tiny_qwen2, algorithm__adv_estimator="vapo", algorithm__normalize_reward="true", **SHORT)
    assert 0 < row["actor/grad_norm"] < 100 and row["critic/grad_norm"] > 0
    assert row["reward/running_mean"] == pytest.approx(row["critic/score/mean"])
    assert row["critic/rewards/mean"] == pytest.approx(0, abs=1e-5)


def test_gdpo_trains_on_the_rewards_that_a_function_returns(tmp_path, tiny_qwen2):
    reward = tmp_path / "rewards.py"
    reward.write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    digits = sum(c.isdigit() for c in solution_str) / max(1, len(solution_str))\n"
        "    return {'score': digits, 'short': -len(solution_str), 'digits': digits}\n"
    )
    more = {
        "algorithm__adv_estimator": "gdpo",
        "algorithm__gdpo_reward_keys": "[digits,short]",
        "algorithm__gdpo_reward_weights": "[1.0,0.5]",
        "custom_reward_function__path": reward,
    }
    [row] = train(tmp_path, tiny_qwen2, trainer__save_freq=-1, **SHORT, **more)
    assert 0 < row["actor/grad_norm"] < 100
    assert row["reward_extra/digits/mean"] == pytest.approx(row["critic/score/mean"])
    assert row["reward_extra/short/mean"] < 0


@pytest.mark.slow
@pytest.mark.parametrize("loss", LOSSES)
def test_micro_batches_do_not_change_the_update_of_a_policy_loss(tmp_path, tiny_qwen2, loss):
    assert_micro_batches_change_nothing(tmp_path, tiny_qwen2, loss)


@pytest.mark.parametrize("loss", ["clip_cov", "bypass_mode"])
def test_micro_batches_do_not_change_the_update_of_a_loss_that_selects_or_rejects_tokens(tmp_path, tiny_qwen2, loss):
    assert_micro_batches_change_nothing(tmp_path, tiny_qwen2, loss)


def assert_micro_batches_change_nothing(tmp_path, tiny_qwen2, loss: str) -> None:
    found = []
    for rows in (2, 6):
        changes = SHORT | run_settings(loss) | {"actor_rollout_ref__actor__policy_loss__loss_mode": loss}
        changes["actor_rollout_ref__actor__ppo_micro_batch_size_per_gpu"] = rows
        [row] = train(tmp_path / str(rows), tiny_qwen2, **changes)
        assert 0 < row["actor/grad_norm"] < 100
        found.append(weights(tmp_path / str(rows) / "run/global_step_1", tmp_path / f"hf{rows}"))
    assert largest_difference(*found) < 1e-5
