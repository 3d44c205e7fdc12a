"""Random batches through random operations, compared with the same operations on a list of rows.

HYPOTHESIS_PROFILE=thorough (`make fuzz`) runs many more and different cases each time. The default cases are always the
same.
"""

import copy
import os
import pickle
import tempfile
from collections.abc import Callable
from itertools import compress, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from hybridrl.data_plane import tensordict_utils as tu
from hybridrl.data_plane.batches import chunk_rows, concat_batches
from hybridrl.errors import DataError
from hybridrl.protocol import (
    DataProto,
    collate_fn,
    fold_batch_dim,
    pad_dataproto_to_divisor,
    unfold_batch_dim,
    unpad_dataproto,
)
from tests.support.data_plane.row_model import (
    KINDS,
    MAX_ROWS,
    Rows,
    all_columns,
    as_batch,
    assert_holds,
    comparable,
    rows_like,
    some_rows,
    values,
)
from tests.support.data_plane.sample_batches import round_trip, two_readers

THOROUGH = os.environ.get("HYPOTHESIS_PROFILE") == "thorough"
SETTINGS = settings(
    max_examples=1500 if THOROUGH else 25,
    stateful_step_count=12,
    derandomize=not THOROUGH,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
)
pytestmark = pytest.mark.timeout(3600 if THOROUGH else 120)

Draw = Callable[[st.SearchStrategy], Any]
Step = tuple[DataProto, Rows]


# Operations: each does one thing to the batch and the same to the rows.


def slice_rows(draw: Draw, data: DataProto, model: Rows) -> Step:
    bound, step = st.none() | st.integers(-MAX_ROWS - 1, MAX_ROWS + 1), st.sampled_from([None, 1, 2, 3, -1, -2])
    window = slice(draw(bound), draw(bound), draw(step))
    return data[window], model.of(range(len(model.rows))[window])


def pick_numbers(draw: Draw, data: DataProto, model: Rows) -> Step:
    size = len(model.rows)
    numbers = draw(st.lists(st.integers(-size, size - 1), max_size=MAX_ROWS)) if size else []
    form = draw(
        st.sampled_from(
            [list, tuple_index, lambda n: np.array(n, dtype=np.int16), lambda n: torch.tensor(n, dtype=torch.int32)]
        )
    )
    return data.select_idxs(form(numbers)), model.of(numbers)


def tuple_index(numbers: list[int]) -> np.ndarray:
    return np.array(numbers, dtype=np.uint64) if all(n >= 0 for n in numbers) else np.array(numbers)


def pick_by_mask(draw: Draw, data: DataProto, model: Rows) -> Step:
    mask = draw(st.lists(st.booleans(), min_size=len(model.rows), max_size=len(model.rows)))
    form = draw(st.sampled_from([list, lambda m: np.array(m, dtype=bool), lambda m: torch.tensor(m, dtype=torch.bool)]))
    return data[form(mask)], model.of(list(compress(range(len(mask)), mask)))


def reorder(draw: Draw, data: DataProto, model: Rows) -> Step:
    order = draw(st.permutations(range(len(model.rows))))
    data.reorder(torch.tensor(order, dtype=torch.int64))
    return data, model.of(order)


def repeat(draw: Draw, data: DataProto, model: Rows) -> Step:
    times, interleave = draw(st.integers(0, 3)), draw(st.booleans())
    numbers = list(range(len(model.rows)))
    return data.repeat(times, interleave), model.of(
        [i for i in numbers for _ in range(times)] if interleave else numbers * times
    )


def repeat_each(draw: Draw, data: DataProto, model: Rows) -> Step:
    counts = draw(st.lists(st.integers(0, 2), min_size=len(model.rows), max_size=len(model.rows)))
    form = draw(
        st.sampled_from(
            [list, tuple, lambda c: np.array(c, dtype=np.int64), lambda c: torch.tensor(c, dtype=torch.int64)]
        )
    )
    return data.sample_level_repeat(form(counts)), model.of([i for i, count in enumerate(counts) for _ in range(count)])


