"""Read the rows of several files as one sequence: parquet, JSON lines, or a dataset of the Hugging Face hub.

Errors name the file and the row in it.

Used by the datasets of PPO and SFT, in the driver.
"""

import bisect
import itertools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from hybridrl.config.schema.data import HubData
from hybridrl.errors import DataError, reason_of
from hybridrl.trainer import data

JSON_LINES = (".jsonl", ".jsonl.gz")


class ParquetRows:
    """The rows of `files` in order. Parquet files are memory-mapped. Files may differ in columns and types.

    Raises:
        DataError: No file was given, or one is missing, cannot be read, is damaged, or has two columns of one name.
    """

    def __init__(self, files: list[str] | str):
        self.files = [files] if isinstance(files, str) else list(files)
        if not self.files:
            raise DataError("no data files were given; set data.train_files or data.val_files")
        self._tables = [_read(file) for file in self.files]
        self._ends = list(itertools.accumulate(table.num_rows for table in self._tables))

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, row: int) -> dict:
        number, offset = self._locate(row)
        return self._tables[number].slice(offset, 1).to_pylist()[0]

    def columns(self) -> dict[str, tuple[str, int]]:
        """Return name -> (type in the first file that has it, number of rows with a value) of every column."""
        found: dict[str, tuple[str, int]] = {}
        for table in self._tables:
            for name in table.column_names:
                kind, filled = found.get(name, (str(table.schema.field(name).type), 0))
                found[name] = kind, filled + len(table) - table[name].null_count
        return found

    def slice(self, start: int, end: int) -> pa.Table:
        """Return rows `start` to `end` (not included). A column that a file lacks is null in its rows."""
        begins = [0, *self._ends]
        parts = [
            table.slice(max(0, start - begin), max(0, end - max(start, begin)))
            for begin, table in zip(begins, self._tables, strict=False)
        ]
        return pa.concat_tables([part for part in parts if part.num_rows], promote_options="permissive")

    def location(self, row: int) -> str:
        """Return file and row number in it, for messages."""
        number, offset = self._locate(row)
        return f"{self.files[number]} row {offset}"

    def has(self, column: str) -> bool:
        """Return whether every file has `column`."""
        return all(column in table.column_names for table in self._tables)

    def require(self, column: str, key: str) -> None:
        """Raise DataError unless every file has `column`, the value of the setting `key`."""
        for file, table in zip(self.files, self._tables, strict=True):
            if column not in table.column_names:
                raise DataError(f"{file} has no column {column!r} ({key}); it has {', '.join(table.column_names)}")

    def require_left(self, rows: Sequence[int], *, what: str, num_rows: int, limit: str) -> None:
        """Raise DataError if none of `num_rows` rows is left within a limit, given as `key=value`."""
        if not rows:
            hint = f"raise {limit}" if num_rows else "give files with rows"
            raise DataError(f"no {what} are left of {num_rows} rows in {', '.join(self.files)}; {hint}")

    def require_mappings(self, column: str) -> None:
        """Raise DataError if a file has `column` with something else than mappings with fixed keys."""
        self._require_type(column, pa.types.is_struct, "a mapping in every row, such as {'ground_truth': '4'}")

    def require_texts(self, column: str) -> None:
        """Raise DataError if a file has `column` with something else than texts."""
        self._require_type(column, _is_text, "a text in every row")

    def _require_type(self, column: str, accepts: Callable[[pa.DataType], bool], wanted: str) -> None:
        for file, table in zip(self.files, self._tables, strict=True):
            if column in table.column_names:
                kind = table.schema.field(column).type
                if not (accepts(kind) or pa.types.is_null(kind)):
                    raise DataError(f"{file}: column {column!r} must have {wanted}; it is of type {kind}")

    def first_rows(self, column: str) -> dict[Any, int]:
        """Return value -> first row, for every distinct value of `column`; nulls are left out."""
        first: dict[Any, int] = {}
        for start, table in zip([0, *self._ends], self._tables, strict=False):
            if column in table.column_names:
                for value in table[column].unique().drop_null().to_pylist():
                    if value not in first:
                        first[value] = start + pc.index(table[column], value).as_py()
        return first

    def first_filled(self, column: str) -> int | None:
        """Return the first row with a value in `column`, None if there is none.

        A value is neither null nor empty.
        """
        start = 0
        for table in self._tables:
            if column in table.column_names:
                for offset, values in _slices(table[column], 64):
                    filled = [offset + i for i, value in enumerate(values) if value]
                    if filled:
                        return start + filled[0]
            start += table.num_rows
        return None

    def values(self, column: str, *, batch: int, limit: int) -> Iterator[tuple[int, list]]:
        """Yield (number of the first row, values) of `column`.

        Args:
            batch: Most rows per item; an item never spans two files.
            limit: Rows in all.
        """
        start = 0
        for table in self._tables:
            for offset, values in _slices(table[column].slice(0, max(0, limit - start)), batch):
                yield start + offset, values
            start += table.num_rows

    def _locate(self, row: int) -> tuple[int, int]:
        if not 0 <= row < len(self):
            raise IndexError(f"row {row} of {len(self)}")
        number = bisect.bisect_right(self._ends, row)
        return number, row - (self._ends[number - 1] if number else 0)


