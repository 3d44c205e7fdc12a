"""Which ranks of a group share a torch process group, as their worker classes say (`Worker.num_peers`).

Process groups have adjacent ranks. The first rank of each listens for the others. Pure, used by `WorkerProcesses`.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from hybridrl.errors import PlacementError
from hybridrl.single_controller.worker import Worker
from hybridrl.single_controller.worker_group import ClassWithInitArgs


def process_group_size(recipes: Mapping[str, ClassWithInitArgs[Any]], *, num_ranks: int, label: str) -> int:
    """Return how many ranks share a process group; 0 for all, if one of the roles needs all or the roles differ.

    Raises:
        PlacementError: the ranks cannot be divided into such groups.
    """
    sizes = {
        recipe.cls.num_peers(*recipe.args, **recipe.kwargs) if issubclass(recipe.cls, Worker) else 0
        for recipe in recipes.values()
    }
    size = sizes.pop() if len(sizes) == 1 else 0
    if size and num_ranks % size:
        raise PlacementError(
            f"{label} has {num_ranks} processes, and {size} of them share a process group; start a multiple of {size}"
        )
    return size


def first_ranks_of(ranks: Sequence[int], size: int, *, label: str) -> list[int]:
    """Return the first rank of each process group that these ranks form.

    Raises:
        ValueError: they are no whole process groups.
    """
    first_ranks = sorted({rank - rank % size for rank in ranks})
    if set(ranks) != {first + i for first in first_ranks for i in range(size)}:
        raise ValueError(f"{label}: {size} ranks share a process group; name all of them, not only {sorted(ranks)}")
    return first_ranks
