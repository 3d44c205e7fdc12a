"""Serialization of batches: pickle in every protocol, and files."""

import copy
import os
import pickle
import resource
from fractions import Fraction
from itertools import accumulate

import numpy as np
import pytest
import torch

from hybridrl.data_plane.meta_info import UpdatePlan
from hybridrl.errors import DataError
from hybridrl.protocol import (
    DataProto,
    deserialize_single_tensor,
    deserialize_tensordict,
    serialize_single_tensor,
    serialize_tensordict,
)
from tests.support.data_plane.sample_batches import jagged, labels, obs, round_trip, three_rows

pytestmark = pytest.mark.timeout(60)

TENSORS = {
    "bf16": torch.tensor([[1.5, -2.0], [0.0, 3.0]], dtype=torch.bfloat16),
    "fp8": torch.tensor([[1.0, 2.0], [4.0, 0.5]]).to(torch.float8_e4m3fn),
    "fp8 with range": torch.tensor([[1.0, 2.0], [4.0, 57344.0]]).to(torch.float8_e5m2),
    "bool": torch.tensor([True, False]),
    "uint16": torch.tensor([1, 65535], dtype=torch.uint16),
    "complex": torch.tensor([1 + 2j, 3 - 1j]),
    "conjugated": torch.tensor([1 + 2j, 3 - 1j]).conj(),
    "negated": torch.tensor([1 + 2j, 3 - 1j]).conj().imag,
    "transposed": torch.arange(6).reshape(3, 2).t(),
    "every second": torch.arange(8.0).reshape(4, 2)[::2],
    "expanded": torch.tensor([[7], [8]]).expand(2, 1000),
    "no columns": torch.zeros(2, 0),
    "jagged": jagged([1.0, 2.0, 3.0], [4.0], dtype=torch.float16),
    "jagged wide": torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(1, 3)], layout=torch.jagged),
    "jagged last": torch.nested.nested_tensor_from_jagged(
        torch.arange(10.0).view(2, 5), torch.tensor([0, 2, 5]), jagged_dim=2
    ),
    "jagged with holes": torch.nested.narrow(
        torch.arange(12.0).view(2, 6), 1, torch.tensor([0, 1]), torch.tensor([2, 3]), layout=torch.jagged
    ),
    "gradient": torch.tensor([1.0, 2.0], requires_grad=True),
}


def plain_rows(tensor: torch.Tensor) -> list:
    return [row.to(torch.complex64 if row.is_complex() else torch.float64).tolist() for row in tensor.detach().unbind()]


@pytest.mark.parametrize("name", TENSORS)
@pytest.mark.parametrize("way", ["out of band", "read-only", "in band", "protocol 4", "deepcopy", "disk"])
def test_every_tensor_arrives_as_it_was(name, way, tmp_path):
    data = DataProto.from_dict({"x": TENSORS[name]}, meta_info={"k": 1})
    data.save_to_disk(tmp_path / "batch")
    back = {
        "out of band": lambda: round_trip(data),
        "read-only": lambda: round_trip(data, freeze=True),
        "in band": lambda: pickle.loads(pickle.dumps(data, protocol=5)),
        "protocol 4": lambda: pickle.loads(pickle.dumps(data, protocol=4)),
        "deepcopy": lambda: copy.deepcopy(data),
        "disk": lambda: DataProto.load_from_disk(tmp_path / "batch"),
    }[way]()
    assert back.batch["x"].dtype == TENSORS[name].dtype and plain_rows(back.batch["x"]) == plain_rows(TENSORS[name])
    for part in (back, back[:0], back[1:]):
        assert plain_rows(round_trip(part).batch["x"]) == plain_rows(part.batch["x"])
    assert not back.batch["x"].requires_grad and back.meta_info == {"k": 1}


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.bool, torch.complex64, torch.uint16]
)
@pytest.mark.parametrize("shape", ["dense", "jagged", "no rows"])
def test_pickle_5_sends_every_dtype_out_of_band(dtype, shape):
    rows = {"dense": [4000, 4000], "jagged": [3000, 5000], "no rows": []}[shape]
    values = torch.ones(sum(rows)).to(dtype)
    offsets = torch.tensor([0, *accumulate(rows)])
    column = (
        torch.nested.nested_tensor_from_jagged(values, offsets)
        if shape == "jagged"
        else values.reshape(len(rows), -1 if rows else 7)
    )
    buffers: list[pickle.PickleBuffer] = []
    payload = pickle.dumps(DataProto.from_dict({"x": column}), protocol=5, buffer_callback=buffers.append)
    assert len(payload) < 500
    assert sum(b.raw().nbytes for b in buffers) == values.nbytes + (offsets.nbytes if shape == "jagged" else 0)


