"""Iterate over mini-batches of anything whose rows can be selected."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import torch
from torch.utils.data import DataLoader

B = TypeVar("B")


def iterate_mini_batches(
    num_rows: int,
    select: Callable[[list[int]], B],
    *,
    size: int,
    epochs: int,
    seed: int | None,
    loader_kwargs: Mapping[str, Any] | None,
) -> Iterator[B]:
    """Return an iterator over `select(row numbers)`, `size` rows at a time, `epochs` times.

    Args:
        size: Must divide `num_rows`, else ValueError.
        seed: Seed of the order; None uses torch's own.
        loader_kwargs: Arguments of torch's DataLoader; `{"shuffle": True}` shuffles the rows.
    """
    if size < 1 or num_rows % size:
        raise ValueError(
            f"{num_rows} rows cannot be iterated in mini-batches of {size}; pad them to a multiple of it first"
        )
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    rows: Any = range(num_rows)  # the loader draws row numbers; a mini-batch's rows are then selected at once
    loader = DataLoader(rows, size, collate_fn=select, generator=generator, **(loader_kwargs or {}))
    return (mini_batch for _ in range(epochs) for mini_batch in loader)
