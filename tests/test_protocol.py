"""`DataProto`: construction, rows, columns, and splitting and joining batches."""

import copy
import pickle
import subprocess
import sys

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from hybridrl.data_plane.columns import deep_equal
from hybridrl.errors import DataError
from hybridrl.protocol import (
    DataProto,
    DataProtoItem,
    collate_fn,
    list_of_dict_to_dict_of_list,
    union_numpy_dict,
    union_tensor_dict,
    union_two_dict,
)
from tests.support.data_plane.sample_batches import jagged, labels, obs, three_rows

pytestmark = pytest.mark.timeout(60)


# Construction.


def test_from_dict_makes_lists_object_arrays_and_an_empty_dict_no_batch():
    data = DataProto.from_dict(non_tensors={"labels": ["a", "b"], "turns": [[1], [2, 3]]})
    assert data.batch is None and len(data) == 2
    assert data.non_tensor_batch["turns"].dtype == object and data.non_tensor_batch["turns"].tolist() == [[1], [2, 3]]
    images = DataProto.from_dict(non_tensors={"image": [np.zeros((2, 3)), np.zeros((2, 4))]})
    assert images.non_tensor_batch["image"][1].shape == (2, 4)


def test_from_single_dict_sorts_columns_by_type_and_keeps_the_class():
    class Custom(DataProto):
        pass

    data = Custom.from_single_dict({"x": torch.zeros(2), "y": np.zeros(2)}, meta_info={"k": 1})
    assert type(data) is Custom and list(data.batch.keys()) == ["x"] and list(data.non_tensor_batch) == ["y"]
    batches = [
        data[:1],
        data[[0]],
        *data.chunk(2),
        data.repeat(2),
        pickle.loads(pickle.dumps(DataProto())),
        Custom.concat([data, data]),
    ]
    assert [type(batch) for batch in batches] == [Custom, Custom, Custom, Custom, Custom, DataProto, Custom]


def test_length_is_that_of_the_batch_then_of_the_first_array_then_zero():
    array = np.array(["a", "b"], dtype=object)
    assert len(DataProto(TensorDict({}, batch_size=[5]))) == 5
    assert len(DataProto(None, {"labels": array})) == 2
    assert len(DataProto(None, None, {"k": 1})) == 0


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: DataProto.from_dict({"a": torch.zeros(2), "b": torch.zeros(3)}), DataError, "{'a': 2, 'b': 3}"),
        (
            lambda: DataProto.from_dict({"a": torch.zeros(2)}, {"n": ["x"]}),
            DataError,
            "'n' has 1 rows, the batch has 2",
        ),
        (lambda: DataProto.from_dict({"a": torch.tensor(1.0)}), DataError, "'a' has no row dimension"),
        (lambda: DataProto.from_dict({"a": [1, 2]}), TypeError, "'a' is list"),
        (lambda: DataProto.from_dict({"a": torch.zeros(2, 2)}, num_batch_dims=2), DataError, "num_batch_dims=2"),
        (
            lambda: DataProto.from_dict({"a": torch.nested.nested_tensor([torch.zeros(2)])}),
            DataError,
            "'a'.*layout=torch.jagged",
        ),
        (lambda: DataProto.from_dict({"a": torch.eye(2).to_sparse()}), DataError, "'a'.*to_dense"),
        (lambda: DataProto.from_single_dict({"a": [1, 2]}), DataError, "'a' is list"),
        (lambda: DataProto(TensorDict({"a": torch.zeros(2, 3)}, batch_size=[2, 3])), DataError, r"\(2, 3\)"),
        (lambda: DataProto({"a": torch.zeros(2)}), TypeError, "from_dict"),
        (lambda: DataProto(None, {"n": [1, 2]}), TypeError, "'n' is list"),
        (
            lambda: DataProto(TensorDict({"in": TensorDict({}, batch_size=[2])}, batch_size=[2])),
            TypeError,
            "'in' is TensorDict",
        ),
        (lambda: DataProto(meta_info=[]), TypeError, "dicts"),
    ],
)
def test_what_is_no_batch_is_refused_by_name(make, error, message):
    with pytest.raises(error, match=message):
        make()


def test_check_consistency_finds_an_array_that_was_put_in_later():
    data = three_rows()
    data.non_tensor_batch["late"] = np.zeros(2)
    with pytest.raises(DataError, match="'late' has 2 rows, the batch has 3"):
        data.check_consistency()


# Rows.


