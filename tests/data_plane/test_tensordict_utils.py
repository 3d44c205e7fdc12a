"""TensorDicts as batches: columns stay columns, and values of the whole batch stay such."""

import copy
import pickle

import numpy as np
import pytest
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict

from hybridrl.data_plane import tensordict_utils as tu
from hybridrl.errors import DataError
from tests.support.data_plane.sample_batches import jagged

pytestmark = pytest.mark.timeout(60)

TURNS = [[], [0.5, 0.8], {"acc": 1.0}, [[{"role": "user"}], None]]


def four_rows(**meta) -> TensorDict:
    """Rows 0 to 3: tensors, jagged tensors with either dimension ragged, and objects."""
    position_ids = tu.nested_tensor_from_tensor_list([torch.arange(n).expand(3, n) + 10 * n for n in (2, 5, 5, 1)])
    top_k = tu.nested_tensor_from_tensor_list([torch.full((n, 2), float(n)) for n in (1, 0, 3, 2)], ragged_idx=1)
    columns = {
        "obs": torch.arange(8).view(4, 2),
        "ids": jagged([0], [1, 2], [3], [4, 5, 6]),
        "position_ids": position_ids,
    }
    return tu.get_tensordict({**columns, "top_k": top_k, "turns": TURNS, "label": np.array(["a", "b", "c", "d"])}, meta)


def rows(td: TensorDict) -> list[tuple]:
    """Everything in each row, as Python values."""
    columns = []
    for key in ("obs", "ids", "position_ids", "top_k", "turns", "label"):
        column = tu.get(td, key)
        columns.append([row.tolist() for row in unbind(column)] if isinstance(column, torch.Tensor) else column)
    return list(zip(*columns, strict=True))


def unbind(column: torch.Tensor) -> list[torch.Tensor]:
    """torch's own unbind splits along the wrong dimension where the ragged one is not the first."""
    if not column.is_nested:
        return list(column.unbind())
    return list(column.values().split(column.offsets().diff().tolist(), dim=column._ragged_idx - 1))


# Construction and entries.


def test_get_tensordict_keeps_columns_apart_from_values_of_the_whole_batch():
    td = four_rows(step=3, stop=["a", "b", "c", "d"], config=NonTensorData({"lr": 0.1}))
    assert tuple(td.batch_size) == (4,) and isinstance(td.get("turns"), NonTensorStack)
    assert tu.get(td, "turns") == TURNS and tu.get(td, "label") == ["a", "b", "c", "d"]
    assert (
        tu.get(td, "step") == 3 and tu.get(td, "stop") == ["a", "b", "c", "d"] and tu.get(td, "config") == {"lr": 0.1}
    )
    assert tuple(tu.get_tensordict({}, {"step": 1}).batch_size) == ()


@pytest.mark.parametrize(
    ("columns", "meta", "error", "message"),
    [
        ({"x": torch.zeros(2), "l": ["a"]}, {}, DataError, "{'x': 2, 'l': 1}"),
        ({"x": torch.zeros(2)}, {"x": 1}, DataError, r"\['x'\]"),
        ({"l": [torch.zeros(2)]}, {}, TypeError, "'l' is a list of tensors"),
        ({"l": "abc"}, {}, TypeError, "'l' is str"),
        ({"x": torch.tensor(1.0)}, {}, DataError, "'x' has no row dimension"),
        (
            {"x": torch.nested.nested_tensor([torch.zeros(1), torch.zeros(2)])},
            {},
            DataError,
            "'x'.*layout=torch.jagged",
        ),
    ],
)
def test_get_tensordict_refuses_by_name(columns, meta, error, message):
    with pytest.raises(error, match=message):
        tu.get_tensordict(columns, meta)


def test_lists_are_assigned_as_columns_and_all_else_as_one_value():
    td = TensorDict({"x": torch.zeros(2)}, batch_size=[2])
    stack = NonTensorStack(NonTensorData(1), NonTensorData(2))
    assert (
        tu.assign_non_tensor(td, turns=[[], [1]], name="run", wrapped=NonTensorData(0.3), stack=stack, pair=(1, 2))
        is td
    )
    assert [tu.get(td, key) for key in ("turns", "name", "wrapped", "stack", "pair")] == [
        [[], [1]],
        "run",
        0.3,
        [1, 2],
        (1, 2),
    ]
    tu.assign_non_tensor_data(td, "stop", ["a", "b"])
    assert tu.get_non_tensor_data(td, "stop", None) == ["a", "b"] and tu.get_non_tensor_data(td, "none", 7) == 7
    assert len(tu.index_select_tensor_dict(td, [0])["stop"]) == 2, (
        "a value of the whole batch, although its length equals the number of rows"
    )
    for wrong in ([1], NonTensorStack(NonTensorData(1))):
        with pytest.raises(DataError, match="'turns' has 1 values.* 2 rows"):
            tu.assign_non_tensor_stack(td, "turns", wrong)
    no_rows = TensorDict({}, batch_size=[])
    tu.assign_non_tensor_stack(no_rows, "turns", [1, 2])
    assert tu.get(no_rows, "turns") == [1, 2]


