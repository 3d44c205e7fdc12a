"""The pool of a run that may go on with fewer ranks is the largest one that the nodes hold."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridrl.single_controller.placement.feasibility import NodeCapacity
from hybridrl.single_controller.placement.fewer_slots import largest_fitting, slots_on_node


def chosen(full, capacities, *, max_slots=1000, reserved=0, unit=1):
    """Return the choice for nodes of these capacities, of which other pools need `reserved` slots in total."""
    left = sum(capacities) - reserved

    def fits(sizes):
        nodes = sorted(capacities, reverse=True)
        holds = all(size <= node for size, node in zip(sorted(sizes, reverse=True), nodes, strict=False))
        return holds and len(sizes) <= len(nodes) and sum(sizes) <= left

    return largest_fitting(full, capacities, max_slots=max_slots, fits=fits, unit=unit)


@pytest.mark.parametrize(
    ("full", "capacities", "expected"),
    [
        ([8, 8], [8, 8], [8, 8]),
        ([8, 8], [8], [8]),  # a node is gone
        ([8, 8], [8, 5], [8, 5]),  # devices of a node are gone
        ([1, 1, 1], [1, 0, 1, 0], [1, 1]),
        ([4, 4], [16], [4]),  # a node of the pool has four slots; a larger one is used for four
        ([2, 2], [0], []),
        ([2, 2], [], []),
    ],
)
def test_the_largest_pool_that_the_nodes_hold(full, capacities, expected):
    assert chosen(full, capacities) == expected


def test_slots_that_other_pools_need_are_left_out_on_the_emptiest_node():
    assert chosen([4, 4], [4, 3], reserved=1) == [4, 2]
    assert chosen([4, 4], [4, 1], reserved=1) == [4]


def test_a_size_that_was_refused_is_not_chosen_again():
    assert chosen([4, 4], [4, 4], max_slots=7) == [4, 3]
    assert chosen([2], [2], max_slots=0) == []


@pytest.mark.parametrize(
    ("full", "capacities", "unit", "expected"),
    [
        ([8, 8], [8, 7], 4, [8, 4]),
        ([8, 8], [7, 7], 4, [4, 4]),  # no model on two nodes, as before
        ([8, 8], [8, 3], 4, [8]),
        ([4, 4, 4, 4], [4, 4, 4], 8, [4, 4]),  # a model of two nodes
        ([2, 2], [1, 1], 2, []),
    ],
)
def test_slots_that_share_a_model_are_left_out_together(full, capacities, unit, expected):
    assert chosen(full, capacities, unit=unit) == expected


@given(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.lists(st.integers(0, 5), max_size=5))
def test_no_slot_is_left_unused(full, capacities):
    most = sum(min(pair) for pair in zip(sorted(full, reverse=True), sorted(capacities, reverse=True), strict=False))
    assert sum(chosen(full, capacities)) == most


def test_slots_of_a_node_are_limited_by_its_scarcest_resource():
    node = NodeCapacity("node", {"CPU": 8.0, "GPU": 2.0})
    assert slots_on_node({"CPU": 1, "GPU": 1}, node, limit=8) == 2
    assert slots_on_node({"CPU": 1}, node, limit=4) == 4
    assert slots_on_node({"CPU": 1, "TPU": 1}, node, limit=4) == 0
