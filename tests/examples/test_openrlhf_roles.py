"""examples/openrlhf_ppo with all of its roles in this process: the same code, without Ray and without a job."""

from concurrent.futures import Future

import pytest
import torch
import torch.distributed as dist

from examples.openrlhf_ppo import (
    common,
    main,
    ppo_actor,
    ppo_critic,
    ppo_reference,
    ppo_reward,
    ppo_rollout,
    remote_call,
)
from examples.openrlhf_ppo.utils.experience_maker import ExperienceMaker
from hybridrl.errors import StaleWeightsError
from hybridrl.sdk import FutureSequence, RLRoleType
from hybridrl.single_controller.invocation import endpoints_of


class LocalRole:
    """Calls the one process of a role, which is an object here."""

    def __init__(self, worker):
        self.worker = worker

    def call(self, stub, *args):
        future = Future()
        future.set_result([self._run(stub, *args)])
        return future

    def call_batch(self, stub, size, *args):
        assert all(len(argument) == size for argument in args if isinstance(argument, list))
        return FutureSequence.of(self._run(stub, *args))

    def _run(self, stub, *args):
        attribute, _ = endpoints_of(type(self.worker))[stub.__name__]
        return getattr(self.worker, attribute)(*args)


@pytest.fixture
def roles(tmp_path, monkeypatch):
    for name, value in {"RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 0}.items():
        monkeypatch.setenv(name, str(value))
    args = vars(main.parse_args(["--save_path", str(tmp_path)]))
    found = {
        RLRoleType.ACTOR: LocalRole(ppo_actor.PolicyModelActor(args)),
        RLRoleType.CRITIC: LocalRole(ppo_critic.CriticModelRayActor(args)),
        RLRoleType.ROLLOUT: LocalRole(ppo_rollout.VLLMActor(args)),
        RLRoleType.REWARD: LocalRole(ppo_reward.RewardModelRayActor(args)),
        RLRoleType.REFERENCE: LocalRole(ppo_reference.PPOReferenceActor(args)),
    }
    monkeypatch.setattr(remote_call, "group", found.get)
    remote_call.init_all()
    yield args, {str(role).lower(): local.worker for role, local in found.items()}
    dist.destroy_process_group()


def push(workers, version):
    workers["rollout"].llm.load_weights(version, workers["actor"].learner.model.named_parameters())


def train(args, workers, steps):
    maker, scores = ExperienceMaker(args), []
    for step in steps:
        push(workers, step - 1)
        experiences, metrics = maker.make_experience(step)
        remote_call.append_experience(experiences)
        remote_call.wait_for(remote_call.actor_update(), remote_call.critic_update())
        scores.append(metrics["score"])
    return scores


def test_the_policy_learns_to_repeat_digits(roles):
    scores = train(*roles, range(1, 13))
    assert scores[0] < 0.15 and sum(scores[-3:]) / 3 > 0.2


def test_a_checkpoint_brings_back_weights_optimizer_and_count(roles, tmp_path):
    args, workers = roles
    train(args, workers, [1])
    remote_call.save_checkpoint(str(tmp_path / "one"))
    first = train(args, workers, [2, 3])
    ends = {role: workers[role].learner.model.state_dict() for role in ("actor", "critic")}
    ends = {role: {name: tensor.clone() for name, tensor in end.items()} for role, end in ends.items()}
    remote_call.load_checkpoint(str(tmp_path / "one"))
    assert workers["actor"].learner.num_updates == 16  # 2 epochs of 8 mini-batches
    assert train(args, workers, [2, 3]) == first and workers["critic"].learner.num_updates == 48
    for role, end in ends.items():
        now = workers[role].learner.model.state_dict()
        assert all(torch.equal(end[name], now[name]) for name in end)


def test_a_rollout_with_other_weights_generates_nothing(roles):
    args, workers = roles
    push(workers, 3)
    with pytest.raises(StaleWeightsError, match="version 3.* version 4 was pushed"):
        ExperienceMaker(args).make_experience(5)


def test_a_token_after_the_end_neither_scores_nor_trains(roles):
    args, workers = roles
    sequences = torch.tensor([[1, 2, 3, 4, 1, 2, common.END, common.PAD], [1, 2, 3, 4, 1, 9, 3, 4]])
    masks = torch.tensor([[1.0, 1, 1, 0], [1, 1, 1, 1]])
    scores = workers["reward"].forward(list(sequences), list(masks))
    assert [row.tolist() for row in scores] == [[0.25, 0.25, 0, 0], [0.25, 0, 0.25, 0.25]]
    attention = torch.cat([torch.ones(2, 4), masks], dim=1)
    assert workers["actor"].forward(list(sequences), list(masks), list(attention))[0][3] == 0
