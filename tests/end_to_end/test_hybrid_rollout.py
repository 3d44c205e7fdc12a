"""`trainer.hybrid_rollout`: the trainer's processes generate while the trainer waits, and the run stays the same.

One process generates, two train. Responses are so long that the trainer waits for them.
"""

import os
import signal
import threading
import time
from pathlib import Path
from typing import ClassVar

import pytest
import torch

from hybridrl import main_ppo
from hybridrl.trainer.checkpoint.ledger_audit import audit
from hybridrl.trainer.checkpoint.step_ledger import read_ledger
from hybridrl.trainer.ppo.trainer import RayPPOTrainer
from hybridrl.view.readers.failures import recoveries
from tests.support.end_to_end.runs import largest_difference, metrics, settings, weights

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
TESTS = Path(__file__).parents[1]
ROLLOUT = "actor_rollout_ref__rollout__"
LENGTH = 300
WAITING = {
    "trainer__backend": "ray",
    "trainer__n_gpus_per_node": 2,
    "trainer__lag": 1,
    "trainer__total_training_steps": 3,
    "trainer__save_freq": 1,
    "trainer__test_freq": -1,
    "trainer__val_before_train": "false",
    f"{ROLLOUT}n_gpus_per_node": 1,
    f"{ROLLOUT}mode": "async",
    f"{ROLLOUT}ignore_eos": True,
    "data__max_response_length": LENGTH,
}
ON = {"trainer__hybrid_rollout": True}
TWO_RANKS = {f"{ROLLOUT}tensor_model_parallel_size": 2, f"{ROLLOUT}n_gpus_per_node": 2}
PAIRED = TWO_RANKS | {f"{ROLLOUT}name": f"{TESTS / 'support/third_party/paired_rollout.py'}:PairedRollout"}
VLLM = {f"{ROLLOUT}name": "vllm", f"{ROLLOUT}kv_cache_memory_mb": 64, f"{ROLLOUT}dtype": "float32"}
SHARE, WAIT = "async/hybrid_token_share", "async/wait_s"


class RecordingTrainer(RayPPOTrainer):
    """Writes what it trains on, and whether the hybrid rollouts are awake while it trains."""

    def update_actor(self, ctx):
        columns = ctx.batch.batch
        names = ("responses", "rollout_log_probs", "weights_version", "token_versions")
        found = {name: columns[name].clone() for name in names if name in columns.keys()}
        if self.policy.hybrid is not None:
            found["health"] = self.policy.hybrid.rollout_health()
        torch.save(found, Path(self.config.trainer.default_local_dir).parent / f"step_{self.global_steps}.pt")
        super().update_actor(ctx)


def run(folder: Path, model: Path, *, trainer_cls: type = RecordingTrainer, **changes: object) -> list[dict]:
    folder.mkdir()
    chosen = WAITING | {f"{ROLLOUT}calculate_log_probs": True} | changes
    assert main_ppo.main(settings(folder, model, **chosen), trainer_cls=trainer_cls) == 0
    return metrics(folder / "run")


def trained_on(folder: Path, step: int) -> dict[str, torch.Tensor]:
    return torch.load(folder / f"step_{step}.pt", weights_only=False)


def policy(folder: Path, step: int) -> dict[str, torch.Tensor]:
    return weights(folder / f"run/global_step_{step}", folder / f"hf_{step}")


def test_the_run_is_the_same_with_a_hybrid_rollout_and_a_resumed_one_continues_with_it(
    tmp_path, tiny_qwen2, ray_cluster
):
    off, on = run(tmp_path / "off", tiny_qwen2), run(tmp_path / "on", tiny_qwen2, **ON)
    shares = [row[SHARE] for row in on]
    assert max(shares) > 0.1 and max(shares) < 0.9, shares
    assert all(row[WAIT] > 0 for row in on) and not any(SHARE in row or WAIT in row for row in off)
    for step in (1, 2, 3):
        without, lent = (trained_on(tmp_path / name, step) for name in ("off", "on"))
        assert torch.equal(without["responses"], lent["responses"])
        assert torch.equal(without["weights_version"], lent["weights_version"])
        assert set(lent["weights_version"].tolist()) == {max(0, step - 2)}
        torch.testing.assert_close(without["rollout_log_probs"], lent["rollout_log_probs"], atol=1e-5, rtol=0)
    trained = policy(tmp_path / "on", 3)
    assert largest_difference(policy(tmp_path / "off", 3), trained) == 0
    again = run(
        tmp_path / "again",
        tiny_qwen2,
        **ON,
        trainer__resume_mode="resume_path",
        trainer__resume_from_path=tmp_path / "on/run/global_step_1",
    )
    assert len(again) == 2
    assert torch.equal(trained_on(tmp_path / "again", 3)["responses"], trained_on(tmp_path / "on", 3)["responses"])
    assert largest_difference(policy(tmp_path / "again", 3), trained) == 0


