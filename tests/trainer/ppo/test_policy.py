"""The policy's groups in one process: the generator decides when a push takes effect, and serves other groups."""

import pytest
import torch

from hybridrl.config import PPOConfig, load_config
from hybridrl.config.schema.workers import WeightSyncConfig
from hybridrl.errors import StaleWeightsError
from hybridrl.protocol import DataProto
from hybridrl.single_controller.local_worker_group import LocalWorkerGroup
from hybridrl.single_controller.ray_worker_group import RayClassWithInitArgs
from hybridrl.trainer.ppo.policy.generation import BatchedGenerator
from hybridrl.trainer.ppo.policy.groups import PolicyGroups
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
def group(tmp_path, tiny_qwen2):
    """A hybrid policy whose pushes carry adapters after the first one."""
    lora = {
        "actor_rollout_ref__model__lora_rank": 2,
        "actor_rollout_ref__rollout__weight_sync__lora": "adapter",
        "actor_rollout_ref__rollout__n": 2,
    }
    words = settings(tmp_path, tiny_qwen2, **lora)
    config = load_config(PPOConfig, words, program="test", config_name="ppo_trainer")
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


def test_a_push_takes_effect_when_the_generator_lets_the_rollout_receive_it(group):
    generator = QueueingGenerator()
    policy = PolicyGroups({"actor_rollout": group}, generator=generator)
    first = policy.push_weights_async(1)
    assert group.rollout_health()[0].version is None and [version for version, _ in generator.pushes] == [1]
    first.wait()
    assert versions(policy.generate(prompts())) == [1, 1, 1, 1]
    policy.push_weights_async(2)
    with pytest.raises(StaleWeightsError, match="version 1, and version 2 was pushed"):
        policy.generate(prompts())
    generator.deliver()
    assert versions(policy.generate_async(prompts()).get()) == [2, 2, 2, 2]
    assert versions(generator.generate_on(group, prompts(), version=2)) == [2, 2, 2, 2]
    with pytest.raises(StaleWeightsError, match="version 2, and version 1 was pushed"):
        generator.generate_on(group, prompts(), version=1)


def test_a_push_after_a_reconnect_is_a_full_one(group):
    policy = PolicyGroups({"actor_rollout": group}, weight_sync=WeightSyncConfig(lora="adapter"))
    RecordingWorker.carried.clear()
    for version in (1, 2, 3):
        if version == 3:
            policy.disconnect("a process was lost")
            policy.reconnect()
        policy.push_weights(version)
    assert RecordingWorker.carried == ["all", "adapters", "all"]
