"""Mini-batches of anything that rows can be picked from."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import torch
from torch.utils.data import DataLoader

B = TypeVar("B")


def mini_batches(
    num_rows: int,
    pick: Callable[[list[int]], B],
    *,
    size: int,
    epochs: int,
    seed: int | None,
    loader_kwargs: Mapping[str, Any] | None,
) -> Iterator[B]:
    """Return an iterator over `pick(row numbers)`, `size` rows at a time, `epochs` times over all; `{"shuffle": True}`
    mixes them.

    size: must divide `num_rows`, else ValueError. seed: of the order, None takes torch's own. loader_kwargs: of torch's
    DataLoader.
    """
    if size < 1 or num_rows % size:
        raise ValueError(
            f"{num_rows} rows cannot be iterated in mini-batches of {size}; pad them to a multiple of it first"
        )
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    rows: Any = range(num_rows)  # the loader draws numbers of rows, and the rows of a mini-batch are picked at once
    loader = DataLoader(rows, size, collate_fn=pick, generator=generator, **(loader_kwargs or {}))
    return (mini_batch for _ in range(epochs) for mini_batch in loader)
