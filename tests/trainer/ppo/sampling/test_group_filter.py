"""Dynamic sampling: which groups are dropped, kept and trained, and that every prompt has one outcome."""

import tempfile

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridrl.config.schema.ppo import FilterGroupsConfig
from hybridrl.errors import CheckpointError, DataError
from hybridrl.protocol import DataProto
from hybridrl.rewards.manager import BRANCHES
from hybridrl.trainer.checkpoint.ledger_audit import audit
from hybridrl.trainer.data.prompt_loader import ROW
from hybridrl.trainer.ppo.ppo_loop import NoGroupFilter
from hybridrl.trainer.ppo.sampling.group_filter import GroupFilter, differs_in_group, metric_values

N, WIDTH = 2, 3


def generated(scores: list[tuple], *, first_row: int = 0, version: int = 0, prompt_width: int = 4) -> DataProto:
    """Return a scored batch with one group per pair of scores; prompts are numbered from `first_row` on."""
    size = len(scores) * N
    ids = torch.arange(size)[:, None].expand(size, prompt_width + WIDTH).contiguous()
    rewards = torch.zeros(size, WIDTH)
    rewards[:, -1] = torch.tensor(scores, dtype=torch.float32).nan_to_num().flatten()
    tensors = {
        "prompts": ids[:, :prompt_width].contiguous(),
        "responses": ids[:, prompt_width:].contiguous(),
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "position_ids": ids,
        "response_mask": torch.ones(size, WIDTH, dtype=torch.int64),
        "weights_version": torch.full((size,), version),
        "token_level_scores": rewards,
        "reward_valid": torch.tensor(scores, dtype=torch.float32).isfinite().flatten(),
    }
    rows = np.repeat(np.arange(first_row, first_row + len(scores)), N).astype(object)
    return DataProto.from_dict(tensors, {ROW: rows}, {"anything": 1})


def group_filter(*, size: int = 2, max_age: int = 0, **config) -> GroupFilter:
    settings = FilterGroupsConfig(enable=True, **config)
    return GroupFilter(settings, n=N, batch_size=size, max_age=max_age, pad_token_id=9)


def rows(batch: DataProto) -> list[int]:
    return batch.non_tensor_batch[ROW][::N].tolist()


def test_a_group_differs_if_two_valid_values_do():
    nan, values = float("nan"), torch.tensor
    valid = values([True] * 6 + [True, False] + [False] * 2 + [True] * 2)
    scores = values([1.0, 1.0, 0.0, 1.0, 0.1 + 0.2, 0.3, 1.0, 0.0, nan, nan, -1e30, 1e30], dtype=torch.float64)
    # equal; different; different by rounding; one valid value; none; far apart
    assert differs_in_group(scores, valid, n=2).tolist() == [False, True, True, False, False, True]


def test_three_equal_tenths_do_not_differ_although_their_standard_deviation_is_above_zero():
    tenths = np.full(3, 0.1)
    assert tenths.std() > 0
    assert differs_in_group(torch.tensor(tenths), torch.ones(3, dtype=torch.bool), n=3).tolist() == [False]


@pytest.mark.parametrize("metric", ["seq_reward", "seq_final_reward", "score"])
def test_the_reward_is_the_sum_over_the_response(metric):
    values, valid = metric_values(generated([(1, 2), (3, float("nan"))]), {}, metric)
    assert values.tolist() == [1, 2, 3, 0] and valid.tolist() == [True, True, True, False]


def test_a_column_of_the_reward_function_replaces_the_reward():
    batch = generated([(0.5, 0.7), (1, 1)])
    values, valid = metric_values(batch, {"acc": [True, True, None, 0]}, "acc")
    assert values.tolist() == [1, 1, 0, 0] and valid.tolist() == [True, True, False, True]
    assert metric_values(batch, {"score": [3, 4, 5, 6]}, "score")[0].tolist() == [3, 4, 5, 6]
    with pytest.raises(DataError, match="no 'acc', only score, word; return it"):
        metric_values(batch, {"word": ["a"] * 4}, "acc")
    with pytest.raises(DataError, match="acc: .*'yes'.* no number"):
        metric_values(batch, {"acc": ["yes"] * 4}, "acc")


