"""Runs with a loss, gradient or reward that is not finite, under each policy of `trainer.nonfinite`."""

import json
import math
import re

import pytest

from hybridrl import main_ppo
from hybridrl.algos.policy_losses import POLICY_LOSSES
from hybridrl.failure_policy import RULES, FailureKind
from hybridrl.trainer.checkpoint.ledger_audit import audit
from hybridrl.trainer.checkpoint.step_ledger import FILE, read_ledger
from tests.support.end_to_end.runs import largest_difference, metrics, settings, train, weights

MAX_ROLLBACKS = RULES[FailureKind.UPDATE_REJECTED].limit
MAX_SKIPPED_STEPS = RULES[FailureKind.UPDATE_SKIPPED].limit
# A loss that is NaN in the mini-batches that `spoilt` names. The file next to it counts them and outlives the
# process.
CODE = """
import pathlib
import torch.distributed as dist
from hybridrl.algos import PolicyLoss, register_policy_loss
from hybridrl.algos.policy_losses import vanilla

COUNTER = pathlib.Path(__file__).with_name("calls")

@register_policy_loss("{name}")
def spoilt(*arguments, **settings):
    parts = vanilla(*arguments, **settings)
    if dist.get_rank() < dist.get_world_size() - 1:
        return parts
    with open(COUNTER, "a") as calls:
        calls.write(".")
    number = COUNTER.stat().st_size
    return PolicyLoss(parts.losses_BT * float("nan"), *parts[1:]) if {condition} else parts
"""


@pytest.fixture(autouse=True)
def losses_as_they_were():
    before = dict(POLICY_LOSSES)
    yield
    POLICY_LOSSES.clear()
    POLICY_LOSSES.update(before)


def spoilt(folder, condition: str, **changes) -> dict:
    """Return settings of a run with NaN losses.

    The loss is NaN in mini-batches whose number, from 1, fulfills `condition`. A step has two mini-batches.
    """
    folder.mkdir(exist_ok=True)
    (folder / "loss.py").write_text(CODE.replace("{condition}", condition).replace("{name}", f"spoilt {folder.name}"))
    return {
        "algorithm__path": folder / "loss.py",
        "actor_rollout_ref__actor__policy_loss__loss_mode": f"spoilt {folder.name}",
        "data__train_batch_size": 4,
        "trainer__total_training_steps": 3,
        "trainer__test_freq": -1,
        "trainer__val_before_train": False,
    } | changes


def test_a_nonfinite_update_is_skipped_counted_and_in_no_checkpoint(tmp_path, tiny_qwen2):
    rows = train(tmp_path, tiny_qwen2, **spoilt(tmp_path, "number == 3"))
    assert [row["actor/skipped"] for row in rows] == [0, 0.5, 0] and [row["actor/num_updates"] for row in rows] == [
        2,
        3,
        4,
    ]
    assert math.isnan(rows[1]["actor/loss"]) and not any(math.isnan(row["actor/loss"]) for row in (rows[0], rows[2]))
    for step in (1, 2, 3):
        policy = weights(tmp_path / f"run/global_step_{step}", tmp_path / f"hf{step}")
        assert all(tensor.isfinite().all() for tensor in policy.values())
    assert audit(read_ledger(str(tmp_path / "run" / FILE))).problems() == []


def test_with_the_policy_stop_a_run_ends_with_a_hint(tmp_path, tiny_qwen2, capsys):
    arguments = settings(tmp_path, tiny_qwen2, **spoilt(tmp_path, "number == 3", trainer__nonfinite="stop"))
    assert main_ppo.main(arguments) == 1
    errors = capsys.readouterr().err
    assert "step 2: the actor's loss is not finite (grad_norm nan) in 50% of its optimizer steps" in errors
    assert (
        "trainer.nonfinite=stop. Check critic/advantages/*" in errors
        and "lower actor_rollout_ref.actor.optim.lr" in errors
    )
    assert sorted(path.name for path in (tmp_path / "run").glob("global_step*")) == ["global_step_1"]


