"""Routing invariants: no request goes to a lost replica, none gets lost, and no replica is overloaded."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridrl.serving.routing_table import BLOCK_TOKENS, RoutingTable

PROMPTS = [tuple(range(i, i + length)) for i, length in [(0, 5), (0, 40), (0, 64), (100, 64), (200, 100)]]
KINDS = st.sampled_from(["assign", "assign", "assign", "finish", "mark_lost", "mark_healthy"])
EVENTS = st.lists(st.tuples(KINDS, st.integers(0, 40), st.integers(0, 4)), max_size=120)


@settings(max_examples=200, deadline=None)
@given(EVENTS, st.integers(1, 5))
def test_every_request_is_open_on_one_healthy_replica_until_it_finishes_or_its_replica_is_lost(events, num_replicas):
    table, open_on, healthy = RoutingTable(num_replicas, slack=3), {}, set(range(num_replicas))
    for number, (event, which, prompt) in enumerate(events):
        replica = which % num_replicas
        if event == "assign":
            loads = {r: table.load(r) for r in healthy}
            conversation = f"conversation {which % 7}"
            before = table.replica_of_conversation(conversation)
            chosen = table.assign(str(number), PROMPTS[prompt], conversation=conversation)
            assert (chosen in healthy) if healthy else chosen is None
            if chosen is None:
                continue
            open_on[str(number)] = chosen
            if before in healthy:
                assert chosen == before
            else:
                assert loads[chosen] <= min(loads.values()) + 3
        elif event == "finish" and open_on:
            name = sorted(open_on)[which % len(open_on)]
            table.finish(name)
            del open_on[name]
        elif event == "mark_lost":
            healthy.discard(replica)
            assert sorted(table.mark_lost(replica)) == sorted(
                name for name, where in open_on.items() if where == replica
            )
            open_on = {name: where for name, where in open_on.items() if where != replica}
        elif event == "mark_healthy":
            healthy.add(replica)
            table.mark_healthy(replica)
        assert [table.load(r) for r in range(num_replicas)] == [
            sum(w == r for w in open_on.values()) for r in range(num_replicas)
        ]
        assert all(table.replica_of(name) == where for name, where in open_on.items()) and table.healthy == healthy


def assign_all(table: RoutingTable, prompts, start: int = 0) -> list[int | None]:
    return [table.assign(f"r{start + i}", prompt, conversation=f"c{start + i}") for i, prompt in enumerate(prompts)]


def test_unrelated_requests_are_spread_evenly():
    assigned = assign_all(RoutingTable(4), [(i,) * 20 for i in range(40)])
    assert sorted(assigned) == sorted(list(range(4)) * 10)


def test_samples_of_one_prompt_share_a_replica_until_it_is_busier_by_the_slack():
    assigned = assign_all(RoutingTable(2, slack=4), [tuple(range(64))] * 12)
    assert assigned[:5] == [0] * 5  # the fifth finds 4 open there and none on the other
    assert abs(assigned.count(0) - assigned.count(1)) <= 5


def test_a_shared_prefix_of_less_than_half_the_prompt_is_ignored():
    system = tuple(range(BLOCK_TOKENS))
    assigned = assign_all(RoutingTable(4), [(*system, *([1000 + i] * 60)) for i in range(4)])
    assert sorted(assigned) == [0, 1, 2, 3]


def test_a_restored_replica_is_not_flooded():
    table = RoutingTable(3)
    table.mark_lost(2)
    for i, _ in enumerate(assign_all(table, [(i,) * 20 for i in range(30)])):
        table.finish(f"r{i}")
    table.mark_healthy(2)
    assigned = assign_all(table, [(500 + i,) * 20 for i in range(9)], start=100)
    assert sorted(assigned) == [0, 0, 0, 1, 1, 1, 2, 2, 2]


def test_a_conversation_moves_when_its_replica_is_lost_and_stays_on_the_new_one():
    table = RoutingTable(3)
    first = table.assign("a", (1, 2), conversation="c")
    assert table.mark_lost(first) == ["a"]
    second = table.assign("a", (1, 2), conversation="c")
    table.finish("a")
    table.mark_healthy(first)
    assert second != first and table.assign("b", (1, 2, 3), conversation="c") == second


def test_a_request_cannot_be_open_twice():
    table = RoutingTable(1)
    table.assign("a", (1,), conversation="c")
    with pytest.raises(ValueError, match="request 'a' is open already, on replica 0"):
        table.assign("a", (1,), conversation="c")


def test_conversations_that_nobody_ends_are_dropped_the_longest_unused_first(monkeypatch):
    monkeypatch.setattr("hybridrl.serving.routing_table.MAX_CONVERSATIONS", 3)
    table = RoutingTable(2)
    for number, conversation in enumerate("abacd"):
        table.assign(f"request {number}", (number,) * 20, conversation=conversation)
    assert [table.replica_of_conversation(name) is None for name in "abcd"] == [False, True, False, False]


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 12), min_size=1, max_size=4), st.sets(st.integers(0, 3)))
def test_after_the_moves_the_loads_of_healthy_replicas_differ_by_one_at_most(loads, excluded):
    table = RoutingTable(len(loads))
    for replica, load in enumerate(loads):
        for number in range(load):
            table.move_conversation(f"{replica}.{number}", replica)
            table.assign(f"{replica}.{number}", (), conversation=f"{replica}.{number}")
    for replica in excluded & table.healthy:
        table.exclude(replica)
    after = {replica: loads[replica] for replica in table.healthy}
    moves = table.moves()
    for name, replica in moves:
        after[table.replica_of(name)] -= 1
        after[replica] += 1
    assert not after or max(after.values()) - min(after.values()) <= 1
    assert len({name for name, _ in moves}) == len(moves)
    newest_stay = {name for name, _ in moves}  # of a replica, the requests that move are the last ones
    for replica in table.healthy:
        stays = [name not in newest_stay for name in table.open_on(replica)]
        assert stays == sorted(stays, reverse=True)
