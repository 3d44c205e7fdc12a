"""`hybridrl replay`: steps that a run has kept, again in one process."""

import re
import subprocess
import sys

import pytest

from hybridrl import cli, main_ppo
from hybridrl.algos.policy_losses import POLICY_LOSSES
from hybridrl.errors import StorageError
from hybridrl.trainer.checkpoint.store import CheckpointStore
from tests.support.end_to_end.runs import settings, train, write_prompts

# All samples of prompt 13 have the same score, so the loss divides their advantages by 0. Those of prompt 12 have not.
REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    index = extra_info["index"]
    return 0.5 if index == 13 else sum(map(ord, solution_str)) % 997 / 997 + 100 * (index >= 22)
"""
LOSS = """
from hybridrl.algos import register_policy_loss
from hybridrl.algos.policy_losses import vanilla

@register_policy_loss("scaled {name}")
def scaled(log_probs, old_log_probs, advantages, response_mask, **settings):
    return vanilla(log_probs, old_log_probs, advantages / advantages.abs().max(), response_mask, **settings)
"""


@pytest.fixture(autouse=True)
def losses_as_they_were():
    before = dict(POLICY_LOSSES)
    yield
    POLICY_LOSSES.clear()
    POLICY_LOSSES.update(before)


def spoilt(folder, **changes) -> dict:
    """Return settings of a run of 2 prompts a step, in order.

    12 and 13 are in step 7, 22 and 23 in step 12.
    """
    folder.mkdir(exist_ok=True)
    (folder / "own.py").write_text(REWARD)
    (folder / "loss.py").write_text(LOSS.replace("{name}", folder.name))
    return {
        "algorithm__path": folder / "loss.py",
        "actor_rollout_ref__actor__policy_loss__loss_mode": f"scaled {folder.name}",
        "actor_rollout_ref__actor__grad_clip": 1000,
        "actor_rollout_ref__actor__ppo_mini_batch_size": 1,
        "custom_reward_function__path": folder / "own.py",
        "data__train_files": write_prompts(folder / "24.parquet", 24),
        "data__train_batch_size": 2,
        "data__shuffle": False,
        "trainer__save_freq": -1,
        "trainer__test_freq": -1,
        "trainer__val_before_train": False,
    } | changes


def replayed(run, step: int, capsys, *options: str) -> str:
    capsys.readouterr()
    assert cli.main(["replay", str(run), str(step), "--trust-remote-code", *options]) == 0
    return capsys.readouterr().out


def check_is_bit_equal(report: str) -> None:
    stages = re.findall(r"^(\w+): bit-equal", report, re.M)
    assert stages == ["next_batch", "gen", "reward", "old_log_prob", "adv"], report
    assert "weights of actor: bit-equal" in report, report
    others = [line for line in report.splitlines()[1:] if ": bit-equal" not in line and "metrics" not in line]
    assert not [line for line in others if "NaN" not in line and "is nan" not in line], report


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory, tiny_qwen2):
    """A run of 12 steps in one process, with the settings of `trainer.record_steps` for all of its kinds."""
    folder = tmp_path_factory.mktemp("one")
    kinds = {"trainer__record_steps": "[first,3,nonfinite,spike]"}
    train(folder, tiny_qwen2, **spoilt(folder, trainer__total_training_steps=12, **kinds))
    return folder / "run"


def test_a_run_keeps_the_steps_that_it_is_told_to_and_those_with_a_nan_or_a_spike(one_rank):
    assert CheckpointStore(str(one_rank / "recorded")).steps() == [1, 3, 7, 12]


def test_a_step_of_one_process_is_repeated_bit_for_bit(one_rank, capsys):
    check_is_bit_equal(replayed(one_rank, 3, capsys))


def test_the_stage_with_the_first_nan_is_named(one_rank, capsys):
    report = replayed(one_rank, 7, capsys, "--stage", "update_actor")
    assert "update_actor: rank 0, micro-batch 1 of 1: actor/pg_loss is nan" in report
    assert "the first NaN is written by update_actor" in report
    assert "old_log_prob" not in report


def test_a_commit_that_fails_after_the_end_of_its_step_keeps_nothing(tmp_path, tiny_qwen2, monkeypatch, caplog, capsys):
    def fail(store: CheckpointStore, step: int, *_: object, **__: object) -> str:
        raise StorageError("the disk is gone")

    monkeypatch.setattr(CheckpointStore, "commit", fail)
    run = spoilt(tmp_path / "run", trainer__record_steps="[refused]", trainer__save_freq=2)
    assert main_ppo.main(settings(tmp_path, tiny_qwen2, **run, trainer__total_training_steps=2)) == 1
    assert "the disk is gone" in capsys.readouterr().err and "is not kept" not in caplog.text


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_debugger_stops_before_each_stage_and_goes_on(one_rank):
    command = [sys.executable, "-m", "hybridrl.cli", "replay", str(one_rank), "3", "--trust-remote-code", "--pdb"]
    typed = "c\np name, len(ctx.batch)\n" + "c\n" * 20
    done = subprocess.run(command, input=typed, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    stops = re.findall(r"> \S*/(\w+).py\(\d+\)(\w+)\(\)", done.stdout)
    assert stops.count(("replay", "repeated")) == 4 and ("ranks", "_each_rank") in stops, done.stdout
    assert "('reward', 6)" in done.stdout, done.stdout
    assert done.stdout.count(": bit-equal (") == 6, done.stdout


def test_what_cannot_be_repeated_is_refused_with_a_reason(one_rank, capsys):
    for words, reason in (
        (["2", "--trust-remote-code"], "step 2 is not among the kept steps (it has kept 1, 3, 7, 12)"),
        (["3"], "names Python code (algorithm.path="),
        (["3", "--stage", "advantage"], "--stage advantage: the step has next_batch, gen, "),
        (["3", "--rank", "1"], "--rank 1: the run had ranks 0 to 0"),
        (["3", "data.train_file=x"], "data.train_file"),
    ):
        assert cli.main(["replay", str(one_rank), *words]) > 0
        assert reason in capsys.readouterr().err


def test_a_step_that_a_check_refuses_is_kept_and_one_over_the_limit_is_not(tmp_path, tiny_qwen2, caplog):
    stop = {"trainer__record_steps": "[refused]", "trainer__nonfinite": "stop", "trainer__total_training_steps": 8}
    for name, limit in (("kept", 1), ("full", 0)):
        arguments = settings(tmp_path, tiny_qwen2, **spoilt(tmp_path / name, trainer__record_max_gb=limit, **stop))
        arguments += [f"trainer.default_local_dir={tmp_path / name / 'run'}"]
        assert main_ppo.main(arguments) == 1
    assert CheckpointStore(str(tmp_path / "kept/run/recorded")).steps() == [7]
    assert not (tmp_path / "full/run/recorded").exists()
    assert (
        "step 7 is not kept for hybridrl replay (refused)" in caplog.text
        and "trainer.record_max_gb is 0" in caplog.text
    )


@pytest.mark.slow
def test_a_nan_of_two_ranks_is_found_on_one_process_and_every_stage_has_the_same_bits(
    tmp_path, tiny_qwen2, ray_cluster, capsys
):
    two = {"trainer__backend": "ray", "trainer__n_gpus_per_node": 2, "trainer__total_training_steps": 7}
    two |= {"trainer__record_steps": "[2,nonfinite]", "actor_rollout_ref__actor__calculate_old_log_probs": True}
    train(tmp_path, tiny_qwen2, **spoilt(tmp_path / "own", **two))
    check_is_bit_equal(replayed(tmp_path / "run", 2, capsys))
    report = replayed(tmp_path / "run", 7, capsys)
    check_is_bit_equal(report)
    found = re.findall(r"update_actor: rank (\d), micro-batch 1 of 1: actor/pg_loss is nan", report)
    assert found == ["0", "1"], report
    assert "the first NaN is written by update_actor" in report