def test_getitem_picks_one_row_a_view_or_a_copy():
    data = three_rows(k=1)
    row = data[-1]
    assert isinstance(row, DataProtoItem) and row.batch["obs"].tolist() == [5, 6]
    assert row.non_tensor_batch["labels"] == "c" and row.meta_info == {"k": 1}
    for pick in ([2, 0], np.array([2, -3]), torch.tensor([-1, 0]), [np.int64(2), np.int64(0)]):
        assert obs(data[pick]) == [[5, 6], [1, 2]] and labels(data[pick]) == ["c", "a"]
    for mask in ([True, False, True], np.array([True, False, True]), torch.tensor([1, 0, 1]).bool()):
        assert labels(data[mask]) == ["a", "c"]
    assert len(data[[]]) == 0 and list(data[[]].batch.keys()) == ["obs"]
    assert labels(data[::-1]) == ["c", "b", "a"] and labels(data[1:]) == ["b", "c"] and labels(data[5:2]) == []
    assert labels(collate_fn([data[0], data[2]])) == ["a", "c"] and obs(collate_fn([data[0], data[2]])) == [
        [1, 2],
        [5, 6],
    ]


@pytest.mark.parametrize(
    ("pick", "error", "message"),
    [
        ([3], IndexError, "row 3 is not in a batch of 3 rows"),
        (-4, IndexError, "row -4"),
        ([True, False], DataError, "2 entries.*3 rows"),
        ([0.0, 1.0], TypeError, "float64"),
        (torch.zeros(1, 1, dtype=torch.int64), DataError, "flat"),
        ("obs", TypeError, "str"),
    ],
)
def test_rows_that_do_not_exist_are_refused(pick, error, message):
    with pytest.raises(error, match=message):
        three_rows()[pick]


def test_slices_and_chunks_are_views_and_selected_rows_are_copies():
    data = three_rows()
    data[1:].batch["obs"][0, 0] = 30
    data.chunk(3)[2].batch["obs"][0, 0] = 50
    data.select(["obs"]).batch["obs"][0, 0] = 10
    assert obs(data) == [[10, 2], [30, 4], [50, 6]]
    for copied in (data[[0, 1, 2]], data[::2], data.repeat(1), DataProto.concat([data])):
        copied.batch["obs"].zero_()
        copied.non_tensor_batch["weight"][:] = 0
    assert obs(data) == [[10, 2], [30, 4], [50, 6]] and data.non_tensor_batch["weight"].tolist() == [0.5, 1.5, 2.5]


def test_repeat_reorder_and_padding_by_hand():
    data = three_rows()
    assert labels(data.repeat(2)) == ["a", "a", "b", "b", "c", "c"] and obs(data.repeat(2))[:3] == [
        [1, 2],
        [1, 2],
        [3, 4],
    ]
    assert labels(data.repeat(2, interleave=False)) == ["a", "b", "c", "a", "b", "c"]
    for times in ([2, 0, 1], (2, 0, 1), np.array([2, 0, 1]), torch.tensor([2, 0, 1])):
        assert labels(data.sample_level_repeat(times)) == ["a", "a", "c"]
    with pytest.raises(ValueError, match=r"3 counts.*\[1, 2\]"):
        data.sample_level_repeat([1, 2])
    data.reorder(torch.tensor([2, 0, 1]))
    assert labels(data) == ["c", "a", "b"] and obs(data) == [[5, 6], [1, 2], [3, 4]]
    data.padding(2)
    assert labels(data) == ["c", "a", "b", "b", "b"]
    data.padding(1, "first")
    assert labels(data) == ["c", "a", "b", "b", "b", "c"]


def test_unfold_column_chunks_cuts_some_columns_and_repeats_the_others():
    tensors = {"x": torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]]), "y": torch.tensor([[1], [2]])}
    data = DataProto.from_dict(tensors, {"l": [["a", "b"], ["c", "d"]]})
    cut = data.unfold_column_chunks(2, split_keys=["x", "l"])
    assert cut.batch["x"].tolist() == [[1, 2], [3, 4], [5, 6], [7, 8]] and cut.batch["y"].tolist() == [
        [1],
        [1],
        [2],
        [2],
    ]
    assert cut.non_tensor_batch["l"].tolist() == [["a"], ["b"], ["c"], ["d"]]
    with pytest.raises(DataError, match=r"'x'.* \(2, 4\).* 3 equal parts"):
        data.unfold_column_chunks(3, split_keys=["x"])


