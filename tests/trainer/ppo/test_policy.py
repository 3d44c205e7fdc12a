"""Pushes of a policy in one process: the generator decides when one takes effect, and serves other groups."""

import pytest
import torch

from hybridrl.config import PPOConfig, load_config
from hybridrl.errors import StaleWeightsError
from hybridrl.protocol import DataProto
from hybridrl.single_controller.local_worker_group import LocalWorkerGroup
from hybridrl.single_controller.ray_worker_group import RayClassWithInitArgs
from hybridrl.trainer.ppo.policy.policy_workers import PolicyWorkers
from hybridrl.trainer.ppo.policy.rollout_pipeline import BatchedGenerator, RolloutPipeline
from hybridrl.workers.actor_rollout_ref import ActorRolloutRefWorker
from tests.support.end_to_end.runs import settings


class QueueingGenerator(BatchedGenerator):
    """Lets its processes receive weights when `deliver` is called, as agent loops do between batches."""

    def __init__(self):
        super().__init__()
        self.pushes = []

    def push(self, version, receive):
        self.pushes.append((version, receive))
        return self

    def deliver(self):
        for _, receive in self.pushes:
            receive().wait()
        self.pushes = []

    wait = deliver


class RecordingWorker(ActorRolloutRefWorker):
    """Records what each push carried."""

    carried: list[str] = []

    def update_weights(self, version, adapters=False):
        self.carried.append("adapters" if adapters else "all")
        return super().update_weights(version, adapters)


@pytest.fixture
def config(tmp_path, tiny_qwen2):
    """Pushes carry adapters after the first one."""
    lora = {
        "actor_rollout_ref__model__lora_rank": 2,
        "actor_rollout_ref__rollout__weight_sync__lora": "adapter",
        "actor_rollout_ref__rollout__n": 2,
    }
    words = settings(tmp_path, tiny_qwen2, **lora)
    return load_config(PPOConfig, words, program="test", config_name="ppo_trainer")


@pytest.fixture
def group(config):
    """A hybrid policy."""
    made = LocalWorkerGroup(None, RayClassWithInitArgs(RecordingWorker, config, "actor_rollout"), role="actor_rollout")
    made.init_model(10)
    return made


def prompts() -> DataProto:
    ids = torch.arange(3, 3 + 2 * 6).reshape(2, 6)
    positions = torch.arange(6).expand(2, 6).contiguous()
    tensors = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "position_ids": positions}
    return DataProto.from_dict(tensors=tensors)


def versions(responses: DataProto) -> list[int]:
    return responses.batch["weights_version"].tolist()


def test_a_push_takes_effect_when_the_generator_lets_the_rollout_receive_it(group, config):
    generator = QueueingGenerator()
    pipeline = RolloutPipeline(PolicyWorkers({"actor_rollout": group}), config, generator)
    first = pipeline.push_weights(1, wait=False)
    assert group.rollout_health()[0].version is None and [version for version, _ in generator.pushes] == [1]
    first.wait()
    assert versions(pipeline.generate(prompts())) == [1, 1, 1, 1]
    pipeline.push_weights(2, wait=False)
    with pytest.raises(StaleWeightsError, match="version 1, and version 2 was pushed"):
        pipeline.generate(prompts())
    generator.deliver()
    assert versions(pipeline.generate(prompts())) == [2, 2, 2, 2]
    assert versions(generator.generate_on(group, prompts(), version=2)) == [2, 2, 2, 2]
    with pytest.raises(StaleWeightsError, match="version 2, and version 1 was pushed"):
        generator.generate_on(group, prompts(), version=1)


def test_a_push_after_a_reconnect_is_a_full_one(group, config):
    pipeline = RolloutPipeline(PolicyWorkers({"actor_rollout": group}), config)
    RecordingWorker.carried.clear()
    for version in (1, 2, 3):
        if version == 3:
            pipeline.disconnect("a process was lost")
            pipeline.reconnect()
        pipeline.push_weights(version)
    assert RecordingWorker.carried == ["all", "adapters", "all"]
