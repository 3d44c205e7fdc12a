"""The dispatch of updates cuts by the plan in `meta_info`, and workers refuse half a cut."""

import numpy as np
import pytest
import torch

from hybridrl.data_plane.meta_info import UpdatePlan
from hybridrl.errors import DataError
from hybridrl.protocol import DataProto
from hybridrl.single_controller.dispatch import Dispatch, register
from hybridrl.single_controller.local_worker_group import LocalWorkerGroup
from hybridrl.single_controller.worker import Worker
from hybridrl.single_controller.worker_group import ClassWithInitArgs
from hybridrl.workers.mini_batch import (
    COLUMN,
    ENGINE_MESH,
    MINI_BATCH_COMPUTE,
    _parts,
    _parts_by_prefix,
    split_mini_batches,
)


class Cutter(Worker):
    """Returns the rows of each optimizer step."""

    @register(Dispatch.ONE_TO_ALL)
    def join(self) -> None:
        self._register_dispatch_collect_info(ENGINE_MESH, 0, True)

    @register(MINI_BATCH_COMPUTE)
    def cut(self, data: DataProto) -> DataProto:
        rows = [step.batch["row"].tolist() for step in split_mini_batches(data)]
        return DataProto(meta_info={"metrics": {"rows": rows}, "plan": data.meta_info["update_plan"]})


@pytest.fixture(scope="module")
def cutter():
    group = LocalWorkerGroup(None, ClassWithInitArgs(Cutter), role="cutter")
    group.join()
    return group


def five_rows(**meta_info) -> DataProto:
    tensors = {"row": torch.arange(5), "attention_mask": torch.ones(5, 3, dtype=torch.int64)}
    return DataProto.from_dict(tensors=tensors, meta_info=meta_info)


def test_rows_are_cut_by_the_plan_or_by_plain_keys(cutter):
    # With seed 1 numpy permutes 0 .. 4 to 4, 0, 1, 2, 3; a mini-batch keeps the order of the permutation.
    for meta_info in ({"update_plan": UpdatePlan(2, shuffle_seed=1)}, {"mini_batch_size": 2, "shuffle_seed": 1}):
        result = cutter.cut(five_rows(**meta_info))
        assert result.meta_info["metrics"]["rows"] == [[4, 0], [1, 2], [3]]
        assert result.meta_info["plan"] == UpdatePlan(2, shuffle_seed=1, num_mini_batches=3)


@pytest.mark.parametrize(
    ("seed", "rows"), [(None, [[0, 3, 1], [2, 4]]), (2, [[2, 4, 0, 3], [1]])]
)  # numpy permutes 0, 1, 2 with seed 2 to 2, 0, 1
def test_rows_of_one_episode_are_in_one_mini_batch(cutter, seed, rows):
    batch = five_rows(update_plan=UpdatePlan(2, shuffle_seed=seed))
    batch.batch["episode"] = torch.tensor([7, 3, 5, 7, 5])
    result = cutter.cut(batch)
    assert result.meta_info["metrics"]["rows"] == rows
    assert result.meta_info["plan"].num_mini_batches == 2


@pytest.mark.parametrize("balance", [True, False])
def test_rows_of_one_pair_go_to_one_rank(balance):
    lengths, pairs = np.array([9, 1, 1, 1, 8, 1, 2, 2]), np.array([7, 2, 7, 2, 5, 5, 4, 4])
    parts = _parts(lengths, pairs, 2, balance=balance)
    # tokens of the pairs: 7 has 10, 2 has 2, 5 has 9, 4 has 4. Balanced 12 and 13, the heavier part first; in order
    # the same, because pairs are numbered by their first rows
    assert parts.tolist() == ([1, 1, 1, 1, 0, 0, 0, 0] if balance else [0, 0, 0, 0, 1, 1, 1, 1])


def test_rows_that_begin_alike_go_to_one_rank():
    # two prompts of 8 tokens, three responses of one token each, in turn; a tree has 11 tokens
    ids = torch.tensor([[prompt] * 8 + [answer] for answer in (5, 6, 7) for prompt in (1, 2)])
    data = DataProto.from_dict(tensors={"input_ids": ids, "attention_mask": torch.ones_like(ids)})
    parts = _parts_by_prefix(data, np.array([5, 4, 3, 2, 1, 0]), 2).tolist()
    assert parts in ([0, 1, 0, 1, 0, 1], [1, 0, 1, 0, 1, 0])


def test_without_a_plan_all_rows_are_one_optimizer_step(cutter):
    assert cutter.cut(five_rows()).meta_info["metrics"]["rows"] == [[0, 1, 2, 3, 4]]
    assert [step.batch["row"].tolist() for step in split_mini_batches(five_rows())] == [[0, 1, 2, 3, 4]]


def test_a_wrong_plan_is_refused_before_a_worker_gets_it(cutter):
    with pytest.raises(DataError, match="update_plan.mini_batch_size=-2: .*at least 1"):
        cutter.cut(five_rows(mini_batch_size=-2))


@pytest.mark.parametrize("lost", ["the column", "the plan"])
def test_a_worker_refuses_half_a_cut(lost):
    rows = five_rows(update_plan=UpdatePlan(num_mini_batches=2))
    if lost == "the plan":
        rows.meta_info = {}
        rows.batch[COLUMN] = torch.tensor([0, 0, 0, 1, 1])
    with pytest.raises(DataError, match=r"update_plan.num_mini_batches=.*column 'mini_batch'"):
        list(split_mini_batches(rows))