def test_pickle_5_sends_all_numbers_out_of_band_and_of_a_view_only_its_rows():
    data = DataProto.from_dict({"x": torch.zeros(1000, 1000), "y": torch.zeros(1000, 2)})
    data.non_tensor_batch["weight"] = np.zeros((1000, 300))[:, ::3]
    data.non_tensor_batch["text"] = np.array(["t"] * 1000, dtype=object)
    buffers: list[pickle.PickleBuffer] = []
    payload = pickle.dumps(data[:10], protocol=5, buffer_callback=buffers.append)
    assert sorted(b.raw().nbytes for b in buffers) == [10 * 2 * 4, 10 * 100 * 8, 10 * 1000 * 4]
    assert len(payload) < 2000


@pytest.mark.parametrize("read_only", [False, True])
@pytest.mark.parametrize("name", ["bf16", "transposed", "jagged wide"])
def test_deserialized_tensors_are_equal_and_may_be_written_to(name, read_only):
    batch = DataProto.from_dict({"x": TENSORS[name]}).batch
    wrap = bytes if read_only else bytearray
    encoded = serialize_single_tensor(TENSORS[name], wrap=wrap)
    whole = pickle.dumps(serialize_tensordict(batch), protocol=5)
    for back in (deserialize_single_tensor(encoded), deserialize_tensordict(pickle.loads(whole))["x"]):
        assert back.dtype == TENSORS[name].dtype and plain_rows(back) == plain_rows(TENSORS[name])
        back.zero_()
    assert plain_rows(deserialize_single_tensor(encoded)) == plain_rows(
        TENSORS[name] if read_only else TENSORS[name] * 0
    )


def test_disk_keeps_all_three_parts_and_leaves_no_other_file(tmp_path):
    data = three_rows(
        steps=[1, 2], scale=np.float32(0.5), nested={"t": torch.tensor([1.0], dtype=torch.bfloat16)}, pair=(1, None)
    )
    data.non_tensor_batch["prompt"] = np.array(
        [np.array([{"role": "user"}], dtype=object), {"a": (1, 2)}, 1 + 2j], dtype=object
    )
    data.save_to_disk(tmp_path / "batch")
    assert os.listdir(tmp_path) == ["batch"]
    back = DataProto.load_from_disk(tmp_path / "batch")
    assert (
        obs(back) == obs(data)
        and labels(back) == labels(data)
        and back.non_tensor_batch["weight"].tolist() == [0.5, 1.5, 2.5]
    )
    assert back.non_tensor_batch["prompt"][0][0] == {"role": "user"} and back.meta_info["pair"] == (1, None)
    assert back.meta_info["nested"]["t"].dtype == torch.bfloat16 and back.meta_info["scale"] == np.float32(0.5)
    back.batch["obs"][0, 0] = 9


def test_disk_refuses_values_that_are_not_plain_data_and_keeps_the_old_file(tmp_path):
    path = tmp_path / "batch"
    three_rows().save_to_disk(path)
    with pytest.raises(DataError, match=r"fractions\.Fraction is not plain data"):
        three_rows(share=Fraction(1, 2)).save_to_disk(path)
    assert os.listdir(tmp_path) == ["batch"] and len(DataProto.load_from_disk(path)) == 3


class _RunsCode:
    def __reduce__(self):
        return os.mkdir, (_RunsCode.target,)


