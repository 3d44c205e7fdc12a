"""Batches on their way to workers and back: what a relay cuts and joins is what the driver would have."""

import numpy as np
import pytest
import torch

from hybridrl.data_plane.batches import JoinedBatches, SplitBatch, concat_batches, concat_joined
from hybridrl.errors import DataError
from hybridrl.protocol import DataProto


def rows(numbers, **meta_info) -> DataProto:
    tensors = {"x": torch.tensor(numbers, dtype=torch.int64)}
    return DataProto.from_dict(tensors, {"name": [f"row {n}" for n in numbers]}, meta_info)


def content(batch: DataProto) -> tuple:
    return batch.batch["x"].tolist(), batch.non_tensor_batch["name"].tolist(), batch.meta_info


@pytest.mark.parametrize("order", [None, np.array([5, 3, 1, 0, 2, 4])])
@pytest.mark.parametrize("part_of", [[0, 1, 2, 3], [0, 0, 1, 1, 2, 3], [3, 2, 1, 0]])
def test_the_parts_of_a_nodes_workers_are_those_of_the_whole_split(order, part_of):
    bounds = [(0, 2), (2, 3), (3, 3), (3, 6)]  # of 2, 1, 0 and 3 rows
    split = SplitBatch(rows(range(6), seed=1), bounds, order).shared_by(part_of)
    expected = [content(split[worker]) for worker in range(len(part_of))]
    numbers = list(range(6)) if order is None else order.tolist()
    assert [x for x, *_ in expected] == [numbers[slice(*bounds[part])] for part in part_of]
    assert [content(entry) for entry in split[:]] == expected
    for workers in ([0, 1], [1, 2, 3], [0, 3], [2]):
        node = split.of(workers)
        assert [content(entry) for entry in node] == [expected[worker] for worker in workers]
        parts = [content(part) for part in node.parts()]
        assert [parts[part] for part in node.part_of] == [expected[worker] for worker in workers]


METRICS = [{"metrics": {"loss": [float(n)], **({"only_0": 7.0} if n == 0 else {})}, "kind": "a"} for n in range(4)]


@pytest.mark.parametrize("metas", [[{"kind": "a"}] * 4, METRICS, [{}, {"kind": "a"}, {}, {"other": 1}]])
def test_joined_batches_are_separated_and_concatenated_without_a_difference(metas):
    outputs = [rows(n, **meta) for n, meta in zip([[1, 2], [], [3], [4, 5, 6]], metas, strict=True)]
    nodes = [JoinedBatches.of(outputs[:2]), JoinedBatches.of(outputs[2:])]
    assert [content(batch) for node in nodes for batch in node.separate()] == [content(batch) for batch in outputs]
    assert content(concat_joined(nodes)) == content(concat_batches(outputs))


def test_batches_of_metrics_alone_are_joined():
    outputs = [DataProto(meta_info=meta) for meta in METRICS]
    nodes = [JoinedBatches.of(outputs[:2]), JoinedBatches.of(outputs[2:])]
    assert concat_joined(nodes).meta_info == concat_batches(outputs).meta_info
    assert [batch.meta_info for batch in nodes[0].separate()] == METRICS[:2]


def test_what_a_concatenation_would_refuse_or_change_is_not_joined():
    floats = DataProto.from_dict({"x": torch.ones(2)}, {"name": ["a", "b"]})
    wider = DataProto.from_dict({"x": torch.ones(2, 3, dtype=torch.int64)}, {"name": ["a", "b"]})
    for other in (None, floats, wider, DataProto.from_dict({"x": torch.arange(2)}), DataProto()):
        assert JoinedBatches.of([rows([1]), other]) is None
    assert JoinedBatches.of([]) is None
    assert concat_joined([JoinedBatches.of([rows([1])]), JoinedBatches.of([floats])]) is None
    with pytest.raises(DataError, match="conflicting values for meta_info key 'kind': 'a' and 'b'"):
        concat_joined([JoinedBatches.of([rows([1], kind="a"), rows([2], kind="b")])])
