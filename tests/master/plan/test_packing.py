"""Roles joined by heavy edges share a machine wherever all of the job still fits."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridrl.errors import PlacementError
from hybridrl.master.jobs.builder import DLJobBuilder
from hybridrl.master.plan.packing import pack, pack_plan, pool_edges
from hybridrl.single_controller.placement.feasibility import NodeCapacity, check_feasible
from hybridrl.single_controller.placement.plan import Reservation

A = "some.module:Class"


def wanted(pool, *sizes, **more):
    return [
        Reservation(f"job/{pool}/node-{node}", pool, ({"CPU": 1.0},) * size, **more) for node, size in enumerate(sizes)
    ]


def machines(*cpus):
    return [
        NodeCapacity(f"m{number}", {"CPU": count}, {"ray.io/node-id": f"id{number}"})
        for number, count in enumerate(cpus)
    ]


def test_the_heaviest_edge_stays_on_a_machine_and_the_lighter_one_crosses():
    # 4 + 4 + 4 on two machines of 8: only one pair can be together.
    job = wanted("actor", 4) + wanted("rollout", 4) + wanted("reward", 4)
    heavy_first = pack(job, {("actor", "rollout"): 9.0, ("reward", "rollout"): 1.0}, machines(8, 8))
    assert heavy_first["job/actor/node-0"] == heavy_first["job/rollout/node-0"] != heavy_first["job/reward/node-0"]
    other = pack(job, {("reward", "rollout"): 9.0, ("actor", "rollout"): 1.0}, machines(8, 8))
    assert other["job/reward/node-0"] == other["job/rollout/node-0"] != other["job/actor/node-0"]


def test_nodes_of_two_pools_go_together_in_pairs_and_what_does_not_fit_stays_apart():
    places = pack(wanted("actor", 4, 4) + wanted("rollout", 2, 2, 2, 2), {("actor", "rollout"): 1.0}, machines(8, 8))
    assert [places[f"job/rollout/node-{node}"] for node in range(4)] == [
        places[f"job/actor/node-{node % 2}"] for node in range(4)
    ]
    places = pack(wanted("actor", 4) + wanted("rollout", 2, 2), {("actor", "rollout"): 1.0}, machines(6, 2))
    assert [places[name] for name in ("job/actor/node-0", "job/rollout/node-0", "job/rollout/node-1")] == [0, 0, 1]


def test_pools_are_not_joined_if_a_third_would_not_fit():
    # a and b fit together on the machine of 4, but it is the only one that holds c.
    assert pack(wanted("a", 1) + wanted("b", 1) + wanted("c", 4), {("a", "b"): 1.0}, machines(4, 1, 1)) == {}
    assert pack(wanted("a", 1) + wanted("b", 1, apart_from=("a",)), {("a", "b"): 1.0}, machines(4, 4)) == {}
    assert pack(wanted("a", 9), {}, machines(4)) == {}


def test_spread_pools_stay_spread():
    places = pack(wanted("a", 1, 1, spread=True) + wanted("b", 1, 1), {("a", "b"): 1.0}, machines(4, 4))
    assert places["job/a/node-0"] != places["job/a/node-1"]
    assert [places[f"job/b/node-{node}"] for node in range(2)] == [places[f"job/a/node-{node}"] for node in range(2)]


def test_edges_of_roles_are_added_up_for_their_pools_and_the_heaviest_is_first():
    builder = DLJobBuilder().workload("a", A).workload("b", A).workload("c", A).with_collocation("a", "b")
    spec = (
        builder.feeds("a", "c", weight=2.0)
        .feeds("c", "b", weight=3)
        .feeds("a", "b", weight=99)
        .weights("a", "c", weight=0)
        .build()
        .spec
    )
    assert pool_edges(spec) == {("a+b", "c"): 5.0}
    spec = (
        DLJobBuilder()
        .workload("a", A)
        .workload("b", A)
        .workload("c", A)
        .feeds("a", "b")
        .weights("b", "c", weight=1.5)
        .build()
        .spec
    )
    assert list(pool_edges(spec).items()) == [(("b", "c"), 1.5), (("a", "b"), 1.0)]


def test_a_plan_has_the_preferred_machine_of_each_reservation():
    spec = DLJobBuilder().device_type("CPU").workload("a", A).workload("b", A).feeds("a", "b").build().spec
    plan = DLJobBuilder().device_type("CPU").workload("a", A).workload("b", A).feeds("a", "b").build().plan("job")
    assert [one.preferred_node for one in pack_plan(plan, spec, machines(2, 2)).reservations()] == ["id0", "id0"]
    assert pack_plan(plan, spec, machines(2)) == plan  # on one machine all are together
    assert pack_plan(plan, spec, machines(1, 1)) == plan


pool_sizes = st.lists(st.integers(1, 4), min_size=2, max_size=5)


@settings(max_examples=150, deadline=None)
@given(
    sizes=pool_sizes,
    cpus=st.lists(st.integers(1, 7), min_size=1, max_size=3),
    joined=st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), max_size=5),
    apart=st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), max_size=2),
)
def test_a_feasible_job_stays_feasible_and_edges_are_kept_as_by_exhaustive_search(sizes, cpus, joined, apart):
    names = "abcde"[: len(sizes)]
    away = {names[i]: names[j] for i, j in apart if i != j and max(i, j) < len(names)}
    job = [
        one
        for name, size in zip(names, sizes, strict=True)
        for one in wanted(name, size, apart_from=tuple(away.get(name, "")))
    ]
    edges = list(
        dict.fromkeys(tuple(sorted((names[i], names[j]))) for i, j in joined if i != j and max(i, j) < len(names))
    )

    def fits(homes, pairs):
        free = list(cpus)
        for size, home in zip(sizes, homes, strict=True):
            free[home] -= size
        at = dict(zip(names, homes, strict=True))
        return min(free) >= 0 and all(at[a] != at[b] for a, b in away.items()) and all(at[a] == at[b] for a, b in pairs)

    every = list(itertools.product(range(len(cpus)), repeat=len(sizes)))
    kept = []
    for edge in edges:  # the heaviest first: greedy, by exhaustive search
        if any(fits(homes, [*kept, edge]) for homes in every):
            kept.append(edge)
    try:
        check_feasible(job, machines(*cpus))
    except PlacementError:
        assert pack(job, dict.fromkeys(edges, 1.0), machines(*cpus)) == {}
        return
    places = pack(job, dict.fromkeys(edges, 1.0), machines(*cpus))
    assert bool(places) == bool(kept)
    if places:
        assert fits([places[f"job/{name}/node-0"] for name in names], kept)


def test_a_negative_weight_is_refused():
    with pytest.raises(ValueError, match=r"feeds\('a', 'b'\): weight=-1 .*0 or more"):
        DLJobBuilder().workload("a", A).workload("b", A).feeds("a", "b", weight=-1).build()
