"""Choose a smaller pool while the cluster cannot hold the whole one.

Pure: reserves nothing. Called by the driver of a run that may go on with fewer ranks (`trainer.min_ranks`).
"""

from collections.abc import Callable, Mapping, Sequence

from hybridrl.single_controller.placement.feasibility import ROUNDING, NodeCapacity


def slots_on_node(bundle: Mapping[str, float], node: NodeCapacity, *, limit: int) -> int:
    """Return how many slots of these resources an otherwise empty node holds, at most `limit`."""
    fitting = [(node.resources.get(name, 0) + ROUNDING) // amount for name, amount in bundle.items() if amount]
    return int(min([limit, *fitting]))


def largest_fitting(
    full: Sequence[int],
    capacities: Sequence[int],
    *,
    max_slots: int,
    fits: Callable[[Sequence[int]], bool],
    unit: int = 1,
) -> list[int]:
    """Return the slots per node of the largest pool that fits, larger nodes first; empty if none does.

    Slots are left out on the node that holds the fewest, so that few nodes are used. Where whole units are on one node
    in the whole pool, they are in the smaller one.

    Args:
        full: slots on each node of the whole pool.
        capacities: slots that each node of the cluster could hold, alone.
        max_slots: upper bound of their sum.
        fits: returns whether the cluster holds the whole job with such a pool.
        unit: divides the sum; so many slots share a model.
    """
    wanted = sorted(full, reverse=True)
    if sum(wanted) <= max_slots and fits(full):
        return list(full)
    step = 1 if any(size % unit for size in full) else unit
    held = [min(pair) // step * step for pair in zip(wanted, sorted(capacities, reverse=True), strict=False)]
    sizes = [size for size in held if size]
    while sizes and (sum(sizes) > max_slots or sum(sizes) % unit or not fits(sizes)):
        sizes[-1] -= step
        sizes = sorted((size for size in sizes if size), reverse=True)
    return sizes
