"""The queue of pending batches: a snapshot of it comes back here and in another driver."""

import pickle

import torch

from hybridrl.errors import WorkerLost
from hybridrl.protocol import DataProto
from hybridrl.trainer.ppo.policy.rollout_pipeline import RolloutPipeline


class Responses:
    """A future; `lost` makes it fail as a lost rollout process does."""

    def __init__(self, prompts: DataProto, version: int):
        self.prompts, self.version, self.lost = prompts, version, False

    def get(self) -> tuple[int, list[int]]:
        if self.lost:
            raise WorkerLost("rollout", 0, "generate_sequences", "killed by SIGKILL")
        return self.version, self.prompts.batch["input_ids"].flatten().tolist()

    def __reduce__(self):
        raise TypeError("a future belongs to one driver")


class Rollout:
    """Answers with its prompts and its version."""

    def __init__(self) -> None:
        self.version, self.answers = 0, []

    def generate_async(self, prompts: DataProto) -> Responses:
        self.answers.append(Responses(prompts, self.version))
        return self.answers[-1]


def pipeline_with(*batches: int) -> RolloutPipeline:
    pipeline = RolloutPipeline(Rollout(), lag=2, chunk_tokens=[4])
    for step in batches:
        prompts = DataProto.from_dict(tensors={"input_ids": torch.tensor([[step]])})
        pipeline.submit(prompts, DataProto.from_dict(tensors={"other": torch.tensor([step])}), number=step, epoch=0)
    return pipeline


def test_greedy_responses_are_submitted_with_their_batch_and_generated_again_with_it():
    pipeline = RolloutPipeline(Rollout(), lag=2, chunk_tokens=[2, 2])
    pipeline.policy.begin_partial_async = lambda prompts, max_new_tokens: pipeline.policy.generate_async(prompts)
    prompts, greedy = (DataProto.from_dict(tensors={"input_ids": torch.tensor([[x]])}) for x in (1, 2))
    pipeline.submit(
        prompts, DataProto.from_dict(tensors={"o": torch.tensor([0])}), number=1, epoch=0, greedy_prompts=greedy
    )
    [kept] = pipeline.state_dict()
    assert (kept.responses.get(), kept.greedy.get()) == ((0, [1]), (0, [2]))
    pipeline.policy.version, kept.greedy.lost = 7, True
    pipeline.regenerate_lost()
    [again] = pipeline.state_dict()
    assert (again.responses.get(), again.greedy.get()) == ((7, [1]), (7, [2]))
    [sent] = pickle.loads(pickle.dumps([again]))
    assert sent.responses is None is sent.greedy
    assert sent.greedy_prompts.batch["input_ids"].tolist() == [[2]]


def answers(pipeline: RolloutPipeline) -> list[tuple]:
    popped = [pipeline.pop() for _ in range(len(pipeline))]
    return [(batch.number, *responses) for batch, responses in popped]


def test_only_lost_responses_are_generated_again_with_the_present_weights():
    pipeline = pipeline_with(1, 2)
    snapshot = pipeline.state_dict()
    pipeline.pop()
    pipeline.policy.answers[0].lost, pipeline.policy.version = True, 7
    pipeline.load_state_dict(snapshot)
    pipeline.regenerate_lost()
    assert answers(pipeline) == [(1, 7, [1]), (2, 0, [2])]


def test_another_driver_generates_all_pending_responses_again():
    sent = pickle.dumps(pipeline_with(1, 2).state_dict())  # the futures themselves cannot be sent
    pipeline = pipeline_with(5)
    pipeline.policy.version = 3
    pipeline.load_state_dict(pickle.loads(sent))
    pipeline.regenerate_lost()
    assert answers(pipeline) == [(1, 3, [1]), (2, 3, [2])]
