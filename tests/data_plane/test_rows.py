"""Writing to a batch whose memory other processes read: read-only bytes, and the real Ray."""

import pickle

import numpy as np
import pytest
import ray
import torch

from hybridrl.protocol import DataProto, fold_batch_dim, unpad_dataproto
from tests.support.data_plane.sample_batches import jagged, obs, round_trip, three_rows, two_readers

pytestmark = pytest.mark.timeout(60)


def write_batch(data: DataProto) -> None:
    data.batch["obs"].zero_()


def write_item(data: DataProto) -> None:
    data[0].batch["obs"].zero_()


@pytest.mark.parametrize(
    "write",
    [
        write_batch,
        write_item,
        lambda data: write_batch(data[:2]),
        lambda data: write_batch(data.select(["obs"])),
        lambda data: write_batch(data.chunk(3)[0]),
        lambda data: write_batch(data.split(2)[1]),
        lambda data: write_batch(data.pop(["obs"])),
        lambda data: write_batch(data.rename("obs", "obs")),
        lambda data: write_batch(data.to("cpu")),
        lambda data: write_batch(DataProto().union(data)),
        lambda data: write_batch(DataProto.from_tensordict(data.to_tensordict())),
        lambda data: write_batch(fold_batch_dim(data, 1)),
        lambda data: write_batch(data.unfold_column_chunks(2, split_keys=["obs"])),
        lambda data: write_batch(unpad_dataproto(data, 0)),
        lambda data: write_batch(round_trip(data, freeze=True)),
        lambda data: write_batch(pickle.loads(pickle.dumps(data, protocol=5))),
        lambda data: data.non_tensor_batch["weight"].fill(0),
    ],
)
def test_writing_to_a_received_batch_changes_no_other_reader(write):
    mine, other = two_readers(three_rows())
    write(mine)
    assert obs(other) == [[1, 2], [3, 4], [5, 6]] and other.non_tensor_batch["weight"].tolist() == [0.5, 1.5, 2.5]


def all_bytes(column: torch.Tensor) -> list[int]:
    parts = [column.values(), column.offsets()] if column.is_nested else [column]
    return [byte for part in parts for byte in part.reshape(-1).view(torch.uint8).tolist()]


COLUMNS = {
    "bf16": torch.ones(3, 2, dtype=torch.bfloat16),
    "fp8": torch.ones(3, 2).to(torch.float8_e4m3fn),
    "bool": torch.tensor([True, False, True]),
    "complex": torch.tensor([1 + 2j, 3 - 1j]),
    "jagged": jagged([1.0, 2.0], [3.0]),
    "jagged last": torch.nested.nested_tensor_from_jagged(
        torch.arange(10.0).view(2, 5), torch.tensor([0, 2, 5]), jagged_dim=2
    ),
    "no rows": torch.zeros(0, 3),
}


@pytest.mark.parametrize("name", COLUMNS)
def test_writing_to_the_memory_of_a_received_column_of_any_dtype_changes_no_other_reader(name):
    """Also through numpy, and the offsets of a jagged column: a received batch hands out private memory only."""
    mine, other = two_readers(DataProto.from_dict({"x": COLUMNS[name]}))
    for part in [mine.batch["x"].values(), mine.batch["x"].offsets()] if COLUMNS[name].is_nested else [mine.batch["x"]]:
        part.reshape(-1).view(torch.uint8).numpy()[:] = 77
        part.zero_()
    assert all_bytes(other.batch["x"]) == all_bytes(COLUMNS[name])


def test_a_received_batch_sent_on_in_this_process_still_guards_its_memory():
    mine, other = two_readers(three_rows())
    buffers: list[pickle.PickleBuffer] = []
    again = pickle.loads(pickle.dumps(mine, protocol=5, buffer_callback=buffers.append), buffers=buffers)
    write_batch(again)
    assert obs(other) == [[1, 2], [3, 4], [5, 6]]


def test_views_of_a_received_batch_are_views_of_its_private_copy():
    """As with a local batch, a write through a view shows in the batch that was sliced."""
    mine, _ = two_readers(three_rows())
    mine[1:].batch["obs"][0, 0] = 30
    mine.select(["obs"]).batch["obs"][0, 0] = 10
    assert obs(mine) == [[10, 2], [30, 4], [5, 6]]


def test_forwarding_copies_nothing_and_select_copies_only_the_selected_columns():
    data = DataProto.from_dict({"obs": torch.zeros(3), "big": torch.zeros(3)})
    mine, _ = two_readers(data)
    before = {name: tensor.data_ptr() for name, tensor in mine._tensors().items()}
    pickle.dumps(mine, protocol=5), DataProto.concat([mine, mine]), mine[[0, 1]], mine.get_data_info(), mine.repeat(2)
    assert {name: tensor.data_ptr() for name, tensor in mine._tensors().items()} == before
    selected = mine.select(["obs"])
    assert mine._tensors()["big"].data_ptr() == before["big"] and mine._tensors()["obs"].data_ptr() != before["obs"]
    assert selected.batch["obs"].data_ptr() == mine.batch["obs"].data_ptr()
    owned = mine.batch["big"].data_ptr()
    assert owned != before["big"] and mine.batch["big"].data_ptr() == owned


@pytest.mark.timeout(120)
def test_writing_to_a_batch_from_ray_changes_no_other_reader(ray_cluster):
    """Ray maps received buffers writable: without the copy the second reader would see the first one's write."""
    data = DataProto.from_dict({"obs": torch.ones(1000, 1000)}, {"weight": np.ones(1000)})
    reference = ray.put(data)
    mine, other = ray.get(reference), ray.get(reference)
    assert mine._tensors()["obs"].data_ptr() == other._tensors()["obs"].data_ptr(), "received without a copy"
    mine.batch["obs"].zero_()
    mine.non_tensor_batch["weight"][:] = 0
    for reader in (other, ray.get(reference)):
        assert bool((reader.batch["obs"] == 1).all()) and bool((reader.non_tensor_batch["weight"] == 1).all())
