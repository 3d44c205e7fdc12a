"""A rollout on the actor's device sleeps from its start to the first push, and while the actor trains.

With GPU_TESTS_ON=cpu the `hf` rollout has no memory to release and stays awake.
"""

import pytest

from hybridrl.config import PPOConfig, load_config
from hybridrl.single_controller.local_worker_group import LocalWorkerGroup
from hybridrl.single_controller.ray_worker_group import RayClassWithInitArgs
from hybridrl.trainer.ppo.policy.policy_workers import PolicyWorkers
from hybridrl.trainer.ppo.policy.rollout_pipeline import RolloutPipeline
from hybridrl.workers.actor_rollout_ref import ActorRolloutRefWorker
from tests.support.end_to_end.runs import settings, train

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]


def test_a_rollout_is_awake_only_between_a_push_and_the_training_that_follows(tmp_path, tiny_qwen2, device, caplog):
    overrides = settings(tmp_path, tiny_qwen2, trainer__device=device)
    config = load_config(PPOConfig, overrides, program="memory", config_name="ppo_trainer")
    group = LocalWorkerGroup(
        None, RayClassWithInitArgs(ActorRolloutRefWorker, config, "actor_rollout"), role="actor_rollout"
    )
    group.init_model(10)
    on_cpu = device == "cpu"
    policy = PolicyWorkers({"actor_rollout": group}, sleep=not on_cpu)
    pipeline = RolloutPipeline(policy, config)
    awake = [group.rollout_health()[0].awake]
    pipeline.push_weights(1)
    awake.append(group.rollout_health()[0].awake)
    policy.sleep_rollout()
    awake.append(group.rollout_health()[0].awake)
    pipeline.push_weights(2)
    awake.append(group.rollout_health()[0].awake)
    assert awake == [on_cpu, True, on_cpu, True]
    assert "sleep() freed" not in caplog.text


def test_a_run_in_one_process_puts_its_rollout_to_sleep(tmp_path, tiny_qwen2, device, monkeypatch):
    """The worker is real; only its calls are recorded."""
    awake_before_sleep, sleep = [], ActorRolloutRefWorker.rollout_sleep

    def recorded(worker):
        awake_before_sleep.append(worker.rollout.health().awake)
        return sleep(worker)

    monkeypatch.setattr(ActorRolloutRefWorker, "rollout_sleep", recorded)
    train(tmp_path, tiny_qwen2, trainer__device=device, trainer__total_training_steps=2)
    # Before each of two updates, and after validation before and after them.
    assert awake_before_sleep == ([] if device == "cpu" else [True] * 4)
