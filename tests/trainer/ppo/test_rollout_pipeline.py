"""The queue of pending batches: its state has the tokens that were sampled from weights which a later driver lacks."""

import pickle
from types import SimpleNamespace

import pytest
import torch

from hybridrl.errors import StaleWeightsError
from hybridrl.protocol import DataProto
from hybridrl.trainer.ppo.policy.rollout_pipeline import RolloutPipeline


class Responses:
    """A future that no other driver can have."""

    def __init__(self, prompts: DataProto, version: int):
        self.prompts, self.version = prompts, version

    def get(self) -> DataProto:
        tokens = self.prompts.batch["input_ids"]
        return DataProto.from_dict(tensors={"responses": tokens, "versions": torch.full_like(tokens, self.version)})

    def __reduce__(self):
        raise TypeError("a future belongs to one driver")


class Rollout:
    """Answers with its prompts and the version that it had when it was asked, in two processes."""

    rollout = SimpleNamespace(world_size=2)

    def __init__(self) -> None:
        self.version, self.unverified = 0, False

    def generate_async(self, prompts: DataProto) -> Responses:
        return Responses(prompts, self.version)

    def begin_partial_async(self, prompts: DataProto, max_new_tokens: int) -> Responses:
        return Responses(prompts, self.version)

    def push_weights_async(self, version: int) -> "Rollout":
        self.version = version
        return self

    def wait(self) -> None:
        if self.unverified:
            raise StaleWeightsError("rollout process 0 holds version 0")


def submit(pipeline: RolloutPipeline, number: int, **more) -> None:
    prompts = DataProto.from_dict(tensors={"input_ids": torch.tensor([[number], [-number]])})
    other_columns = DataProto.from_dict(tensors={"other": torch.tensor([number, -number])})
    pipeline.submit(prompts, other_columns, number=number, epoch=0, **more)


def drained(pipeline: RolloutPipeline) -> list[tuple]:
    popped = [pipeline.pop() for _ in range(len(pipeline))]
    return [(batch.number, *responses.batch["versions"].flatten().tolist()) for batch, responses, _ in popped]


def test_another_driver_gets_the_tokens_of_the_weights_they_were_sampled_from():
    pipeline = RolloutPipeline(Rollout(), lag=2, chunk_tokens=[4])
    submit(pipeline, 1)
    pipeline.push_weights(1)
    submit(pipeline, 2)
    pipeline.push_weights(2)
    state = pickle.dumps(pipeline.state_dict())

    other = RolloutPipeline(Rollout(), lag=2, chunk_tokens=[4])
    submit(other, 5)
    other.push_weights(7)
    other.load_state_dict(pickle.loads(state))
    assert drained(other) == [(1, 0, 0), (2, 1, 1)]


def test_a_state_can_be_loaded_twice():
    pipeline = RolloutPipeline(Rollout(), lag=2, chunk_tokens=[4])
    submit(pipeline, 1)
    state = pipeline.state_dict()
    for _ in range(2):
        pipeline.load_state_dict(state)
        assert drained(pipeline) == [(1, 0, 0)]


def test_chunks_and_greedy_responses_are_part_of_the_state():
    pipeline = RolloutPipeline(Rollout(), lag=2, chunk_tokens=[2, 2])
    greedy = DataProto.from_dict(tensors={"input_ids": torch.tensor([[8], [9]])})
    submit(pipeline, 1, greedy_prompts=greedy)
    [kept] = pickle.loads(pickle.dumps(pipeline.state_dict()))
    assert kept.num_chunks == 1 and len(kept.responses.futures) == 2  # one shard for each process that continues them
    assert kept.responses.get().batch["responses"].tolist() == [[1], [-1]]
    assert kept.greedy.get().batch["responses"].tolist() == [[8], [9]]


def test_the_state_has_no_tokens_of_weights_that_were_not_verified():
    pipeline = RolloutPipeline(Rollout(), lag=1, chunk_tokens=[4])
    pipeline.push_weights(1)
    submit(pipeline, 1)
    pipeline.policy.unverified = True
    with pytest.raises(StaleWeightsError):
        pipeline.state_dict()