@pytest.mark.parametrize("kind", ["code", "truncated", "other pickle", "text"])
def test_a_file_that_is_no_batch_is_refused_and_runs_nothing(kind, tmp_path):
    path = tmp_path / "batch"
    three_rows().save_to_disk(path)
    _RunsCode.target = str(tmp_path / "made")
    content = {
        "code": pickle.dumps(_RunsCode()),
        "truncated": path.read_bytes()[:200],
        "other pickle": pickle.dumps({1: 2}),
        "text": b"obs,1",
    }
    path.write_bytes(content[kind])
    with pytest.raises(DataError, match="batch"):
        DataProto.load_from_disk(path)
    assert not (tmp_path / "made").exists()


class _Made:
    """Is written to a file as a call of `function`, whose result then gets a state."""

    def __init__(self, function, *arguments, state=None):
        self.function, self.arguments, self.state = function, arguments, state

    def __reduce__(self):
        return self.function, self.arguments, self.state


def hostile_files() -> dict[str, tuple[bytes, str]]:
    """Return files by what they would do, each with the reason of its refusal."""

    def file(value) -> bytes:
        return pickle.dumps(("hybridrl.DataProto", 1, None, {}, {"value": value}), protocol=3)

    outside = {"at": (np.dtype("O"), -4096)}  # a field before the array: what lies there would be read as an object
    dtype = _Made(np.dtype, "U2", False, True, state=(3, "<", None, ("at",), outside, 8, 4, 8))
    address = _Made(np.dtype, "U2", False, True, state=(3, "<", None, None, None, 8, 4, 63))
    again = pickle.dumps((1, (1,), np.dtype("i8"), False, b"12345678"), protocol=3)[2:-1] + pickle.BUILD + pickle.STOP
    plan = f"{UpdatePlan.__module__}\n{UpdatePlan.__name__}\n".encode()
    start = pickle.PROTO + b"\5"
    return {
        "read other memory": (file(_Made(np.ndarray, (1,), dtype, b"12345678")), "the state of a StrDType"),
        "use a text as an address": (file(_Made(np.ndarray, (1,), address, b"12345678")), "the state of a StrDType"),
        "have fields": (file(_Made(np.dtype, "i4,O", False, True)), "no arrays with fields"),
        "fill an array again": (pickle.dumps(np.arange(2), protocol=3)[:-1] + again, "the state of a ndarray"),
        "take terabytes": (file(_Made(np.ndarray, (10**13,), "u1")), "object is not callable"),
        "change a class": (start + pickle.GLOBAL + plan + pickle.EMPTY_DICT + b"b.", "the state of a type"),
        "take 34 GB for its memo": (start + b"Nr\xff\xff\xff\x7f.", "NoneType"),
        "take 8 GB for bytes": (start + pickle.BYTEARRAY8 + (8 << 30).to_bytes(8, "little") + b".", ""),
    }


@pytest.mark.parametrize("what", hostile_files())
def test_a_file_neither_changes_nor_reads_memory_and_takes_what_it_holds(what, tmp_path):
    content, reason = hostile_files()[what]
    (tmp_path / "batch").write_bytes(content)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(DataError, match=f"batch is not a batch file or is damaged: .*{reason}"):
        DataProto.load_from_disk(tmp_path / "batch")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 500_000, "KiB"


@pytest.mark.parametrize("code", ["?", "i1", ">i4", "f2", "c8", "U5", "S3", "M8[s]", "m8[3h]", "O"])
def test_every_kind_of_array_arrives_from_a_file(code, tmp_path):
    column = np.array([1, 0, 1]).astype(code)
    saved = DataProto(non_tensor_batch={"x": column}, meta_info={"view": column[::2], "one": column[0]})
    saved.save_to_disk(tmp_path / "batch")
    back = DataProto.load_from_disk(tmp_path / "batch")
    for found, expected in ((back.non_tensor_batch["x"], column), (back.meta_info["view"], column[::2])):
        assert found.dtype in (expected.dtype, expected.dtype.newbyteorder("=")) and found.tolist() == expected.tolist()
    assert back.meta_info["one"] == column[0] and type(back.meta_info["one"]) is type(column[0])


def test_an_array_with_fields_is_refused_before_it_is_written(tmp_path):
    with pytest.raises(DataError, match="no arrays with fields"):
        three_rows(pairs=np.zeros(2, [("a", "i4"), ("b", "f4")])).save_to_disk(tmp_path / "batch")
    assert not os.listdir(tmp_path)