def test_get_and_pop_give_plain_values_and_the_default():
    td = four_rows(step=3)
    assert tu.get(td, "obs") is td["obs"] and tu.get(td, "none") is None and tu.get(td, "none", 1) == 1
    assert tu.unwrap_non_tensor_data(NonTensorData({"a": 1})) == {"a": 1} and tu.unwrap_non_tensor_data(5) == 5
    assert tu.pop(td, "turns") == TURNS and tu.pop(td, "step") == 3 and tu.pop(td, "none", 2) == 2
    assert tu.pop(td, "obs").tolist() == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert set(td.keys()) == {"ids", "position_ids", "top_k", "label"}


def test_get_keys_and_pop_keys_keep_rows_and_kinds_or_change_nothing():
    td = four_rows(step=3)
    some = tu.get_keys(td, ["obs", "step"])
    assert (
        set(some.keys()) == {"obs", "step"}
        and some["obs"].data_ptr() == td["obs"].data_ptr()
        and tu.get(some, "step") == 3
    )
    with pytest.raises(KeyError, match="'none'"):
        tu.pop_keys(td, ["obs", "none"])
    popped = tu.pop_keys(td, ["obs", "step", "turns"])
    assert tu.get(popped, "step") == 3 and tu.get(popped, "turns") == TURNS and tuple(popped.batch_size) == (4,)
    assert set(td.keys()) == {"ids", "position_ids", "top_k", "label"}


def test_a_list_of_dicts_becomes_dense_numbers_jagged_tensors_and_objects():
    rows = [{"n": torch.tensor(i), "ids": torch.arange(2), "text": "ab"[i]} for i in range(2)]
    td = tu.list_of_dict_to_tensordict(rows)
    assert td["n"].tolist() == [0, 1] and td["ids"].is_nested and td["ids"].offsets().tolist() == [0, 2, 4]
    assert tu.get(td, "text") == ["a", "b"]
    assert tu.list_of_dict_to_tensordict(rows[:1])["ids"].is_nested
    with pytest.raises(DataError, match="no dicts"):
        tu.list_of_dict_to_tensordict([])
    with pytest.raises(DataError, match=r"\['b'\]"):
        tu.list_of_dict_to_tensordict([{"a": 1}, {"a": 1, "b": 2}])


# Jagged tensors.


def test_a_jagged_tensor_of_a_list_is_ragged_where_asked_and_keeps_gradients():
    last = tu.nested_tensor_from_tensor_list([torch.ones(2, 1), torch.ones(2, 3)])
    first = tu.nested_tensor_from_tensor_list([torch.ones(1, 2), torch.ones(3, 2)], ragged_idx=1)
    assert (last._ragged_idx, tuple(last.values().shape)) == (2, (2, 4)) and (
        first._ragged_idx,
        tuple(first.values().shape),
    ) == (1, (4, 2))
    leaf = torch.ones(2, requires_grad=True)
    tu.nested_tensor_from_tensor_list([leaf, leaf * 3]).values().sum().backward()
    assert leaf.grad.tolist() == [4.0, 4.0]


@pytest.mark.parametrize(
    ("tensors", "ragged", "message"),
    [
        ([], None, "at least 1"),
        ([torch.tensor(1)], None, "at least 1"),
        ([torch.ones(1), torch.ones(1, 1)], None, r"\(1,\), \(1, 1\)"),
        ([torch.ones(2)], 2, r"ragged_idx=2 must be in \[1, 1\]"),
        ([torch.ones(2, 3), torch.ones(3, 3)], 2, "more than dimension 2"),
        ([torch.ones(2), torch.ones(2, dtype=torch.int64)], None, "int64"),
    ],
)
def test_tensors_that_do_not_form_a_jagged_one_are_refused(tensors, ragged, message):
    with pytest.raises(DataError, match=message):
        tu.nested_tensor_from_tensor_list(tensors, ragged)


