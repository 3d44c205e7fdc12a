import pytest

from hybridrl import cli
from hybridrl.master.state.tables import JOB, MACHINES, Job, advance, to_text


@pytest.mark.parametrize("machine", MACHINES, ids=lambda machine: machine.name)
def test_every_state_is_reached_from_the_first_and_has_a_way_to_an_end(machine):
    follows = {state: {to for (source, _), to in machine.table.items() if source == state} for state in machine.states}

    def reached(start):
        seen, new = {start}, [start]
        while new:
            new = [to for state in new for to in follows[state] if to not in seen]
            seen |= set(new)
        return seen

    first = next(iter(machine.states))
    assert reached(first) == set(machine.states)
    for state in machine.states:
        assert reached(state) & machine.ends


@pytest.mark.parametrize("machine", MACHINES, ids=lambda machine: machine.name)
def test_nothing_leaves_an_end_and_only_states_are_named(machine):
    named = {state for state, _ in machine.table} | set(machine.table.values())
    assert named <= set(machine.states)
    assert not {source for source, _ in machine.table} & machine.ends


def test_an_event_without_an_entry_changes_nothing():
    assert advance(JOB, Job.SUCCEEDED, "failure") == Job.SUCCEEDED
    assert advance(JOB, Job.RUNNING, "failure") == Job.RECOVERING


def test_the_command_prints_every_entry(capsys):
    assert cli.main(["job", "states"]) == 0
    printed = capsys.readouterr().out
    assert printed == to_text()
    entries = [line.split() for line in printed.splitlines() if "->" in line]
    expected = [[*pair, "->", to] for machine in MACHINES for pair, to in machine.table.items()]
    assert entries == expected
