"""Tables of text for a terminal."""

from collections.abc import Sequence


def text_table(
    header: Sequence[str], rows: Sequence[Sequence[str]], *, is_ruled: bool = True, num_left: int | None = None
) -> list[str]:
    """Return the lines of a table whose columns are as wide as their cells.

    Args:
        header: Titles of the columns.
        rows: One cell per column.
        is_ruled: A line below the titles.
        num_left: The first columns, aligned on the left; those after them on the right. None: all are on the left.
    """
    left = range(len(header) if num_left is None else num_left)
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    lines = [header, *([["-" * width for width in widths]] if is_ruled else []), *rows]
    padded = (
        [
            cell.ljust(width) if i in left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        ]
        for line in lines
    )
    return ["  ".join(cells).rstrip() for cells in padded]