def test_jagged_tensors_are_concatenated_along_their_rows():
    joined = tu.concat_nested_tensors([jagged([1.0], [2.0, 3.0]), jagged([4.0])])
    assert [row.tolist() for row in joined.unbind()] == [[1.0], [2.0, 3.0], [4.0]]
    wide = [tu.nested_tensor_from_tensor_list([torch.full((2, n), n)]) for n in (1, 2)]
    assert [row.tolist() for row in unbind(tu.concat_nested_tensors(wide))] == [[[1], [1]], [[2, 2], [2, 2]]]
    with pytest.raises(DataError, match=r"jagged \(2, \*\).*jagged \(3, \*\)"):
        tu.concat_nested_tensors([wide[0], tu.nested_tensor_from_tensor_list([torch.ones(3, 1, dtype=torch.int64)])])
    with pytest.raises(DataError, match="jagged tensors are needed"):
        tu.concat_nested_tensors([torch.ones(1)])


def test_the_ragged_dimension_of_position_ids_is_restored():
    td = four_rows()
    expected = tu.get(td, "position_ids")
    broken = torch.nested.nested_tensor_from_jagged(expected.values(), expected.offsets())
    td.set("position_ids", broken)
    tu.maybe_fix_3d_position_ids(td)
    assert rows(td) == rows(four_rows())
    for other in (TensorDict({}, batch_size=[2]), tu.get_tensordict({"position_ids": torch.zeros(2, 3, 4)})):
        tu.maybe_fix_3d_position_ids(other)
    assert not other["position_ids"].is_nested


# Rows.


@pytest.mark.parametrize("form", [list, torch.tensor, np.array])
@pytest.mark.parametrize("picked", [[1, 3], [3, 0, 0], [-1], [True, False, False, True], []])
def test_rows_are_selected_from_every_column_and_values_of_the_whole_batch_stay(form, picked):
    td = four_rows(step=3, stop=["x", "y"])
    chosen = tu.index_select_tensor_dict(td, form(picked))
    numbers = [i for i, keep in enumerate(picked) if keep] if picked and isinstance(picked[0], bool) else picked
    assert rows(chosen) == [rows(td)[i] for i in numbers] and tuple(chosen.batch_size) == (len(numbers),)
    assert tu.get(chosen, "step") == 3 and tu.get(chosen, "stop") == ["x", "y"]


def test_selecting_rows_refuses_other_values_and_returns_none_for_none():
    assert tu.index_select_tensor_dict(None, [0]) is None
    with pytest.raises(DataError, match=r"batch_size \(\)"):
        tu.index_select_tensor_dict(tu.get_tensordict({}, {"step": 1}), [0])
    with pytest.raises(TypeError, match="'inner' is TensorDict"):
        tu.index_select_tensor_dict(TensorDict({"inner": TensorDict({}, batch_size=[2])}, batch_size=[2]), [0])


@pytest.mark.parametrize("parts", [1, 2, 3, 4, 6])
def test_chunks_differ_by_at_most_one_row_and_join_to_the_whole(parts):
    td = four_rows(step=3)
    batches = tu.chunk_tensordict(td, parts)
    assert [len(batch) for batch in batches] == {1: [4], 2: [2, 2], 3: [2, 1, 1], 4: [1] * 4, 6: [1] * 4 + [0] * 2}[
        parts
    ]
    assert [row for batch in batches for row in rows(batch)] == rows(td) and all(
        tu.get(batch, "step") == 3 for batch in batches
    )
    joined = tu.concat_tensordict(batches)
    tu.assert_tensordict_eq(joined, td)
    assert rows(pickle.loads(pickle.dumps(joined))) == rows(td)


def test_concatenating_keeps_the_first_value_of_the_whole_batch_and_its_arguments():
    first, second = four_rows(step=1), four_rows(step=2, only="here")
    before = copy.deepcopy(first)
    joined = tu.concat_tensordict([first, second])
    assert rows(joined) == rows(first) * 2 and tu.get(joined, "step") == 1 and tu.get(joined, "only") == "here"
    tu.assert_tensordict_eq(first, before)
    meta = [tu.get_tensordict({}, {"step": step}) for step in (1, 2)]
    assert tu.get(tu.concat_tensordict(meta), "step") == 1 and tu.concat_tensordict_with_none_bsz(meta) is meta[0]


