"""The table of verl's keys, and the rows of one key."""

import functools

from hybridrl.config.verl.program_rows import PROGRAM_ROWS
from hybridrl.config.verl.row import Row, expanded
from hybridrl.config.verl.worker_rows import WORKER_ROWS

TABLE: tuple[Row, ...] = (*WORKER_ROWS, *PROGRAM_ROWS)


def rows_of(name: str) -> list[tuple[str, Row]]:
    """Return the rows of a key in the table's order, each with its key there: `name`, or one above."""
    above = [name[:dot] for dot, letter in enumerate(f"{name}.") if letter == "."]
    found = [(place, key, row) for key in above for place, row in _by_key().get(key, ())]
    return [(key, row) for _, key, row in sorted(found, key=lambda entry: entry[0])]


@functools.cache
def _by_key() -> dict[str, list[tuple[int, Row]]]:
    index: dict[str, list[tuple[int, Row]]] = {}
    for place, row in enumerate(TABLE):
        for key in expanded(row.keys):
            index.setdefault(key, []).append((place, row))
    return index