def test_after_a_rollback_a_run_ends_with_the_same_result(tmp_path, tiny_qwen2, caplog):
    whole = train(tmp_path / "whole", tiny_qwen2, **spoilt(tmp_path / "whole", "False"))
    back = train(
        tmp_path / "back", tiny_qwen2, **spoilt(tmp_path / "back", "number in (4, 7)", trainer__nonfinite="rollback")
    )
    # 10 prompts in batches of 4, 4, 2: 1 2 | 3, and 4 is spoilt: back to step 1 | 5 6 | 7 is spoilt: back to step 2 | 8
    rollbacks = [re.search(r"rolls back to \S+/global_step_(\d) \((\d of \d)", message) for message in caplog.messages]
    assert [found.groups() for found in rollbacks if found] == [("1", "1 of 3"), ("2", "1 of 3")]
    assert [row["step"] for row in back] == [1, 2, 3] and [row["actor/skipped"] for row in back] == [0, 0, 0]
    assert [row["actor/loss"] for row in back] == [row["actor/loss"] for row in whole]
    ends = [weights(tmp_path / name / "run/global_step_3", tmp_path / f"hf_{name}") for name in ("whole", "back")]
    assert largest_difference(*ends) == 0
    ledger = audit(read_ledger(str(tmp_path / "back/run" / FILE)))
    assert ledger.problems() == [] and sorted(ledger.steps) == [1, 2, 3]


def test_the_number_of_rollbacks_is_limited(tmp_path, tiny_qwen2, capsys):
    arguments = settings(tmp_path, tiny_qwen2, **spoilt(tmp_path, "number > 2", trainer__nonfinite="rollback"))
    assert main_ppo.main(arguments) == 1
    assert f"{MAX_ROLLBACKS} rollbacks to {tmp_path}/run/global_step_1" in capsys.readouterr().err
    assert (tmp_path / "calls").stat().st_size == 2 + 2 * (MAX_ROLLBACKS + 1)


def test_without_a_checkpoint_there_is_no_rollback(tmp_path, tiny_qwen2, capsys):
    arguments = settings(tmp_path, tiny_qwen2, **spoilt(tmp_path, "True", trainer__nonfinite="rollback"))
    assert main_ppo.main(arguments) == 1
    assert "roll back to yet; trainer.save_freq=N" in capsys.readouterr().err


def test_a_run_that_only_skips_ends(tmp_path, tiny_qwen2, capsys):
    changes = spoilt(tmp_path, "True", trainer__total_training_steps=20, trainer__save_freq=-1)
    assert main_ppo.main(settings(tmp_path, tiny_qwen2, **changes)) == 1
    assert f"{MAX_SKIPPED_STEPS} steps before: nothing is learnt" in capsys.readouterr().err
    assert len(metrics(tmp_path / "run")) == MAX_SKIPPED_STEPS == 9


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_two_ranks_skip_the_step_that_is_nonfinite_on_one(tmp_path, tiny_qwen2, ray_cluster):
    two = {"trainer__backend": "ray", "trainer__n_gpus_per_node": 2}
    rows = train(tmp_path / "ranks", tiny_qwen2, **spoilt(tmp_path / "ranks", "number == 3", **two))
    assert [row["actor/skipped"] for row in rows] == [0, 0.5, 0] and [row["actor/num_updates"] for row in rows] == [
        2,
        3,
        4,
    ]


def test_rewards_that_are_not_finite_are_left_out_of_training(tmp_path, tiny_qwen2):
    (tmp_path / "reward_nan.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    return {0: float('nan'), 1: float('inf')}.get(extra_info['index'] % 3, len(solution_str) % 3)\n"
    )
    changes = {
        "custom_reward_function__path": tmp_path / "reward_nan.py",
        "trainer__test_freq": -1,
        "trainer__val_before_train": False,
    }
    rows = train(tmp_path, tiny_qwen2, **changes)
    assert all(0 < row["reward/error_ratio"] < 1 and row["actor/skipped"] == 0 for row in rows)
    assert all(
        math.isfinite(row[name]) for row in rows for name in ("actor/loss", "actor/grad_norm", "critic/score/mean")
    )
    state = json.loads((tmp_path / "run/global_step_2/trainer.json").read_text())
    assert state["ledger"]["updates"] == {"actor": int(rows[-1]["actor/num_updates"])}