def test_iterator_covers_all_rows_each_epoch_and_the_seed_decides_the_order():
    data = DataProto.from_dict({"obs": torch.arange(12)}, {"labels": [str(i) for i in range(12)]}, {"k": 1})
    assert [obs(b) for b in data.make_iterator(6, epochs=1)] == [[0, 1, 2, 3, 4, 5], [6, 7, 8, 9, 10, 11]]
    runs = [list(data.make_iterator(4, epochs=2, seed=seed, dataloader_kwargs={"shuffle": True})) for seed in (1, 1, 2)]
    orders = [[row for batch in run for row in obs(batch)] for run in runs]
    assert orders[0] == orders[1] != orders[2] and orders[0][:12] != orders[0][12:]
    assert sorted(orders[0][:12]) == sorted(orders[0][12:]) == list(range(12))
    assert all(labels(b) == [str(i) for i in obs(b)] and b.meta_info == {"k": 1} for b in runs[0])
    with pytest.raises(ValueError, match="12 rows.*mini-batches of 5"):
        data.make_iterator(5, epochs=1)


# Columns.


def test_select_takes_named_columns_and_refuses_unknown_ones_by_name():
    data = three_rows(k=1, m=[2])
    assert labels(data.select()) == ["a", "b", "c"] and data.select().meta_info is data.meta_info
    part = data.select(batch_keys=[], non_tensor_batch_keys=["labels"], meta_info_keys=["k"])
    assert (
        len(part) == 3
        and list(part.batch.keys()) == []
        and list(part.non_tensor_batch) == ["labels"]
        and part.meta_info == {"k": 1}
    )
    deep = data.select(deepcopy=True)
    deep.meta_info["m"].append(3)
    deep.non_tensor_batch["weight"][0] = 9
    assert data.meta_info["m"] == [2] and data.non_tensor_batch["weight"][0] == 0.5
    with pytest.raises(DataError, match="'advantages' is not in the batch; there are"):
        data.select(batch_keys=["advantages"])


def test_pop_removes_what_it_returns_and_nothing_when_one_is_missing():
    data = three_rows(k=1, m=2)
    with pytest.raises(DataError, match="'nope'"):
        data.pop(batch_keys=["obs"], non_tensor_batch_keys=["nope"])
    popped = data.pop(["obs"], meta_info_keys=["m"])
    assert obs(popped) == [[1, 2], [3, 4], [5, 6]] and popped.meta_info == {"m": 2} and not popped.non_tensor_batch
    assert list(data.batch.keys()) == [] and data.meta_info == {"k": 1} and len(data) == 3
    assert data.pop(non_tensor_batch_keys=["labels"]).batch is None


def test_rename_is_in_place_and_may_swap():
    data = DataProto.from_dict({"x": torch.zeros(1), "y": torch.ones(1)})
    assert data.rename(["x", "y"], ["y", "x"]) is data and data.batch["y"].item() == 0 and data.batch["x"].item() == 1
    assert sorted(data.rename("x", "z").batch.keys()) == ["y", "z"]
    for keys, error in (
        (("z", ["y", "q"]), ValueError),
        ((1, "y"), TypeError),
        (("z", "y"), DataError),
        (("nope", "q"), DataError),
    ):
        with pytest.raises(error):
            data.rename(*keys)


def test_union_accepts_equal_overlap_with_nan_and_returns_itself():
    nan = float("nan")
    arrays = {"o": [{"s": nan}, [nan, "t"]], "w": np.array([nan, 1.0])}
    data = DataProto.from_dict({"x": torch.tensor([1.0, nan])}, arrays, {"t": np.array([nan])})
    other = copy.deepcopy(data)
    other.batch["y"] = torch.tensor([3, 4])
    other.meta_info["k"] = 1
    assert data.union(other) is data and data.batch["y"].tolist() == [3, 4] and data.meta_info["k"] == 1
    assert DataProto(meta_info={"a": 1}).union(data).batch["y"].tolist() == [3, 4]


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"tensors": {"new": torch.zeros(3), "obs": torch.zeros(3, 2, dtype=torch.int64)}}, "tensor column 'obs'"),
        (
            {"tensors": {"new": torch.zeros(3), "obs": torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])}},
            "tensor column 'obs'",
        ),
        ({"tensors": {"new": torch.zeros(3)}, "non_tensors": {"labels": ["a", "b", "d"]}}, "'labels'"),
        ({"tensors": {"new": torch.zeros(3)}, "meta_info": {"k": 2}}, "meta_info key 'k'"),
        ({"tensors": {"new": torch.zeros(4)}}, "3 rows.*4 rows"),
    ],
)
def test_union_of_different_content_is_refused_and_changes_nothing(other, message):
    data = three_rows(k=1)
    with pytest.raises(DataError, match=message):
        data.union(DataProto.from_dict(**other))
    assert list(data.batch.keys()) == ["obs"] and data.meta_info == {"k": 1}


