"""Futures of batches: collecting, chunking, and fetching only the needed shards."""

import pickle
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridrl.errors import DataError
from hybridrl.protocol import DataProto, DataProtoFuture
from tests.support.data_plane.sample_batches import obs

pytestmark = pytest.mark.timeout(60)


class Store:
    """Values behind references, and a record of what was fetched."""

    def __init__(self, *values: DataProto):
        self.values, self.fetched = dict(enumerate(values)), []

    def fetch(self, references: list[int]) -> list[DataProto]:
        self.fetched += references
        return [self.values[r] for r in references]

    def future(self, **kwargs) -> DataProtoFuture:
        return DataProtoFuture(DataProto.concat, list(self.values), fetch=self.fetch, **kwargs)


def shards(*sizes: int) -> Store:
    return Store(
        *[DataProto.from_dict({"obs": torch.arange(sum(sizes[:i]), sum(sizes[: i + 1]))}) for i in range(len(sizes))]
    )


def even_runs(rows: list[int], chunks: int) -> list[list[int]]:
    """Return consecutive ranges whose lengths differ by at most one, longer first."""
    return [run.tolist() for run in np.array_split(np.array(rows, dtype=int), chunks)]


def test_a_future_collects_then_dispatches():
    store = shards(2, 1)
    assert obs(store.future().get()) == [0, 1, 2] and len(store.future().futures) == 2
    assert obs(store.future(dispatch_fn=lambda data: data[::-1]).get()) == [2, 1, 0]
    assert obs(DataProtoFuture.concat([0, 1], fetch=store.fetch).get()) == [0, 1, 2]
    assert obs(DataProtoFuture(DataProto.concat, list(store.values.values())).get()) == [0, 1, 2]


def test_as_many_chunks_as_shards_are_the_shards_and_fetch_nothing():
    store = shards(3, 0, 1)
    chunks = store.future(sizes=[3, 0, 1]).chunk(3)
    assert store.fetched == [] and [chunk.futures for chunk in chunks] == [[0], [1], [2]]
    assert [obs(chunk.get()) for chunk in chunks] == [[0, 1, 2], [], [3]] and store.fetched == [0, 1, 2]


@given(st.lists(st.integers(0, 5), min_size=1, max_size=5), st.integers(1, 7))
@settings(max_examples=100, deadline=None)
def test_chunks_of_known_sizes_fetch_only_the_shards_that_hold_their_rows(sizes, chunks):
    store = shards(*sizes)
    rows = list(range(sum(sizes)))
    owner = [shard for shard, size in enumerate(sizes) for _ in range(size)]
    whole_shards = [[row for row in rows if owner[row] == shard] for shard in range(len(sizes))]
    expected = whole_shards if chunks == len(sizes) else even_runs(rows, chunks)
    for chunk, wanted in zip(store.future(sizes=sizes).chunk(chunks), expected, strict=True):
        store.fetched.clear()
        assert obs(chunk.get()) == wanted
        holding = {owner[row] for row in wanted}
        # Empty shards between two needed ones are fetched too; an empty chunk fetches one shard for its columns.
        assert {shard for shard in store.fetched if sizes[shard]} == holding if wanted else len(store.fetched) == 1


def test_chunks_of_unknown_sizes_and_of_a_dispatched_future_are_split_from_the_whole():
    store = shards(2, 3)
    assert [obs(chunk.get()) for chunk in store.future().chunk(3)] == [[0, 1], [2, 3], [4]]
    turned = store.future(dispatch_fn=partial(DataProto.select_idxs, idxs=[4, 3, 2, 1, 0]), sizes=[2, 3])
    assert [obs(chunk.get()) for chunk in turned.chunk(2)] == [[4, 3, 2], [1, 0]]


def test_a_future_refuses_wrong_sizes():
    with pytest.raises(ValueError, match="each of the 2 shards"):
        shards(1, 1).future(sizes=[2])
    with pytest.raises(DataError, match=r"\[2, 1\] rows.*\[1, 1\]"):
        shards(1, 1).future(sizes=[2, 1]).get()
    with pytest.raises(ValueError, match="chunks=0"):
        shards(1).future().chunk(0)


def test_chunks_of_a_future_can_be_sent_to_another_process():
    future = DataProtoFuture(DataProto.concat, [DataProto.from_dict({"obs": torch.arange(5)})], sizes=[5])
    chunks = pickle.loads(pickle.dumps(future.chunk(2)))
    assert [obs(chunk.get()) for chunk in chunks] == [[0, 1, 2], [3, 4]]