def test_batches_are_added_until_the_step_has_its_groups():
    groups = group_filter().begin(version=0)
    assert not groups.add(generated([(1, 1), (0, 1), (0, 0)]), {}, epoch=0)
    assert groups.add(generated([(1, 0), (0, 1)], first_row=3, prompt_width=6), {}, epoch=1)
    batch = groups.take()
    assert rows(batch) == [1, 3] and len(batch) == 4 and "dataset_epoch" not in batch.non_tensor_batch
    assert batch.batch["prompts"].shape[1] == 6 and batch.batch["prompts"][0].tolist() == [9, 9, 2, 2, 2, 2]
    assert groups.outcomes == {"0": {"filtered": [0, 2], "trained": [1]}, "1": {"trained": [3], "surplus": [4]}}
    found = groups.metrics()
    assert found["train/num_gen_batches"] == 2 and found["training/filter_groups/evicted_samples"] == 4
    assert found["training/filter_groups/evicted_ratio"] == 2 / 5
    assert found["training/filter_groups/seq_reward_mean"] == pytest.approx(5 / 10)


def test_surplus_is_kept_while_the_next_step_may_train_on_it():
    found = group_filter(size=1, max_age=2)
    groups = found.begin(version=5)
    batch = DataProto.concat(
        [generated([(0, 1)] * 3, version=version, first_row=version * 10) for version in (5, 4, 3)]
    )
    groups.add(batch.select(meta_info_keys=[]), {}, epoch=0)
    assert rows(groups.take()) == [50]
    # In the next step the weights 6 are trained: samples of the weights 4 are 2 old, those of 3 are 3 old.
    assert groups.outcomes["0"] == {"trained": [50], "surplus": [30, 31, 32], "kept": [51, 52, 40, 41, 42]}
    following = found.begin(version=6)
    assert following.add(generated([(1, 1)], first_row=90, version=6), {}, epoch=1)
    assert rows(following.take()) == [51]
    assert following.outcomes == {
        "0": {"trained": [51], "kept": [52], "surplus": [40, 41, 42]},
        "1": {"filtered": [90]},
    }


def test_a_step_that_is_not_taken_leaves_the_filter_as_it_was():
    found = group_filter(max_age=9)
    found.begin(version=0).add(generated([(0, 1)] * 5), {}, epoch=0)
    assert found.kept is None and found.state_dict() is None


def test_the_limit_of_generation_batches_ends_the_step():
    groups = group_filter(max_num_gen_batches=2).begin(version=0)
    assert not groups.add(generated([(0, 1), (1, 1)]), {}, epoch=0)
    message = "max_num_gen_batches=2: after 2 generation batches the step has 1 of 2 groups .* 3 of 4 generated groups"
    with pytest.raises(DataError, match=message):
        groups.add(generated([(1, 1), (0, 0)]), {}, epoch=0)


def test_without_a_limit_every_tenth_generation_batch_is_logged(caplog):
    groups = group_filter().begin(version=6)
    for _ in range(20):
        assert not groups.add(generated([(1, 1)]), {}, epoch=0)
    assert [record.getMessage()[:35] for record in caplog.records] == [
        "step 7: after 10 generation batches",
        "step 7: after 20 generation batches",
    ]


@settings(max_examples=25, deadline=None)
@given(
    data=st.data(),
    size=st.integers(1, 4),
    drawn=st.integers(1, 6),
    max_age=st.integers(0, 2),
)
def test_every_drawn_prompt_has_one_outcome_also_after_a_snapshot_and_a_checkpoint(data, size, drawn, max_age):
    found, next_row, entries = group_filter(size=size, max_age=max_age), 0, [{"begin": 0, "rows": 10**6, "from": None}]
    pairs = st.sampled_from([(0, 0), (0, 1), (1, 0), (1, 1)])
    for step in range(1, 5):
        with tempfile.TemporaryDirectory() as folder:
            state, memory = found.save(folder), found.state_dict()
            found = group_filter(size=size, max_age=max_age)
            if data.draw(st.booleans()):
                found.load(folder, state)
            else:
                found.load_state_dict(memory)
        groups, full = found.begin(version=step - 1), False
        while not full:
            scores = data.draw(st.lists(pairs, min_size=drawn, max_size=drawn)) + [(0, 1)]
            batch = generated(scores, first_row=next_row, version=step - 1)
            next_row += len(scores)
            full = groups.add(batch, {}, epoch=0)
        batch = groups.take()
        trained = [row for rows in groups.outcomes.values() for row in rows.get("trained", ())]
        assert rows(batch) == trained and len(trained) == size
        assert batch.batch["token_level_scores"].sum(-1).reshape(-1, N).sum(-1).tolist() == [1.0] * size
        entries.append({"step": step, "epoch": 0, "prompts": rows(batch), "drawn": groups.outcomes, "stages": {}})
        result = audit(entries)
        assert result.problems() == [] and sorted(result.prompts()[0]) == list(range(next_row))


