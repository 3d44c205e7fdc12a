"""What machines can hold: proven by search, and what is missing is said where."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridrl.errors import PlacementError
from hybridrl.single_controller.placement.feasibility import Machine, check_feasible, selects
from hybridrl.single_controller.placement.plan import Reservation

CPU = {"CPU": 1.0}


def wanted(pool, *sizes, bundle=CPU, **more):
    return [Reservation(f"job/{pool}/node-{node}", pool, (bundle,) * size, **more) for node, size in enumerate(sizes)]


def machines(*cpus, **more):
    return [Machine(f"m{number}", {"CPU": count}, **more) for number, count in enumerate(cpus)]


def is_feasible(reservations, cluster):
    try:
        check_feasible(reservations, cluster)
    except PlacementError:
        return False
    return True


def test_each_reservation_needs_one_machine_for_all_of_it():
    check_feasible(wanted("a", 2, 1), machines(1, 2))
    with pytest.raises(
        PlacementError,
        match=r"2 worker processes of 'a' \(2 CPU together\).*; m0: 1 CPU left, 1 CPU missing; m1: 1 CPU",
    ):
        check_feasible(wanted("a", 2), machines(1, 1))
    with pytest.raises(PlacementError, match="1 GPU missing"):
        check_feasible(wanted("a", 1, bundle={"CPU": 1, "GPU": 1}), machines(8))
    with pytest.raises(PlacementError, match="3 MB memory missing"):
        check_feasible(wanted("a", 1, bundle={"memory": 5 * 2**20}), [Machine("m", {"memory": 2 * 2**20})])


def test_what_largest_first_would_miss_is_found():
    # 44+22+24 and 24+21+17+8+8+6+6 fill two machines of 90; the largest first, each on the first machine with room, do
    # not fit.
    check_feasible(wanted("a", 44, 24, 24, 22, 21, 17, 8, 8, 6, 6), machines(90, 90))
    with pytest.raises(PlacementError):
        check_feasible(wanted("a", 44, 24, 24, 22, 21, 17, 8, 8, 6, 7), machines(90, 90))


def test_what_a_thousand_machines_cannot_hold_is_proven_at_once():
    check_feasible(wanted("a", *[8] * 1000), machines(*[8] * 1000))
    with pytest.raises(PlacementError, match="and 995 more"):
        check_feasible(wanted("a", *[8] * 1000), machines(*[8] * 999))


def test_a_pool_of_a_machine_each_needs_as_many_machines():
    check_feasible(wanted("a", 1, 1, apart_from=("a",)), machines(2, 2))
    with pytest.raises(PlacementError, match="m0: holds a, from which it has to be apart"):
        check_feasible(wanted("a", *[1] * 9, apart_from=("a",)), machines(*[4] * 8))


def test_pools_that_are_apart_share_no_machine_whichever_says_so():
    pair = wanted("a", 1) + wanted("b", 1, apart_from=("a",))
    check_feasible(pair, machines(2, 1))
    for order in (pair, pair[::-1]):
        with pytest.raises(PlacementError, match="apart"):
            check_feasible(order, machines(2))


def test_labels_choose_machines():
    zones = [
        Machine("m0", {"CPU": 1}, {"zone": "a"}),
        Machine("m1", {"CPU": 1}, {"zone": "b"}),
        Machine("m2", {"CPU": 1}),
    ]
    chosen = {w: [m.name for m in zones if selects({"zone": w}, m)] for w in ("a", "!a", "in(a,b)", "!in(a, b)", "(a")}
    assert chosen == {"a": ["m0"], "!a": ["m1", "m2"], "in(a,b)": ["m0", "m1"], "!in(a, b)": ["m2"], "(a": []}
    check_feasible(wanted("first", 1) + wanted("labelled", 1, labels={"zone": "a"}), zones[:2])
    with pytest.raises(PlacementError, match="m1: label zone=b, wanted zone=c"):
        check_feasible(wanted("a", 1, labels={"zone": "c"}), zones)


def test_the_way_out_is_the_reservations_own():
    with pytest.raises(PlacementError, match=r"\. Buy more machines$"):
        check_feasible(wanted("a", 1, way_out="Buy more machines"), [])


@settings(max_examples=150, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 5), min_size=1, max_size=5),
    cpus=st.lists(st.integers(0, 7), min_size=1, max_size=3),
    pools=st.lists(st.sampled_from("ab"), min_size=5, max_size=5),
    own=st.booleans(),
    other=st.booleans(),
)
def test_the_answer_is_that_of_trying_everything(sizes, cpus, pools, own, other):
    apart = {"a": ("a",) * own, "b": ("a",) * other}
    reservations = [
        Reservation(str(i), pool, (CPU,) * size, apart_from=apart[pool])
        for i, (size, pool) in enumerate(zip(sizes, pools, strict=False))
    ]

    def holds(homes):
        for machine, room in enumerate(cpus):
            here = [one for one, home in zip(reservations, homes, strict=True) if home == machine]
            names = [one.pool for one in here]
            if (
                sum(len(one.bundles) for one in here) > room
                or (own and names.count("a") > 1)
                or (other and {"a", "b"} <= set(names))
            ):
                return False
        return True

    expected = any(map(holds, itertools.product(range(len(cpus)), repeat=len(reservations))))
    assert is_feasible(reservations, machines(*cpus)) == expected
