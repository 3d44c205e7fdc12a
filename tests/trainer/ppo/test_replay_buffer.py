"""Groups of samples that are used again: which are kept, which are drawn, and that they come back as they were."""

import numpy as np
import pytest
import torch

from hybridrl.config.schema.trainer import ReplayConfig
from hybridrl.protocol import DataProto
from hybridrl.trainer.ppo.replay_buffer import ReplayBuffer

N, WIDTH, PAD = 2, 3, 9


def samples(*, step: int, groups: int = 2, prompt_width: int = 4, valid: bool = True) -> DataProto:
    """A batch of step `step`, made by the weights before it; every number in it says which step and row it is of."""
    size = groups * N
    marks = step * 100 + torch.arange(size)
    prompts, responses = marks[:, None].expand(size, prompt_width), marks[:, None].expand(size, WIDTH)
    ids = torch.cat([prompts, responses], dim=1).contiguous()
    tensors = {
        "prompts": prompts.contiguous(),
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "position_ids": torch.arange(prompt_width + WIDTH).expand_as(ids).contiguous(),
        "responses": responses.contiguous(),
        "response_mask": torch.ones(size, WIDTH, dtype=torch.int64),
        "weights_version": torch.full((size,), step - 1),
        "token_level_scores": marks[:, None].float().expand(size, WIDTH).contiguous(),
        "reward_valid": torch.full((size,), valid),
    }
    uid = np.array([f"{step}-{row // N}" for row in range(size)], dtype=object)
    return DataProto.from_dict(tensors, {"uid": uid}, {"step": step})


def buffer(*, staleness: int = 3, **config: int) -> ReplayBuffer:
    return ReplayBuffer(ReplayConfig(**{"groups": 2, **config}), n=N, staleness=staleness, pad_token_id=PAD)


def marks(batch: DataProto | None) -> list[int]:
    return [] if batch is None else batch.batch["responses"][:, 0].tolist()


def test_whole_groups_come_back_once_each():
    held = buffer(groups=3)
    assert held.draw(version=1, seed=0) is None
    held.add(samples(step=1, groups=4))
    drawn = marks(held.draw(version=1, seed=0)) + marks(held.draw(version=1, seed=1))
    assert sorted(drawn) == [100, 101, 102, 103, 104, 105, 106, 107], "three groups, then the one that is left"
    assert held.draw(version=1, seed=2) is None


def test_a_group_may_be_used_more_than_once_and_not_twice_in_a_batch():
    held = buffer(groups=5, max_uses=3)
    held.add(samples(step=1))
    assert [marks(held.draw(version=1, seed=i)) for i in range(4)] == [[100, 101, 102, 103]] * 3 + [[]]


def test_what_is_older_than_the_bound_is_thrown_away():
    held = buffer(staleness=2, max_uses=9)
    held.add(samples(step=1))  # by version 0
    held.add(samples(step=2))
    assert len(marks(held.draw(version=2, seed=0))) == 4 and len(held) == 4
    assert set(marks(held.draw(version=3, seed=0))) == {200, 201, 202, 203} and len(held) == 2


def test_the_age_of_a_group_is_that_of_its_oldest_token():
    batch = samples(step=5)
    batch.batch["token_versions"] = torch.full((2 * N, WIDTH), 4)
    batch.batch["token_versions"][1, 0] = 2
    batch.batch["token_versions"][2, 2], batch.batch["response_mask"][2, 2] = -1, 0  # padding has no version
    held = buffer(staleness=1)
    held.add(batch)
    assert marks(held.draw(version=4, seed=0)) == [502, 503]


def test_the_oldest_make_room_and_what_has_no_reward_is_not_kept():
    held = buffer(size=3)
    held.add(samples(step=1))
    held.add(samples(step=2, valid=False))
    assert len(held) == 2
    held.add(samples(step=3))
    assert len(held) == 3 and 100 not in marks(held.draw(version=1, seed=0))


def test_prompts_of_different_width_are_padded_on_the_left():
    held = buffer(groups=9)
    held.add(samples(step=1, groups=1, prompt_width=2))
    held.add(samples(step=2, groups=1, prompt_width=4))
    columns = held.draw(version=2, seed=0).batch
    assert columns["prompts"].tolist() == [[PAD, PAD, 100, 100], [PAD, PAD, 101, 101], [200] * 4, [201] * 4]
    assert columns["input_ids"][0].tolist() == [PAD, PAD, 100, 100, 100, 100, 100]
    assert columns["attention_mask"][0].tolist() == [0, 0, 1, 1, 1, 1, 1]
    assert columns["position_ids"][0].tolist() == [0, 0, 0, 1, 2, 3, 4]


@pytest.mark.parametrize("widths", [(4, 4), (2, 4)])
def test_a_saved_buffer_draws_what_the_other_one_draws(tmp_path, widths):
    held, other = buffer(max_uses=2), buffer(max_uses=2)
    for step, width in enumerate(widths, 1):
        held.add(samples(step=step, prompt_width=width))
    held.draw(version=2, seed=0)
    other.restore(str(tmp_path / "replay"), held.save(str(tmp_path / "replay")))
    for seed in range(3):
        left, right = (one.draw(version=2, seed=seed) for one in (held, other))
        assert marks(left) == marks(right)
        if left is not None:
            assert all(torch.equal(left.batch[name], right.batch[name]) for name in ("responses", "token_level_scores"))


def test_an_empty_buffer_is_saved_too(tmp_path):
    assert buffer().save(str(tmp_path / "replay")) == []
    buffer().restore(str(tmp_path / "replay"), [])
