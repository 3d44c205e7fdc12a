import pytest

from hybridrl import cli, failure_policy
from hybridrl.master.state.tables import JOB, STATE_MACHINES, JobPhase, next_state, to_text


@pytest.mark.parametrize("machine", STATE_MACHINES, ids=lambda machine: machine.name)
def test_every_state_is_reachable_from_the_first_and_reaches_an_end(machine):
    follows = {state: {to for (source, _), to in machine.table.items() if source == state} for state in machine.states}

    def reachable(start):
        seen, new = {start}, [start]
        while new:
            new = [to for state in new for to in follows[state] if to not in seen]
            seen |= set(new)
        return seen

    first = next(iter(machine.states))
    assert reachable(first) == set(machine.states)
    for state in machine.states:
        assert reachable(state) & machine.ends


@pytest.mark.parametrize("machine", STATE_MACHINES, ids=lambda machine: machine.name)
def test_nothing_leaves_an_end_and_only_states_are_named(machine):
    named = {state for state, _ in machine.table} | set(machine.table.values())
    assert named <= set(machine.states)
    assert not {source for source, _ in machine.table} & machine.ends


def test_an_event_without_an_entry_changes_nothing():
    assert next_state(JOB, JobPhase.SUCCEEDED, "failure") == JobPhase.SUCCEEDED
    assert next_state(JOB, JobPhase.RUNNING, "failure") == JobPhase.RECOVERING


def test_the_command_prints_every_entry(capsys):
    assert cli.main(["job", "states"]) == 0
    printed = capsys.readouterr().out
    assert printed == f"{to_text()}\n{failure_policy.to_text()}"
    entries = [line.split() for line in printed.splitlines() if "->" in line]
    expected = [[*pair, "->", to] for machine in STATE_MACHINES for pair, to in machine.table.items()]
    assert entries == expected