def with_lengths(batch: DataProto, lengths: list[int]) -> DataProto:
    """Cut the responses: `lengths` has one number per sample."""
    found = batch.select()
    found.batch["attention_mask"] = found.batch["attention_mask"].clone()
    for row, length in enumerate(lengths):
        found.batch["attention_mask"][row, -WIDTH:] = (torch.arange(WIDTH) < length).long()
    return found


def test_over_sampling_trains_on_the_groups_that_are_complete_first_and_filters_none():
    found = GroupFilter(FilterGroupsConfig(order="shortest"), n=N, batch_size=2, max_age=1, pad_token_id=9)
    groups = found.begin(version=3)
    # The longest responses of the groups have 3, 2, 1 and 2 tokens.
    batch = with_lengths(generated([(1, 1), (0, 0), (0, 1), (2, 2)], version=3), [1, 3, 2, 1, 1, 1, 2, 2])
    assert groups.add(batch, {}, epoch=0)
    # In the order in which they were drawn: sorted ones would make the first mini-batch that of the shortest responses.
    assert rows(groups.take()) == [1, 2]
    assert groups.outcomes == {"0": {"trained": [1, 2], "kept": [0, 3]}}
    # Kept groups come before shorter ones: no group is put off for ever.
    following = found.begin(version=4)
    following.add(with_lengths(generated([(1, 1), (1, 1)], first_row=8, version=4), [1, 1, 1, 1]), {}, epoch=0)
    assert rows(following.take()) == [0, 3]
    assert following.outcomes["0"] == {"trained": [0, 3], "kept": [8, 9]}


def test_over_sampling_drops_the_rest_in_a_synchronous_run():
    found = GroupFilter(FilterGroupsConfig(enable=True, order="shortest"), n=N, batch_size=1, max_age=0, pad_token_id=9)
    groups = found.begin(version=0)
    assert groups.add(with_lengths(generated([(0, 1), (0, 0), (1, 0)]), [3, 3, 1, 1, 2, 2]), {}, epoch=0)
    assert rows(groups.take()) == [2]
    assert groups.outcomes == {"0": {"filtered": [1], "trained": [2], "surplus": [0]}}


def test_kept_groups_are_refused_by_a_run_that_cannot_train_them(tmp_path):
    found = GroupFilter(FilterGroupsConfig(enable=True), n=N, batch_size=1, max_age=1, pad_token_id=9)
    groups = found.begin(version=0)
    groups.add(generated([(0, 1), (1, 0), (0, 1)]), {}, epoch=0)
    groups.take()
    state = found.save(str(tmp_path))
    other = GroupFilter(FilterGroupsConfig(enable=True), n=4, batch_size=1, max_age=1, pad_token_id=9)
    with pytest.raises(CheckpointError, match="2 groups .*2 samples each.*rollout.n=4"):
        other.load(str(tmp_path), state)
    with pytest.raises(
        CheckpointError, match=r"has 4 samples .* algorithm.filter_groups.enable=false never trains them"
    ):
        NoGroupFilter().load(str(tmp_path), state)
    other.load(str(tmp_path), {"rows": 0})
    assert other.kept is None


@pytest.mark.parametrize("is_old", [True, False], ids=["older checkpoint", "train_branches was turned off"])
def test_kept_groups_join_a_batch_with_other_columns_for_branches(tmp_path, is_old):
    def with_branches(batch: DataProto) -> DataProto:
        batch.non_tensor_batch[BRANCHES] = np.fromiter(([row] for row in range(len(batch))), object, count=len(batch))
        return batch

    old, new = generated([(0, 1), (0, 1)]), generated([(0, 1)], first_row=5, version=1)
    (with_branches(new) if is_old else with_branches(old))
    saved = group_filter(size=1, max_age=1)
    step = saved.begin(version=0)
    assert step.add(old, {}, epoch=0) and rows(step.take()) == [0]
    state = saved.save(str(tmp_path))
    loaded = group_filter(size=2, max_age=1)
    loaded.load(str(tmp_path), state)
    step = loaded.begin(version=1)
    assert step.add(new, {}, epoch=0)
    batch = step.take()
    assert rows(batch) == [1, 5]
    assert list(batch.non_tensor_batch[BRANCHES]) == ([[], [], [0], [1]] if is_old else [[2], [3], [], []])
