"""Which reservations nodes can hold, what the error says is missing where, and the largest smaller pool that fits."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridrl.errors import PlacementError
from hybridrl.single_controller.placement.feasibility import (
    NodeCapacity,
    check_feasible,
    labels_match,
    largest_fitting,
    slots_on_node,
)
from hybridrl.single_controller.placement.plan import Reservation

CPU = {"CPU": 1.0}


def wanted(pool, *sizes, bundle=CPU, **more):
    return [Reservation(f"job/{pool}/node-{node}", pool, (bundle,) * size, **more) for node, size in enumerate(sizes)]


def nodes(*cpus, **more):
    return [NodeCapacity(f"m{number}", {"CPU": count}, **more) for number, count in enumerate(cpus)]


def is_feasible(reservations, cluster):
    try:
        check_feasible(reservations, cluster)
    except PlacementError:
        return False
    return True


def test_all_bundles_of_a_reservation_need_one_node():
    check_feasible(wanted("a", 2, 1), nodes(1, 2))
    with pytest.raises(
        PlacementError,
        match=r"'a' \(2 CPU.*m0: 1 .*1 CPU missing; m1:",
    ):
        check_feasible(wanted("a", 2), nodes(1, 1))
    with pytest.raises(PlacementError, match="1 GPU missing"):
        check_feasible(wanted("a", 1, bundle={"CPU": 1, "GPU": 1}), nodes(8))
    with pytest.raises(PlacementError, match="3 MB memory missing"):
        check_feasible(wanted("a", 1, bundle={"memory": 5 * 2**20}), [NodeCapacity("m", {"memory": 2 * 2**20})])


def test_a_packing_that_largest_first_misses_is_found():
    # 44+22+24 and 24+21+17+8+8+6+6 fill two nodes of 90; first-fit decreasing does not find it.
    check_feasible(wanted("a", 44, 24, 24, 22, 21, 17, 8, 8, 6, 6), nodes(90, 90))
    with pytest.raises(PlacementError):
        check_feasible(wanted("a", 44, 24, 24, 22, 21, 17, 8, 8, 6, 7), nodes(90, 90))


def test_a_job_too_large_for_a_thousand_nodes_is_refused_fast():
    check_feasible(wanted("a", *[8] * 1000), nodes(*[8] * 1000))
    with pytest.raises(PlacementError, match="and 995 more"):
        check_feasible(wanted("a", *[8] * 1000), nodes(*[8] * 999))


def test_a_pool_apart_from_itself_needs_a_node_per_reservation():
    check_feasible(wanted("a", 1, 1, apart_from=("a",)), nodes(2, 2))
    with pytest.raises(PlacementError, match="m0: holds a.* on another node"):
        check_feasible(wanted("a", *[1] * 9, apart_from=("a",)), nodes(*[4] * 8))


def test_apart_from_is_symmetric():
    pair = wanted("a", 1) + wanted("b", 1, apart_from=("a",))
    check_feasible(pair, nodes(2, 1))
    for order in (pair, pair[::-1]):
        with pytest.raises(PlacementError, match="must be on another node"):
            check_feasible(order, nodes(2))


def test_labels_select_nodes():
    zones = [
        NodeCapacity("m0", {"CPU": 1}, {"zone": "a"}),
        NodeCapacity("m1", {"CPU": 1}, {"zone": "b"}),
        NodeCapacity("m2", {"CPU": 1}),
    ]
    chosen = {
        w: [m.name for m in zones if labels_match({"zone": w}, m)] for w in ("a", "!a", "in(a,b)", "!in(a, b)", "(a")
    }
    assert chosen == {"a": ["m0"], "!a": ["m1", "m2"], "in(a,b)": ["m0", "m1"], "!in(a, b)": ["m2"], "(a": []}
    check_feasible(wanted("first", 1) + wanted("labelled", 1, labels={"zone": "a"}), zones[:2])
    with pytest.raises(PlacementError, match="m1: label zone=b, wanted zone=c"):
        check_feasible(wanted("a", 1, labels={"zone": "c"}), zones)


def test_the_error_ends_with_the_hint_of_the_reservation():
    with pytest.raises(PlacementError, match=r"\. Buy more machines$"):
        check_feasible(wanted("a", 1, hint="Buy more machines"), [])


@settings(max_examples=150, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 5), min_size=1, max_size=5),
    cpus=st.lists(st.integers(0, 7), min_size=1, max_size=3),
    pools=st.lists(st.sampled_from("ab"), min_size=5, max_size=5),
    own=st.booleans(),
    other=st.booleans(),
)
def test_the_search_agrees_with_exhaustive_search(sizes, cpus, pools, own, other):
    apart = {"a": ("a",) * own, "b": ("a",) * other}
    reservations = [
        Reservation(str(i), pool, (CPU,) * size, apart_from=apart[pool])
        for i, (size, pool) in enumerate(zip(sizes, pools, strict=False))
    ]

    def holds(assignment):
        for node, capacity in enumerate(cpus):
            here = [one for one, its_node in zip(reservations, assignment, strict=True) if its_node == node]
            names = [one.pool for one in here]
            if (
                sum(len(one.bundles) for one in here) > capacity
                or (own and names.count("a") > 1)
                or (other and {"a", "b"} <= set(names))
            ):
                return False
        return True

    expected = any(map(holds, itertools.product(range(len(cpus)), repeat=len(reservations))))
    assert is_feasible(reservations, nodes(*cpus)) == expected


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
