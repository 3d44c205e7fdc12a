"""Arrays that real workers store in Ray and send each other through a driver that does not read them."""

import os
import pickle
import signal
import time

import numpy as np
import pytest
import ray
import torch

from hybridrl.data_plane.columns import one_object_per_row
from hybridrl.data_plane.futures import StoredArray, arrays_of, stored
from hybridrl.errors import WorkerLost
from hybridrl.protocol import DataProto
from hybridrl.single_controller.placement.resource_pool import RayResourcePool
from hybridrl.single_controller.ray_worker_group import RayClassWithInitArgs, RayWorkerGroup
from tests.support.single_controller.sample_workers import ArrayWorker

pytestmark = pytest.mark.usefixtures("ray_cluster")
SIZE = 100_000  # numbers of a row: 0.8 MB


@pytest.fixture(scope="module")
def reader(ray_cluster):
    with (
        RayResourcePool([2], name_prefix="reading") as pool,
        RayWorkerGroup(pool, RayClassWithInitArgs(ArrayWorker), role="reader", share=0.5) as group,
    ):
        yield group


@pytest.fixture
def maker(ray_cluster):
    with (
        RayResourcePool([2], name_prefix="making") as pool,
        RayWorkerGroup(pool, RayClassWithInitArgs(ArrayWorker), role="maker", share=0.5) as group,
    ):
        yield group


def rows(*numbers: int) -> DataProto:
    return DataProto.from_dict({"x": torch.tensor(numbers)})


def are_unread(batch: DataProto) -> bool:
    entries = list(batch.non_tensor_batch["arrays"])
    return all(isinstance(entry, StoredArray) and entry.block.arrays is None for entry in entries)


def test_the_driver_selects_joins_and_sends_rows_whose_arrays_it_never_reads(maker, reader):
    made = maker.make(rows(0, 1, 2, 3), SIZE)
    batch = DataProto.concat([made.select_idxs([3, 0]), made[1:3]]).repeat(2)
    found = reader.sums(batch)
    assert found.batch["sums"].tolist() == [SIZE * row for row in (3, 3, 0, 0, 1, 1, 2, 2)]
    assert are_unread(batch) and are_unread(made)
    assert len(ray.cloudpickle.dumps(batch)) < 20_000 < 4 * 8 * SIZE < len(pickle.dumps(batch))
    assert np.array_equal(pickle.loads(pickle.dumps(batch)).non_tensor_batch["arrays"][0], np.full(SIZE, 3))


def test_what_the_driver_has_stored_is_sent_as_a_reference_with_every_call(reader):
    entries = stored([np.full(SIZE, row) for row in range(3)])
    batch = DataProto.from_dict({"x": torch.arange(3)}, {"arrays": one_object_per_row(entries)})
    for _ in range(2):
        assert reader.sums(batch).batch["sums"].tolist() == [0, SIZE, 2 * SIZE]
    assert are_unread(batch)


def test_arrays_that_are_lost_with_their_worker_end_the_call_of_who_needs_them(maker, reader):
    made = maker.make(rows(0, 1, 2, 3), SIZE)
    kept = maker.make(rows(0, 1, 2, 3), SIZE).stored_again()
    os.kill(maker.process_ids[1], signal.SIGKILL)
    reason = "arrays that it needs were lost with maker-1, which had stored them"
    with pytest.raises(WorkerLost, match=reason) as lost:
        for _ in range(100):  # Ray needs a second to delete them
            reader.sums(made)
            time.sleep(0.2)
    assert (lost.value.role, lost.value.rank) == ("reader", 1)  # its peers may wait for it in a collective
    assert reader.sums(kept).batch["sums"].tolist() == [0, SIZE, 2 * SIZE, 3 * SIZE]
    assert reader.sums(made[:2]).batch["sums"].tolist() == [0, SIZE]
    with pytest.raises(WorkerLost, match=reason) as lost:
        arrays_of(made.non_tensor_batch["arrays"])
    assert (lost.value.role, lost.value.rank) == ("maker", 1)