def test_union_functions_merge_in_place():
    first, second = (
        TensorDict({"a": torch.ones(2)}, batch_size=[2]),
        TensorDict({"a": torch.ones(2), "b": torch.zeros(2)}, batch_size=[2]),
    )
    assert union_tensor_dict(first, second) is first and sorted(first.keys()) == ["a", "b"]
    with pytest.raises(DataError, match="2.*3"):
        union_tensor_dict(first, TensorDict({}, batch_size=[3]))
    arrays = {"a": np.array([float("nan"), "nan"], dtype=object)}
    assert (
        union_numpy_dict(arrays, {"a": np.array([float("nan"), "nan"], dtype=object), "b": np.zeros(2)}) is arrays
        and "b" in arrays
    )
    with pytest.raises(DataError, match="'a'"):
        union_two_dict({"a": 1}, {"a": 2})
    assert list_of_dict_to_dict_of_list([{"a": 1, "b": 2}, {"a": 3, "b": 4}]) == {"a": [1, 3], "b": [2, 4]}
    with pytest.raises(DataError, match=r"\['b'\]"):
        list_of_dict_to_dict_of_list([{"a": 1}, {"a": 1, "b": 2}])


def test_tensordict_round_trip_keeps_all_three_parts():
    data = three_rows(temperature=0.5, names=["x", "y"])
    back = DataProto.from_tensordict(data.to_tensordict())
    assert obs(back) == obs(data) and labels(back) == labels(data) and back.meta_info == data.meta_info
    assert back.non_tensor_batch["weight"].dtype == np.float64
    assert len(DataProto.from_tensordict(data[:0].to_tensordict())) == 0
    with pytest.raises(DataError, match="'obs'"):
        three_rows(obs=1).to_tensordict()


def test_arrays_keep_their_dtype_and_shape_row_by_row_and_lists_stay_lists():
    arrays = {"two": np.array([[0.5, 1.5], [2.5, 3.5]], dtype=np.float32), "n": np.array([1, 2], dtype=np.int16)}
    data = DataProto(None, {**arrays, "lists": np.empty(2, dtype=object)})
    data.non_tensor_batch["lists"][:] = [[1, 2], [3, 4]]
    for back in (DataProto.from_tensordict(data.to_tensordict()), collate_fn([data[0], data[1]])):
        assert all(
            np.array_equal(back.non_tensor_batch[k], v) and back.non_tensor_batch[k].dtype == v.dtype
            for k, v in arrays.items()
        )
        assert back.non_tensor_batch["lists"].shape == (2,) and back.non_tensor_batch["lists"][1] == [3, 4]


def test_a_tensordict_without_columns_keeps_its_rows():
    assert len(DataProto.from_tensordict(DataProto(TensorDict({}, batch_size=[3])).to_tensordict())) == 3
    assert DataProto.from_tensordict(TensorDict({}, batch_size=[])).batch is None


def test_a_complex_number_with_nan_in_one_part_still_differs_in_the_other():
    first, second = complex(float("nan"), 1), complex(float("nan"), 2)
    for make in (torch.tensor, np.array, list):
        assert deep_equal(make([first]), make([first])) and not deep_equal(make([first]), make([second]))


def test_reports_name_shapes_and_sizes(caplog):
    data = three_rows(names=["x"], stats={"loss": 1.0})
    info = data.get_data_info().splitlines()
    assert "  obs: (3, 2) (torch.int64) cpu" in info and "  labels: ndarray(3,) (object)" in info
    assert "  names: list[str]" in info and "  stats: dict[str: float]" in info
    with caplog.at_level("INFO"):
        data.print_size("rollout")
    assert caplog.messages == ["rollout, Size of tensordict: 0.000000 GB, size of non_tensor_batch: 0.000000 GB"]
    assert repr(data) == "DataProto(3 rows of obs, labels, weight; meta_info ['names', 'stats'])"
    assert data.to("cpu") is data


# Chunks.


def test_chunk_is_equal_or_the_error_names_both_numbers_and_the_fix():
    data = three_rows(k=1)
    assert [labels(batch) for batch in data.chunk(3)] == [["a"], ["b"], ["c"]] and data.chunk(3)[1].meta_info == {
        "k": 1
    }
    for cut in (data.chunk, data.chunk_uneven, data.split):
        with pytest.raises(ValueError, match="at least 1"):
            cut(0)
    with pytest.raises(ValueError, match="3 rows.*2 equal.*pad_dataproto_to_divisor.*chunk_uneven"):
        data.chunk(2)


