"""Sizes of chunks: balanced ranges of rows, and verl's switch for chunks of different sizes.

Needs no torch.
"""

import os
from itertools import accumulate

AUTO_PADDING_KEY = "_verl_auto_padding"


class _AutoPadding(type):
    """Metaclass that makes `auto_padding` a property of the class itself."""

    _enabled = False

    @property
    def auto_padding(cls) -> bool:
        return cls._enabled or os.environ.get("VERL_AUTO_PADDING", "").upper() in ("1", "TRUE")

    @auto_padding.setter
    def auto_padding(cls, enabled: bool) -> None:
        cls._enabled = enabled


class DataProtoConfig(metaclass=_AutoPadding):
    """Process-wide settings of `DataProto`.

    `auto_padding`: every batch of this process may be chunked unevenly. VERL_AUTO_PADDING=1 sets it too.
    """


def even_bounds(num_rows: int, parts: int) -> list[tuple[int, int]]:
    """Return [start, stop) of `parts` consecutive ranges of rows.

    Their sizes differ by at most one, larger first.
    """
    if parts < 1:
        raise ValueError(f"parts={parts} must be at least 1")
    small, larger = divmod(num_rows, parts)
    ends = [0, *accumulate(small + (i < larger) for i in range(parts))]
    return list(zip(ends, ends[1:], strict=False))
