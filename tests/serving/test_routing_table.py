"""Routing invariants: only serving replicas get requests, none gets lost, and no replica is overloaded."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridrl.serving.routing_table import BLOCK_TOKENS, NEXT_STATES, ReplicaState, RoutingTable

PROMPTS = [tuple(range(i, i + length)) for i, length in [(0, 5), (0, 40), (0, 64), (100, 64), (200, 100)]]
KINDS = st.sampled_from(["assign", "assign", "assign", "finish", "lose", "restore"])
EVENTS = st.lists(st.tuples(KINDS, st.integers(0, 40), st.integers(0, 4)), max_size=120)


def serving_table(num_replicas: int, **more) -> RoutingTable:
    table = RoutingTable(num_replicas, **more)
    for replica in range(num_replicas):
        table.move(replica, ReplicaState.SERVING)
    return table


def restore(table: RoutingTable, replica: int) -> None:
    table.move(replica, ReplicaState.IDLE)
    table.move(replica, ReplicaState.SERVING)


@settings(max_examples=200, deadline=None)
@given(EVENTS, st.integers(1, 5))
def test_every_request_is_open_on_one_serving_replica_until_it_finishes_or_its_replica_is_lost(events, num_replicas):
    table, open_on, serving = serving_table(num_replicas, slack=3), {}, set(range(num_replicas))
    for number, (event, which, prompt) in enumerate(events):
        replica = which % num_replicas
        if event == "assign":
            loads = {r: table.load(r) for r in serving}
            conversation = f"conversation {which % 7}"
            before = table._conversations.get(conversation)
            chosen = table.assign(str(number), PROMPTS[prompt], conversation=conversation)
            assert (chosen in serving) if serving else chosen is None
            if chosen is None:
                continue
            open_on[str(number)] = chosen
            if before in serving:
                assert chosen == before
            else:
                assert loads[chosen] <= min(loads.values()) + 3
        elif event == "finish" and open_on:
            name = sorted(open_on)[which % len(open_on)]
            table.finish(name)
            del open_on[name]
        elif event == "lose" and replica in serving:
            serving.discard(replica)
            assert sorted(table.lose(replica)) == sorted(name for name, where in open_on.items() if where == replica)
            open_on = {name: where for name, where in open_on.items() if where != replica}
        elif event == "restore" and replica not in serving:
            serving.add(replica)
            restore(table, replica)
        assert [table.load(r) for r in range(num_replicas)] == [
            sum(w == r for w in open_on.values()) for r in range(num_replicas)
        ]
        assert all(table.replica_of(name) == where for name, where in open_on.items()) and table.serving == serving


def assign_all(table: RoutingTable, prompts, start: int = 0) -> list[int | None]:
    return [table.assign(f"r{start + i}", prompt, conversation=f"c{start + i}") for i, prompt in enumerate(prompts)]


def test_unrelated_requests_are_spread_evenly():
    assigned = assign_all(serving_table(4), [(i,) * 20 for i in range(40)])
    assert sorted(assigned) == sorted(list(range(4)) * 10)


def test_samples_of_one_prompt_share_a_replica_until_it_is_busier_by_the_slack():
    assigned = assign_all(serving_table(2, slack=4), [tuple(range(64))] * 12)
    assert assigned[:5] == [0] * 5  # the fifth finds 4 open there and none on the other
    assert abs(assigned.count(0) - assigned.count(1)) <= 5


def test_a_shared_prefix_of_less_than_half_the_prompt_is_ignored():
    system = tuple(range(BLOCK_TOKENS))
    assigned = assign_all(serving_table(4), [(*system, *([1000 + i] * 60)) for i in range(4)])
    assert sorted(assigned) == [0, 1, 2, 3]


def test_a_restored_replica_is_not_flooded():
    table = serving_table(3)
    table.lose(2)
    for i, _ in enumerate(assign_all(table, [(i,) * 20 for i in range(30)])):
        table.finish(f"r{i}")
    restore(table, 2)
    assigned = assign_all(table, [(500 + i,) * 20 for i in range(9)], start=100)
    assert sorted(assigned) == [0, 0, 0, 1, 1, 1, 2, 2, 2]


def test_a_conversation_moves_when_its_replica_is_lost_and_stays_on_the_new_one():
    table = serving_table(3)
    first = table.assign("a", (1, 2), conversation="c")
    assert table.lose(first) == ["a"]
    second = table.assign("a", (1, 2), conversation="c")
    table.finish("a")
    restore(table, first)
    assert second != first and table.assign("b", (1, 2, 3), conversation="c") == second


def test_a_request_cannot_be_open_twice():
    table = serving_table(1)
    table.assign("a", (1,), conversation="c")
    with pytest.raises(ValueError, match="request 'a' is open already, on replica 0"):
        table.assign("a", (1,), conversation="c")


def test_conversations_that_nobody_ends_are_dropped_the_longest_unused_first(monkeypatch):
    monkeypatch.setattr("hybridrl.serving.routing_table.MAX_CONVERSATIONS", 3)
    table = serving_table(2)
    for number, conversation in enumerate("abacd"):
        table.assign(f"request {number}", (number,) * 20, conversation=conversation)
    assert [table._conversations.get(name) is None for name in "abcd"] == [False, True, False, False]


@pytest.mark.parametrize("after", ReplicaState)
@pytest.mark.parametrize("before", ReplicaState)
def test_a_replica_changes_its_state_as_the_table_of_states_says_and_only_then(before, after):
    table = RoutingTable(2)
    table.states[1] = before
    if after in NEXT_STATES[before]:
        table.move(1, after)
        assert table.states[1] is after and table.in_state(after) == ([0, 1] if after is ReplicaState.IDLE else [1])
    else:
        with pytest.raises(ValueError, match=f"replica 1 is {before.name} and cannot become {after.name}"):
            table.move(1, after)
        assert table.states[1] is before


def test_every_replica_can_serve_again_unless_it_is_given_up():
    def reachable(state: ReplicaState, found: set[ReplicaState]) -> set[ReplicaState]:
        for after in NEXT_STATES[state] - found:
            found |= reachable(after, found | {after})
        return found

    ends = {state for state in ReplicaState if ReplicaState.SERVING not in reachable(state, {state})}
    assert ends == {ReplicaState.GIVEN_UP}
    assert all(reachable(state, {state}) == {*ReplicaState} for state in {*ReplicaState} - ends)