def _slices(column: pa.ChunkedArray, size: int) -> Iterator[tuple[int, list]]:
    for offset in range(0, len(column), size):
        yield offset, column.slice(offset, size).to_pylist()


def _is_text(kind: pa.DataType) -> bool:
    return pa.types.is_string(kind) or pa.types.is_large_string(kind)


def reject_other_format(file: str, path: Path) -> None:
    """Raise DataError with a line that converts the file, if it is CSV or JSON."""
    with open(path, "rb") as opened:
        begin = opened.read(64).lstrip()[:1]
    separated = {".csv": "", ".tsv": ", sep='\\t'"}.get(path.suffix)
    if separated is None and begin not in (b"[", b"{"):
        return
    reader = f"read_csv({file!r}{separated})" if separated is not None else f"read_json({file!r})"
    what = "a table of text" if separated is not None else "one JSON value"
    if begin == b"{":
        raise DataError(f"{file} has JSON objects, but not the name of a file of them; rename it to end with .jsonl")
    raise DataError(
        f'{file} is {what}; data files are parquet or .jsonl. To convert it: python -c "import pandas; '
        f"pandas.{reader}.to_json('{path.stem}.jsonl', orient='records', lines=True)\""
    )


def _read(file: str) -> pa.Table:
    path = Path(file).expanduser()
    if (source := HubData.named(file)) is not None:
        return data.hub_table(source)
    if path.name.endswith(JSON_LINES) and path.is_file():
        return data.json_lines_table(path)
    if not path.is_file():
        raise DataError(
            f"no file {file}; make one with python -m data_preprocess.gsm8k or another module of data_preprocess"
        )
    reject_other_format(file, path)
    try:
        names = pq.read_schema(path).names
        repeated = sorted({name for name in names if names.count(name) > 1})
        table = None if repeated else pq.read_table(path, memory_map=True, page_checksum_verification=True)
        if table is not None:
            table.validate(full=True)
    except (pa.ArrowException, OSError, ValueError, MemoryError, OverflowError) as error:
        reason = f"{reason_of(error):.300}"
        raise DataError(f"{file} is not a parquet file that can be read, or is damaged: {reason}") from error
    if table is None:
        raise DataError(f"{file} has several columns named {repeated[0]!r}; rename or drop all but one")
    return _without_dictionaries(table)


def _without_dictionaries(table: pa.Table) -> pa.Table:
    """Return the table with values where columns have numbers of values, as pandas writes categories."""
    kinds = [kind.value_type if pa.types.is_dictionary(kind) else kind for kind in table.schema.types]
    return table.cast(pa.schema(list(zip(table.schema.names, kinds, strict=True))))
