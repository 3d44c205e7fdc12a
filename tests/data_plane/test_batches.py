"""Splitting and joining batches of either kind, as dispatch does."""

import pytest
import torch
from tensordict import TensorDict

from hybridrl.data_plane import tensordict_utils as tu
from hybridrl.data_plane.batches import chunk_rows, concat_batches, is_batch, size_in_bytes
from hybridrl.errors import DataError
from hybridrl.protocol import DataProto
from tests.support.data_plane.sample_batches import three_rows

pytestmark = pytest.mark.timeout(60)


def as_tensordict(data: DataProto) -> TensorDict:
    return data.to_tensordict()


KINDS = {"DataProto": lambda data: data, "TensorDict": as_tensordict}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("parts", "sizes"), [(1, [3]), (2, [2, 1]), (5, [1, 1, 1, 0, 0])])
def test_any_number_of_chunks_joins_to_the_whole(kind, parts, sizes):
    whole = KINDS[kind](three_rows(k=1))
    batches = chunk_rows(whole, parts)
    assert [len(batch) for batch in batches] == sizes and {type(batch) for batch in batches} == {type(whole)}
    joined = concat_batches(batches)
    tu.assert_tensordict_eq(
        *(batch if isinstance(batch, TensorDict) else batch.to_tensordict() for batch in (joined, whole))
    )


@pytest.mark.parametrize("kind", KINDS)
def test_metrics_of_all_batches_are_kept_and_other_meta_information_must_agree(kind):
    batches = [
        KINDS[kind](DataProto.from_dict({"x": torch.ones(1)}, meta_info={"metrics": {"loss": n}, "t": 1}))
        for n in (1.0, 2.0)
    ]
    joined = concat_batches(batches)
    assert (joined.meta_info["metrics"] if kind == "DataProto" else tu.get(joined, "metrics")) == {"loss": [1.0, 2.0]}
    other = KINDS[kind](DataProto.from_dict({"x": torch.ones(1)}, meta_info={"t": 2}))
    with pytest.raises(DataError, match="'t': 1 and 2"):
        concat_batches([batches[0], other])


def test_is_batch_accepts_only_values_with_rows():
    batches = [three_rows(), DataProto(), TensorDict({}, batch_size=[2])]
    assert all(map(is_batch, batches)) and size_in_bytes(batches[0]) == 3 * 2 * 8
    others = [
        TensorDict({}, batch_size=[]),
        TensorDict({}, batch_size=[2, 2]),
        {"x": torch.ones(2)},
        torch.ones(2),
        None,
    ]
    assert not any(map(is_batch, others))
    for other in others:
        with pytest.raises(TypeError, match="one batch dimension"):
            chunk_rows(other, 2)
    with pytest.raises(TypeError, match="one or more"):
        concat_batches([])
    with pytest.raises(TypeError, match="one kind"):
        concat_batches([as_tensordict(three_rows()), three_rows()])
