"""Arrays of object columns behind references, with a store that is a list."""

import copy
import pickle

import numpy as np
import pytest

from hybridrl.data_plane import futures
from hybridrl.data_plane.columns import deep_equal, one_object_per_row
from hybridrl.data_plane.futures import BLOCK_BYTES, MIN_STORED_BYTES, StoredArray, array_of, arrays_of, stored
from hybridrl.protocol import DataProto


class ListStore:
    """Keeps what is put there, and counts what is fetched."""

    def __init__(self):
        self.kept, self.fetched = [], []

    def put(self, arrays):
        self.kept.append(list(arrays))
        return len(self.kept) - 1, self.fetch

    def fetch(self, references):
        self.fetched.append(references)
        return [self.kept[number] for number in references]


@pytest.fixture
def store(monkeypatch):
    store = ListStore()
    monkeypatch.setattr(futures._Store, "put", store.put)
    return store


def numbers(count: int, nbytes: int) -> list[np.ndarray]:
    return [np.full(nbytes, number, dtype=np.uint8) for number in range(count)]


def test_small_arrays_are_stored_together_and_large_ones_alone(store):
    entries = stored([*numbers(5, BLOCK_BYTES // 2), *numbers(1, 3 * BLOCK_BYTES)])
    assert [len(block) for block in store.kept] == [2, 2, 1, 1]
    assert [entry.read()[0] for entry in entries] == [0, 1, 2, 3, 4, 0]


def test_an_empty_array_may_be_the_first(store):
    empty, full = stored([*numbers(1, 0), *numbers(1, MIN_STORED_BYTES)])
    assert [len(block) for block in store.kept] == [2] and empty.read().size == 0 and full.read().size


def test_arrays_that_have_little_together_are_not_stored(store):
    arrays = numbers(3, MIN_STORED_BYTES // 4)
    assert all(entry is array for entry, array in zip(stored(arrays), arrays, strict=True)) and not store.kept
    assert stored([]) == []


def test_a_process_without_a_store_keeps_arrays(monkeypatch):
    monkeypatch.setattr(futures._Store, "put", None)
    [array] = numbers(1, BLOCK_BYTES)
    assert stored([array])[0] is array


def test_all_arrays_are_fetched_at_once_and_once(store):
    entries = stored(numbers(4, BLOCK_BYTES))
    more = [np.zeros(1), None, *entries]
    assert [len(arrays_of(more)), len(arrays_of(entries))] == [6, 4]
    assert store.fetched == [[0, 1, 2, 3]]


def test_any_pickle_but_rays_has_the_array_and_files_have_plain_ones(store, tmp_path):
    [entry] = stored(numbers(1, BLOCK_BYTES))
    found = pickle.loads(pickle.dumps(entry))
    assert isinstance(found, np.ndarray) and np.array_equal(found, entry.read())
    DataProto.from_dict({}, {"arrays": one_object_per_row([entry])}).save_to_disk(tmp_path / "batch")
    [found] = DataProto.load_from_disk(tmp_path / "batch").non_tensor_batch["arrays"]
    assert isinstance(found, np.ndarray) and np.array_equal(found, entry.read())


def test_a_deep_copy_is_the_same_reference_and_an_array_equals_the_one_that_was_stored(store):
    [entry] = stored(numbers(1, BLOCK_BYTES))
    assert copy.deepcopy({"arrays": [entry]})["arrays"][0] is entry and not store.fetched
    assert deep_equal(entry, array_of(entry)) and not deep_equal(entry, entry.read() + 1)
    assert isinstance(entry, StoredArray)