def chunk_and_concat(draw: Draw, data: DataProto, model: Rows) -> Step:
    parts = draw(st.integers(1, MAX_ROWS + 2))
    if len(model.rows) % parts:
        with pytest.raises(DataError, match="equal chunks"):
            data.chunk(parts)
        data.meta_info["_verl_auto_padding"] = True
    batches = data.chunk(parts)
    data.meta_info.pop("_verl_auto_padding", None)
    return DataProto.concat(in_order(batches, model, full=-(-len(model.rows) // parts))), model


def chunk_uneven_and_concat(draw: Draw, data: DataProto, model: Rows) -> Step:
    batches = data.chunk_uneven(draw(st.integers(1, MAX_ROWS + 2)))
    assert all(first - 1 <= second <= first for first, second in pairwise(map(len, batches)))
    assert max(map(len, batches)) - min(map(len, batches)) <= 1
    return DataProto.concat(in_order(batches, model)), model


def split_and_concat(draw: Draw, data: DataProto, model: Rows) -> Step:
    size = draw(st.integers(1, MAX_ROWS))
    return DataProto.concat(in_order(data.split(size), model, full=size) or [data]), model


def in_order(batches: list[DataProto], model: Rows, full: int | None = None) -> list[DataProto]:
    """Return the batches after checking their rows: consecutive, and all but the last ones full."""
    start = 0
    for batch in batches:
        assert full is None or len(batch) == min(full, len(model.rows) - start)
        assert_holds(batch, model.of(range(start, start + len(batch))))
        start += len(batch)
    return batches


def concat_with_another(draw: Draw, data: DataProto, model: Rows) -> Step:
    others = draw(st.lists(rows_like(model.kinds), max_size=2)) if model.kinds else []
    batches, rows = [data, *map(as_batch, others)], [*model.rows, *(row for other in others for row in other.rows)]
    return DataProto.concat(batches), Rows(model.kinds, rows)


def pad_and_unpad(draw: Draw, data: DataProto, model: Rows) -> Step:
    divisor, keep = draw(st.integers(1, MAX_ROWS + 2)), draw(st.booleans())
    padded, added = pad_dataproto_to_divisor(data, divisor)
    numbers = [i % len(model.rows) for i in range(len(model.rows) + added)]
    assert len(padded) % divisor == 0 and added < divisor
    assert_holds(padded, model.of(numbers))
    return (padded, model.of(numbers)) if keep else (unpad_dataproto(padded, added), model)


def pad_in_place(draw: Draw, data: DataProto, model: Rows) -> Step:
    times, which = draw(st.integers(0, 3)) if model.rows else 0, draw(st.sampled_from(["", "first"]))
    data.padding(times, which)
    row = 0 if which else len(model.rows) - 1
    return data, model.of([*range(len(model.rows)), *[row] * times])


def select(draw: Draw, data: DataProto, model: Rows) -> Step:
    tensors, arrays = (draw(subset(names)) for names in (model.tensors(), model.arrays()))
    selected = data.select(tensors, arrays, deepcopy=draw(st.booleans()))
    kept = model.only([*tensors, *arrays])
    return selected, kept if data.batch is not None or arrays else Rows(kept.kinds, [])


def pop_and_union(draw: Draw, data: DataProto, model: Rows) -> Step:
    tensors, arrays = (draw(subset(names)) for names in (model.tensors(), model.arrays()))
    popped = data.pop(tensors, arrays)
    assert popped.meta_info == {}
    popped.meta_info = copy.deepcopy(data.meta_info)
    taken, left = (
        model.only([*tensors, *arrays]),
        model.only([name for name in model.kinds if name not in {*tensors, *arrays}]),
    )
    assert_holds(popped, taken if taken.kinds else Rows({}, []))
    if not left.kinds and data.batch is None:  # nothing is left to count rows by
        return popped, taken
    assert_holds(data, left)
    if draw(st.booleans()) or not taken.kinds:
        return data, left
    return data.union(popped), model


def union_of_some_and_new(draw: Draw, data: DataProto, model: Rows) -> Step:
    """Union with existing columns, NaN included, and new ones."""
    new = draw(some_rows(num_rows=len(model.rows), prefix=f"{len(model.kinds)} "))
    new = new.only([name for name in new.kinds if name not in model.kinds])
    known = as_batch(model.only(draw(subset(list(model.kinds)))))
    if (new.kinds or len(known)) and (model.kinds or not model.rows):
        other = (
            known.union(as_batch(new))
            if len(known) or not known.non_tensor_batch and known.batch is None
            else as_batch(new)
        )
        data.union(other)
        rows = [{**row, **more} for row, more in zip(model.rows, new.rows, strict=True)]
        return data, Rows({**model.kinds, **new.kinds}, rows)
    return data, model


def union_with_a_difference_is_refused(draw: Draw, data: DataProto, model: Rows) -> Step:
    other = draw(rows_like(model.kinds, num_rows=len(model.rows)))
    if comparable(other.rows) != comparable(model.rows):
        with pytest.raises(DataError, match="different content"):
            data.union(as_batch(other))
    return data, model


def rename(draw: Draw, data: DataProto, model: Rows) -> Step:
    old = draw(subset(model.tensors()))
    new = draw(st.permutations(old)) if draw(st.booleans()) else [f"new {name}"[-40:] for name in old]
    if len({*new, *(name for name in model.kinds if name not in old)}) < len(model.kinds) or not old:
        return data, model
    return data.rename(old, list(new)), model.named(dict(zip(old, new, strict=True)))


def write(draw: Draw, data: DataProto, model: Rows) -> Step:
    """Replace the rows of one dense column in place."""
    names = [name for name in model.tensors() if KINDS[model.kinds[name]].folds]
    if not names or not model.rows:
        return data, model
    name = draw(st.sampled_from(names))
    values = [draw(KINDS[model.kinds[name]].values) for _ in model.rows]
    data.batch[name].copy_(KINDS[model.kinds[name]].make(values))
    return data, Rows(model.kinds, [{**row, name: value} for row, value in zip(model.rows, values, strict=True)])


def send(draw: Draw, data: DataProto, model: Rows) -> Step:
    way = draw(st.sampled_from(["out of band", "read-only", "deepcopy", 2, 3, 4, 5]))
    if way == "deepcopy":
        return copy.deepcopy(data), model
    return (
        pickle.loads(pickle.dumps(data, way)) if isinstance(way, int) else round_trip(data, freeze=way == "read-only")
    ), model


def save_and_load(draw: Draw, data: DataProto, model: Rows) -> Step:
    with tempfile.TemporaryDirectory() as folder:
        data.save_to_disk(Path(folder) / "batch")
        return DataProto.load_from_disk(Path(folder) / "batch"), model


def through_a_tensordict(draw: Draw, data: DataProto, model: Rows) -> Step:
    """Convert to a TensorDict, split, join and convert back. Arrays without rows lose their dtype."""
    td = concat_batches(chunk_rows(data.to_tensordict(), draw(st.integers(1, MAX_ROWS + 2))))
    tu.assert_tensordict_eq(td, data.to_tensordict())
    back = DataProto.from_tensordict(td)
    assert len(back) == len(data)
    return (back, model) if model.rows and model.kinds else (data, model)


def pick_from_a_tensordict(draw: Draw, data: DataProto, model: Rows) -> Step:
    if not model.rows or not model.kinds:
        return data, model
    numbers = draw(st.lists(st.integers(-len(model.rows), len(model.rows) - 1), min_size=1, max_size=MAX_ROWS))
    picked = DataProto.from_tensordict(tu.index_select_tensor_dict(data.to_tensordict(), numbers))
    padded, added = tu.pad_to_divisor(picked.to_tensordict(), draw(st.integers(1, MAX_ROWS)))
    assert_holds(
        DataProto.from_tensordict(padded), model.of([numbers[i % len(numbers)] for i in range(len(numbers) + added)])
    )
    tu.assert_tensordict_eq(tu.unpad(padded, added), picked.to_tensordict())
    return picked, model.of(numbers)


def item_by_item(draw: Draw, data: DataProto, model: Rows) -> Step:
    if not model.rows or not model.kinds:
        return data, model
    items = [data[i] for i in range(-len(model.rows), 0)]
    if any(KINDS[model.kinds[name]].spec[1] == "jagged" for name in model.tensors()):
        return (
            data,
            model,
        )  # a row of a jagged column is a plain tensor, which rows of different length do not make again
    return collate_fn(items), model


def iterate(draw: Draw, data: DataProto, model: Rows) -> Step:
    size = draw(st.integers(1, MAX_ROWS))
    if len(model.rows) % size:
        with pytest.raises(ValueError, match="mini-batches"):
            data.make_iterator(size, 1)
        return data, model
    batches = list(data.make_iterator(size, epochs=2, seed=draw(st.none() | st.just(1))))
    return (DataProto.concat(batches), model.of([*range(len(model.rows))] * 2)) if batches else (data, model)


def fold_and_unfold(draw: Draw, data: DataProto, model: Rows) -> Step:
    size = draw(st.integers(1, MAX_ROWS))
    if len(model.rows) % size or not all(KINDS[kind].folds for kind in model.kinds.values()) or not model.kinds:
        with pytest.raises(DataError, match="folded|first 2 dimensions"):
            unfold_batch_dim(fold_batch_dim(data, size))
        return data, model
    folded = fold_batch_dim(data, size)
    each = len(model.rows) // size
    for name, column in all_columns(folded).items():
        rows = [row[name] for row in model.rows]
        assert comparable(values(column)) == comparable([rows[i * each : (i + 1) * each] for i in range(size)])
    return unfold_batch_dim(folded), model


def cut_columns_across(draw: Draw, data: DataProto, model: Rows) -> Step:
    """Split every wide column, one value to each of two rows."""
    wide = [name for name, kind in model.kinds.items() if KINDS[kind].wide]
    cut = data.unfold_column_chunks(2, split_keys=wide)
    rows = [{**row, **{name: [row[name][i]] for name in wide}} for row in model.rows for i in range(2)]
    for name, column in all_columns(cut).items():
        assert comparable(values(column)) == comparable([row[name] for row in rows]), name
    return data, model


OPERATIONS = {
    function.__name__: function
    for function in (
        slice_rows,
        pick_numbers,
        pick_by_mask,
        reorder,
        repeat,
        repeat_each,
        chunk_and_concat,
        chunk_uneven_and_concat,
        split_and_concat,
        concat_with_another,
        pad_and_unpad,
        pad_in_place,
        select,
        pop_and_union,
        union_of_some_and_new,
        union_with_a_difference_is_refused,
        rename,
        write,
        send,
        save_and_load,
        through_a_tensordict,
        pick_from_a_tensordict,
        item_by_item,
        iterate,
        fold_and_unfold,
        cut_columns_across,
    )
}


def subset(names: list[str]) -> st.SearchStrategy[list[str]]:
    return st.lists(st.sampled_from(names), unique=True) if names else st.just([])


@pytest.mark.parametrize("operation", OPERATIONS)
@given(draws=st.data())
@SETTINGS
def test_every_operation_does_what_it_does_to_a_list_of_rows(operation, draws):
    """Run on a local batch and on a received one, whose other reader must see no change."""
    model = draws.draw(some_rows())
    received, other = two_readers(as_batch(model))
    for data in (as_batch(model), received):
        assert_holds(*OPERATIONS[operation](draws.draw, data, model))
    assert_holds(other, model)


class Batch(RuleBasedStateMachine):
    """One batch through a chain of operations.

    After each step it has the expected rows, and the other reader's batch is unchanged.
    """

    @initialize(draws=st.data(), received=st.booleans())
    def make(self, draws, received: bool) -> None:
        self.model = draws.draw(some_rows())
        self.first = self.model
        self.data, self.other = (
            two_readers(as_batch(self.model)) if received else (as_batch(self.model), as_batch(self.model))
        )

    def go(self, operation: Callable, draws) -> None:
        self.data, self.model = operation(draws.draw, self.data, self.model)
        if len(self.model.rows) > 2 * MAX_ROWS or len(self.model.kinds) > 12:
            names = list(self.model.kinds)[:6]
            self.model = self.model.only(names).of(range(min(MAX_ROWS, len(self.model.rows))))
            self.data = self.data.select(self.model.tensors(), self.model.arrays())[: len(self.model.rows)]

    @rule(draws=st.data())
    @precondition(lambda self: self.model.kinds)
    def write_to_a_view(self, draws) -> None:
        """A write to a slice shows in the batch, as in numpy."""
        view, rows = write(draws.draw, self.data[:], self.model)
        self.model = rows

    @invariant()
    def rows_are_right(self) -> None:
        if hasattr(self, "model"):
            assert_holds(self.data, self.model)
            assert_holds(self.other, self.first)


def _rule_of(operation: Callable) -> Callable:
    def step(self, draws) -> None:
        self.go(operation, draws)

    step.__name__ = operation.__name__
    return rule(draws=st.data())(step)


for _operation in OPERATIONS.values():
    setattr(Batch, _operation.__name__, _rule_of(_operation))

Batch.TestCase.settings = settings(SETTINGS, max_examples=6000 if THOROUGH else 60)
TestAnyChainOfOperations = Batch.TestCase
