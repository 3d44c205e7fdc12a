"""The queue of pending batches: its state has the tokens that were sampled from weights which a later driver lacks."""

import pickle
from types import SimpleNamespace

import pytest
import torch

from hybridrl.config import PPOConfig, load_config
from hybridrl.data_plane.meta_info import CHOSEN_GROUPS
from hybridrl.errors import CheckpointError, StaleWeightsError
from hybridrl.protocol import DataProto
from hybridrl.trainer.ppo.policy.policy_workers import PolicyWorkers
from hybridrl.trainer.ppo.policy.rollout_pipeline import RolloutPipeline


class Responses:
    """A future that no other driver can have."""

    def __init__(self, prompts: DataProto, version: int | None, num_prompts: int | None = None):
        self.prompts, self.version, self.num_prompts = prompts, version, num_prompts

    def get(self) -> DataProto:
        tokens, chosen = self.prompts.batch["input_ids"], self.num_prompts
        meta_info = {} if chosen is None else {CHOSEN_GROUPS: list(range(len(tokens)))[-chosen:]}
        tokens = tokens if chosen is None else tokens[-chosen:]
        versions = torch.full_like(tokens, self.version or 0)
        return DataProto.from_dict(tensors={"responses": tokens, "versions": versions}, meta_info=meta_info)

    def __reduce__(self):
        raise TypeError("a future belongs to one driver")


class Generator:
    """Answers with its prompts and the version that it is asked for."""

    metrics: dict[str, float] = {}
    reads_other_columns = False

    def __init__(self) -> None:
        self.unverified = False

    def open(self, group, *, resync, concurrent) -> None:
        pass

    def submit(self, prompts, *, version, max_new_tokens=None, num_prompts=None) -> Responses:
        return Responses(prompts, version, num_prompts)

    def push(self, version, receive) -> "Generator":
        return self

    def wait(self) -> None:
        if self.unverified:
            raise StaleWeightsError("rollout process 0 holds version 0")


def pipeline_with(*words: str) -> RolloutPipeline:
    settings = ["data.max_response_length=4", "actor_rollout_ref.rollout.n=1", *words]
    config = load_config(PPOConfig, settings, program="p", config_name="ppo_trainer")
    workers = PolicyWorkers({"actor_rollout": SimpleNamespace()})
    return RolloutPipeline(workers, config, Generator())


def submit(pipeline: RolloutPipeline, number: int, **meta_info) -> None:
    ids = torch.tensor([[number], [-number]])
    names = ("input_ids", "attention_mask", "position_ids")
    tensors = dict.fromkeys(names, ids) | {"seeds": ids[:, 0], "other": ids[:, 0]}
    pipeline.submit(DataProto.from_dict(tensors=tensors, meta_info={"number": number, "epoch": 0} | meta_info))


def drained(pipeline: RolloutPipeline) -> list[tuple]:
    popped = [pipeline.pop().samples.batch for _ in range(len(pipeline))]
    return [(int(columns["other"][0]), *columns["versions"].flatten().tolist()) for columns in popped]


def test_another_driver_gets_the_tokens_of_the_weights_they_were_sampled_from():
    pipeline = pipeline_with("trainer.lag=2")
    submit(pipeline, 1)
    pipeline.push_weights(1, wait=False)
    submit(pipeline, 2)
    pipeline.push_weights(2, wait=False)
    state = pickle.dumps(pipeline.state_dict())

    other = pipeline_with("trainer.lag=2")
    submit(other, 5)
    other.push_weights(7, wait=False)
    other.load_state_dict(pickle.loads(state))
    assert drained(other) == [(1, 0, 0), (2, 1, 1)]


def test_a_state_can_be_loaded_twice():
    pipeline = pipeline_with("trainer.lag=2")
    submit(pipeline, 1)
    state = pipeline.state_dict()
    for _ in range(2):
        pipeline.load_state_dict(state)
        assert drained(pipeline) == [(1, 0, 0)]


def test_chunks_and_greedy_responses_are_part_of_the_state():
    pipeline = pipeline_with("trainer.lag=2", "trainer.partial_rollout=true", "algorithm.adv_estimator=remax")
    assert pipeline.chunk_tokens == [2, 2]
    submit(pipeline, 1)
    [kept] = pickle.loads(pickle.dumps(pipeline.state_dict()))
    assert kept.num_chunks == 1
    assert kept.responses.get().batch["responses"].tolist() == [[1], [-1]]
    assert kept.greedy.get().batch["responses"].tolist() == [[1], [-1]]


def test_the_state_has_no_tokens_of_weights_that_were_not_verified():
    pipeline = pipeline_with("trainer.lag=1")
    pipeline.push_weights(1, wait=False)
    submit(pipeline, 1)
    pipeline.generator.unverified = True
    with pytest.raises(StaleWeightsError):
        pipeline.state_dict()


def test_a_short_round_returns_the_prompts_that_it_answers():
    pipeline = pipeline_with()
    submit(pipeline, 3, num_prompts=1)
    generated = pipeline.pop()
    assert (generated.chosen, generated.prompts.batch["other"].tolist()) == ([1], [-3])
    assert generated.samples.batch["responses"].tolist() == [[-3]]


def test_parts_of_responses_from_batched_calls_are_refused(tmp_path):
    words = ("trainer.lag=2", "trainer.partial_rollout=true")
    pipeline = pipeline_with(*words)
    submit(pipeline, 1)
    state = pipeline.save(str(tmp_path))  # with the column `responses`, which parts of agent loops do not have
    with pytest.raises(CheckpointError, match="parts of responses from actor_rollout_ref.rollout.mode=sync.*export"):
        pipeline_with(*words).load(str(tmp_path), state)


def test_a_resumed_run_with_other_parts_is_refused_or_knows_how_far_responses_are(tmp_path):
    partial = ("trainer.lag=2", "trainer.partial_rollout=true")
    whole, halves = pipeline_with("trainer.lag=2"), pipeline_with(*partial)
    for pipeline in (whole, halves):
        submit(pipeline, 1)
        pipeline.path = str(tmp_path / f"{len(pipeline.chunk_tokens)}")
        pipeline.stored = pipeline.save(pipeline.path)
    resumed = pipeline_with(*partial)
    resumed.load(whole.path, whole.stored)
    assert drained(resumed) == [(1, 0, 0)]  # nothing is generated again
    for words in (("trainer.lag=2",), (*partial, "data.max_response_length=6")):
        with pytest.raises(CheckpointError, match="2 of 4 tokens are generated, in parts of 2"):
            pipeline_with(*words).load(halves.path, halves.stored)
    assert pipeline_with("trainer.lag=4", "trainer.partial_rollout=true")._chunks_of("", 1, [2, 2]) == 2