def test_uneven_chunks_are_larger_first_and_join_to_the_whole():
    data = three_rows()
    assert [len(batch) for batch in data.repeat(4).chunk_uneven(5)] == [3, 3, 2, 2, 2]
    batches = data.chunk_uneven(5)
    assert [labels(batch) for batch in batches] == [["a"], ["b"], ["c"], [], []] and list(batches[4].batch.keys()) == [
        "obs"
    ]
    whole = DataProto.concat(batches)
    assert (
        obs(whole) == obs(data)
        and labels(whole) == labels(data)
        and whole.non_tensor_batch["weight"].dtype == np.float64
    )
    empty = DataProto.concat(batches[3:])
    assert len(empty) == 0 and empty.batch["obs"].shape == (0, 2) and empty.non_tensor_batch["labels"].shape == (0,)
    assert [labels(batch) for batch in data.split(2)] == [["a", "b"], ["c"]]


def test_concat_merges_metrics_and_keeps_other_meta_info():
    metrics = ({"loss": 1.0, "lr": [0.1, 0.2]}, [{"loss": 2.0}, {"loss": 3.0, "kl": 0.5}], None)
    batches = [
        DataProto.from_dict({"x": torch.ones(i)}, meta_info={"metrics": m, "t": 1.0}) for i, m in enumerate(metrics)
    ]
    batches[2].meta_info["only"] = "here"
    joined = DataProto.concat(batches)
    assert joined.meta_info == {
        "t": 1.0,
        "only": "here",
        "metrics": {"loss": [1.0, 2.0, 3.0], "lr": [0.1, 0.2], "kl": [0.5]},
    }
    # Concatenating a concatenation adds no nesting.
    assert DataProto.concat([joined, batches[1]]).meta_info["metrics"]["loss"] == [1.0, 2.0, 3.0, 2.0, 3.0]


@pytest.mark.parametrize(
    ("second", "message"),
    [
        (DataProto.from_dict({"y": torch.zeros(1)}), r"parts 0 and 1.*\['x', 'y'\]"),
        (DataProto.from_dict({"x": torch.zeros(1, 3)}), r"'x'.*\(2,\).*\(3,\)"),
        (DataProto.from_dict({"x": torch.zeros(1, 2, dtype=torch.int64)}), "'x'.*float32.*int64"),
        (DataProto.from_dict({"x": jagged([1.0, 2.0])}), "'x'.*jagged"),
        (DataProto.from_dict({"x": torch.zeros(1, 2)}, meta_info={"t": 2.0}), "'t': 1.0 and 2.0"),
        (DataProto.from_dict({"x": torch.zeros(1, 2)}, {"n": np.zeros(1)}), r"\['n'\]"),
    ],
)
def test_concat_of_batches_that_do_not_fit_is_refused_by_name(second, message):
    with pytest.raises(DataError, match=message):
        DataProto.concat([DataProto.from_dict({"x": torch.zeros(1, 2)}, meta_info={"t": 1.0}), second])


def test_concat_takes_only_batches_and_at_least_one():
    for wrong in ([], [three_rows(), {"obs": 1}]):
        with pytest.raises(TypeError, match="one or more DataProto"):
            DataProto.concat(wrong)


def test_concat_skips_the_columns_of_batches_without_rows():
    """A worker without rows may know neither the width nor the dtype of the others' columns."""
    joined = DataProto.concat([DataProto(), three_rows(), DataProto.from_dict({"obs": torch.zeros(0, 0)})])
    assert obs(joined) == [[1, 2], [3, 4], [5, 6]]


def test_lists_of_equal_length_in_one_piece_join_with_uneven_ones_of_another():
    batches = [DataProto.from_dict(non_tensors={"ids": ids}) for ids in ([[1, 2], [3, 4]], [[5], [6, 7, 8]])]
    assert DataProto.concat(batches).non_tensor_batch["ids"].tolist() == [[1, 2], [3, 4], [5], [6, 7, 8]]


def test_importing_the_protocol_loads_neither_ray_nor_transformers():
    code = (
        "import sys, hybridrl.protocol; print(sorted({'ray', 'transformers', 'vllm', 'datasets', 'megatron'} "
        "& set(sys.modules)))"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert answer.stdout.splitlines()[-1] == "[]"
