"""Batches of random columns, and the same rows as plain Python values to compare with. Not a test file."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st

from hybridrl.data_plane.columns import one_object_per_row
from hybridrl.protocol import DataProto

MAX_ROWS = 7

Row = dict[str, Any]


@dataclass(frozen=True)
class Kind:
    """A kind of column: the values of a row, the column that rows make, and its expected spec."""

    values: st.SearchStrategy
    make: Callable[[list], torch.Tensor | np.ndarray]
    spec: tuple
    folds: bool = True
    wide: bool = False  # a second dimension, of two


def dense(dtype: torch.dtype, values: st.SearchStrategy, *, strided: bool = False) -> Kind:
    """Two values in each row."""

    def make(rows: list) -> torch.Tensor:
        tensor = torch.tensor(rows, dtype=dtype).reshape(-1, 2)
        return tensor.t().contiguous().t() if strided else tensor

    return Kind(st.lists(values, min_size=2, max_size=2), make, (dtype, (2,)), wide=True)


def flat(dtype: torch.dtype, values: st.SearchStrategy) -> Kind:
    return Kind(values, lambda rows: torch.tensor(rows, dtype=dtype), (dtype, ()))


def jagged(dtype: torch.dtype, values: st.SearchStrategy) -> Kind:
    """Any number of values in each row."""

    def make(rows: list) -> torch.Tensor:
        ends = [0, *itertools.accumulate(map(len, rows))]
        return torch.nested.nested_tensor_from_jagged(torch.tensor(sum(rows, []), dtype=dtype), torch.tensor(ends))

    return Kind(st.lists(values, max_size=3), make, (dtype, "jagged", 1), folds=False)


def jagged_last(dtype: torch.dtype, values: st.SearchStrategy) -> Kind:
    """Two lines of any number of values in each row."""

    def make(rows: list) -> torch.Tensor:
        ends = [0, *itertools.accumulate(len(row[0]) for row in rows)]
        lines = torch.tensor([sum((row[i] for row in rows), []) for i in (0, 1)], dtype=dtype)
        return torch.nested.nested_tensor_from_jagged(lines, torch.tensor(ends), jagged_dim=2)

    row = st.lists(values, max_size=3).map(lambda line: [line, line[::-1]])
    return Kind(row, make, (dtype, "jagged", 2), folds=False)


def array(dtype: str, values: st.SearchStrategy, *shape: int) -> Kind:
    row = values if not shape else st.lists(values, min_size=shape[0], max_size=shape[0])
    return Kind(
        row,
        lambda rows: np.array(rows, dtype=dtype).reshape(-1, *shape),
        (np.dtype(dtype).kind, shape),
        wide=bool(shape),
    )


NUMBERS = st.integers(-(2**31), 2**31 - 1)
SMALL = st.sampled_from([0.0, 1.5, -2.0, 448.0, float("nan")])  # every float format has these
PLAIN = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3)
TREES = st.recursive(
    PLAIN,
    lambda some: st.lists(some, max_size=2) | st.dictionaries(st.text(max_size=2), some, max_size=2),
    max_leaves=4,
)

KINDS = {
    "float32": dense(torch.float32, st.floats(width=32)),
    "float64 strided": dense(torch.float64, st.floats(), strided=True),
    "bfloat16": flat(torch.bfloat16, SMALL),
    "float8": dense(torch.float8_e4m3fn, SMALL),
    "int64": flat(torch.int64, st.integers(-(2**63), 2**63 - 1)),
    "uint8": dense(torch.uint8, st.integers(0, 255)),
    "bool": flat(torch.bool, st.booleans()),
    "complex": flat(torch.complex64, st.builds(complex, SMALL, SMALL)),
    "jagged": jagged(torch.float16, SMALL),
    "jagged int": jagged(torch.int32, NUMBERS),
    "jagged last": jagged_last(torch.bfloat16, SMALL),
    "array int32": array("int32", NUMBERS),
    "array float64": array("float64", st.floats(), 2),
    "array bool": array("bool", st.booleans()),
    "array text": array("U3", st.text(st.characters(min_codepoint=97, max_codepoint=99), max_size=3)),
    "objects": Kind(TREES, one_object_per_row, ("O", ())),
    "lists": Kind(st.lists(PLAIN, min_size=2, max_size=2), one_object_per_row, ("O", ())),
    "object table": array("O", PLAIN, 2),
}
TENSOR_KINDS = [name for name, kind in KINDS.items() if isinstance(kind.spec[0], torch.dtype)]


@dataclass(frozen=True)
class Rows:
    """Expected content of a batch: the kind of each column, and the rows as plain values."""

    kinds: dict[str, str]
    rows: list[Row]

    def of(self, numbers: Sequence[int]) -> "Rows":
        return Rows(self.kinds, [self.rows[i] for i in numbers])

    def only(self, names: Sequence[str]) -> "Rows":
        return Rows(
            {name: self.kinds[name] for name in names}, [{name: row[name] for name in names} for row in self.rows]
        )

    def named(self, new: dict[str, str]) -> "Rows":
        return Rows(
            {new.get(n, n): k for n, k in self.kinds.items()},
            [{new.get(n, n): v for n, v in row.items()} for row in self.rows],
        )

    def tensors(self) -> list[str]:
        return [name for name, kind in self.kinds.items() if kind in TENSOR_KINDS]

    def arrays(self) -> list[str]:
        return [name for name in self.kinds if name not in self.tensors()]


@st.composite
def some_rows(draw, *, num_rows: int | None = None, prefix: str = "") -> Rows:
    """Up to five columns of different kinds with up to MAX_ROWS rows."""
    kinds = draw(st.lists(st.sampled_from(sorted(KINDS)), min_size=1, max_size=5, unique=True))
    return draw(rows_like({f"{prefix}{kind}": kind for kind in kinds}, num_rows=num_rows))


@st.composite
def rows_like(draw, kinds: dict[str, str], *, num_rows: int | None = None) -> Rows:
    row = st.fixed_dictionaries({name: KINDS[kind].values for name, kind in kinds.items()})
    size = {"max_size": MAX_ROWS} if num_rows is None else {"min_size": num_rows, "max_size": num_rows}
    return Rows(kinds, draw(st.lists(row, **size)))


def as_batch(model: Rows) -> DataProto:
    columns = {name: KINDS[kind].make([row[name] for row in model.rows]) for name, kind in model.kinds.items()}
    tensors, arrays = ({name: columns[name] for name in names} for names in (model.tensors(), model.arrays()))
    return DataProto.from_dict(tensors, arrays, {"k": [1, float("nan")]})


def assert_holds(data: DataProto, model: Rows) -> None:
    """Fail unless the batch is consistent and has these rows, in columns of the expected spec."""
    data.check_consistency()
    assert len(data) == len(model.rows) and comparable(data.meta_info) == {"k": [1, "nan"]}
    assert data.non_tensor_batch.keys() == set(model.arrays()) and all_columns(data).keys() == model.kinds.keys()
    for name, column in all_columns(data).items():
        assert column_spec(column) == KINDS[model.kinds[name]].spec, name
        assert comparable(values(column)) == comparable([row[name] for row in model.rows]), name


def all_columns(data: DataProto) -> dict[str, torch.Tensor | np.ndarray]:
    return {**({} if data.batch is None else dict(data.batch.items())), **data.non_tensor_batch}


def column_spec(column: torch.Tensor | np.ndarray) -> tuple:
    if isinstance(column, np.ndarray):
        return column.dtype.kind, column.shape[1:]
    return (column.dtype, "jagged", column._ragged_idx) if column.is_nested else (column.dtype, tuple(column.shape[1:]))


def values(column: torch.Tensor | np.ndarray) -> list:
    if isinstance(column, np.ndarray):
        return column.tolist()
    if column.is_nested:
        rows = column.values().split(column.offsets().diff().tolist(), dim=column._ragged_idx - 1)
        return [row.double().tolist() for row in rows]
    return (column.double() if column.is_floating_point() else column).tolist()


def comparable(value: Any) -> Any:
    """Return the value with NaN as a string, so that == compares it.

    Numbers keep their type except bool and int.
    """
    if isinstance(value, dict):
        return {key: comparable(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(comparable(entry) for entry in value)
    if isinstance(value, np.ndarray):
        return ("array", comparable(value.tolist()))
    if isinstance(value, complex):
        return (comparable(value.real), comparable(value.imag))
    return "nan" if isinstance(value, float) and value != value else value