def test_each_part_of_a_partial_rollout_has_the_weights_of_its_step(tmp_path, tiny_qwen2, ray_cluster):
    partial = {"trainer__lag": 2, "trainer__partial_rollout": True, "trainer__total_training_steps": 4}
    run(tmp_path / "off", tiny_qwen2, **partial)
    on = run(tmp_path / "on", tiny_qwen2, **partial, **ON)
    assert max(row[SHARE] for row in on) > 0.1
    for step in range(1, 5):
        without, lent = (trained_on(tmp_path / name, step) for name in ("off", "on"))
        assert torch.equal(without["responses"], lent["responses"])
        assert torch.equal(without["token_versions"], lent["token_versions"])
    versions = trained_on(tmp_path / "on", 4)["token_versions"]
    assert versions.unique().tolist() == [1, 2] and (versions[:, : LENGTH // 2] == 1).all()
    assert largest_difference(policy(tmp_path / "off", 4), policy(tmp_path / "on", 4)) == 0


class KillingTrainer(RecordingTrainer):
    """Kills a hybrid process when it has requests, and an own one of the rollout later."""

    killed: ClassVar[list[str]] = []

    def generate(self, ctx):
        step, table = self.global_steps, self.generator._service.router.table
        num_peers = self.config.actor_rollout_ref.rollout.tensor_model_parallel_size
        hybrid = (self.groups["rollout"].world_size + 1) // num_peers  # the replica of the second process that trains
        victim = {1: ("actor_rollout", 1, hybrid), 2: ("rollout", 0, 0)}.get(step)
        if victim is not None and f"{step}" not in self.killed:
            self.killed.append(f"{step}")
            threading.Thread(target=self._kill_when_loaded, args=(*victim, table), daemon=True).start()
        super().generate(ctx)

    def _kill_when_loaded(self, role, rank, replica, table):
        process_id, until = self.groups[role].process_ids[rank], time.monotonic() + 300
        while not table.load(replica) and time.monotonic() < until:
            time.sleep(0.001)
        os.kill(process_id, signal.SIGKILL)


@pytest.mark.parametrize("replicas", [{}, PAIRED], ids=["one process per replica", "two processes per replica"])
def test_losing_a_hybrid_process_while_it_generates_does_not_change_the_result(
    tmp_path, tiny_qwen2, ray_cluster, replicas
):
    KillingTrainer.killed.clear()
    run(tmp_path / "well", tiny_qwen2)
    rows = run(tmp_path / "hit", tiny_qwen2, trainer_cls=KillingTrainer, **ON, **replicas)
    lost = [one["lost"] for one in recoveries(str(tmp_path / "hit/run"))]
    assert lost == [["actor_rollout-1"]] and KillingTrainer.killed == ["1", "2"]
    assert max(row[SHARE] for row in rows) > 0
    assert not audit(read_ledger(str(tmp_path / "hit/run/ledger.jsonl"))).problems()
    assert largest_difference(policy(tmp_path / "well", 3), policy(tmp_path / "hit", 3)) == 0


@pytest.mark.vllm
def test_the_memory_of_a_hybrid_vllm_rollout_is_released_while_the_trainer_trains(tmp_path, tiny_qwen2, ray_cluster):
    on = run(tmp_path / "on", tiny_qwen2, **ON, **VLLM, trainer__n_gpus_per_node=1)
    assert max(row[SHARE] for row in on) > 0.1
    assert [[health.awake for health in trained_on(tmp_path / "on", step)["health"]] for step in (1, 2, 3)] == [
        [False]
    ] * 3


@pytest.mark.vllm
def test_engines_of_two_processes_on_both_sides_return_the_tokens_of_a_run_without_a_hybrid_rollout(
    tmp_path, tiny_qwen2, ray_cluster
):
    engines = VLLM | TWO_RANKS
    off, on = run(tmp_path / "off", tiny_qwen2, **engines), run(tmp_path / "on", tiny_qwen2, **engines, **ON)
    assert len(off) == len(on) == 3 and max(row[SHARE] for row in on) > 0.1
    for step in (1, 2, 3):
        without, lent = (trained_on(tmp_path / name, step) for name in ("off", "on"))
        assert torch.equal(without["responses"], lent["responses"])
        assert torch.equal(without["weights_version"], lent["weights_version"])
        assert [health.awake for health in lent["health"]] == [False, False]
        torch.testing.assert_close(without["rollout_log_probs"], lent["rollout_log_probs"], atol=1e-5, rtol=0)
    assert largest_difference(policy(tmp_path / "off", 3), policy(tmp_path / "on", 3)) == 0