def test_concatenating_different_columns_is_refused_by_name():
    for wrong, message in ([[], "one or more"], [[four_rows(), tu.get_keys(four_rows(), ["obs"])], "parts 0 and 1"]):
        with pytest.raises(DataError, match=message):
            tu.concat_tensordict(wrong)
    with pytest.raises(DataError, match=r"\(4,\)"):
        tu.concat_tensordict_with_none_bsz([four_rows()])


@pytest.mark.parametrize(
    ("divisor", "padded"), [(2, [0, 1, 2, 3]), (3, [0, 1, 2, 3, 0, 1]), (7, [0, 1, 2, 3, 0, 1, 2])]
)
def test_padding_repeats_from_the_first_row_and_is_undone(divisor, padded):
    td = four_rows(step=3)
    more, added = tu.pad_to_divisor(td, divisor)
    assert rows(more) == [rows(td)[i] for i in padded] and added == len(padded) - 4 and tu.get(more, "step") == 3
    tu.assert_tensordict_eq(tu.unpad(more, added), td)
    with pytest.raises(ValueError, match="pad_size=5"):
        tu.unpad(td, 5)
    with pytest.raises(ValueError, match="size_divisor=0"):
        tu.pad_to_divisor(td, 0)


def test_mini_batches_cover_all_rows_and_the_seed_decides_the_order():
    td = four_rows(step=3)
    batches = list(tu.make_iterator(td, 2, epochs=2))
    assert [row for batch in batches for row in rows(batch)] == rows(td) * 2 and tu.get(batches[0], "step") == 3
    orders = [[b["obs"].tolist() for b in tu.make_iterator(td, 1, 3, seed, {"shuffle": True})] for seed in (1, 1, 2)]
    assert orders[0] == orders[1] != orders[2]
    with pytest.raises(ValueError, match="4 rows.*mini-batches of 3"):
        tu.make_iterator(td, 3, epochs=1)


def test_a_step_of_a_slice_and_an_index_of_tensordict_itself_read_our_columns_too():
    td = four_rows(step=3)
    assert (
        tu.get(td[1:3], "turns") == TURNS[1:3]
        and tu.get(td[torch.tensor([3, 0])], "label") == ["d", "a"]
        and td[2]["step"] == 3
    )


# Whole TensorDicts.


def test_union_adds_entries_and_refuses_different_ones_of_any_kind():
    td = four_rows(step=3)
    other = tu.get_tensordict(
        {"obs": td["obs"].clone(), "turns": copy.deepcopy(TURNS), "new": ["x"] * 4}, {"step": 3, "rate": 0.5}
    )
    assert tu.union_tensor_dict(td, other) is td and tu.get(td, "new") == ["x"] * 4 and tu.get(td, "rate") == 0.5
    for key, value in {"step": 4, "turns": [[]] * 4, "obs": NonTensorData(0)}.items():
        changed = tu.assign_non_tensor(other.copy(), **{key: value})
        with pytest.raises(DataError, match=repr(key)):
            tu.union_tensor_dict(td, changed)


def test_contiguous_copies_only_what_is_not_and_keeps_the_kinds():
    td = four_rows(step=torch.ones(2))
    td["t"] = torch.arange(8).view(2, 4).t()
    made = tu.contiguous(td)
    assert made is not td and made["t"].is_contiguous() and made["obs"].data_ptr() == td["obs"].data_ptr()
    tu.assert_tensordict_eq(made, td)


def test_equality_names_the_entry_that_differs():
    td = four_rows(step=3, rate=float("nan"))
    tu.assert_tensordict_eq(td, copy.deepcopy(td))
    changes = {
        "obs": lambda other: other["obs"].add_(1),
        "ids": lambda other: other["ids"].values().add_(1),
        "turns": lambda other: tu.assign_non_tensor(other, turns=[1, 2, 3, 4]),
        "step": lambda other: tu.assign_non_tensor(other, step=4),
        "label": lambda other: tu.assign_non_tensor_data(other, "label", ["a", "b", "c", "d"]),
        "more": lambda other: tu.assign_non_tensor(other, more=1),
    }
    for key, change in changes.items():
        other = copy.deepcopy(td)
        change(other)
        with pytest.raises(AssertionError, match=repr(key)):
            tu.assert_tensordict_eq(td, other)
    with pytest.raises(AssertionError, match="batch sizes"):
        tu.assert_tensordict_eq(TensorDict({}, batch_size=[2]), TensorDict({}, batch_size=[3]))
