import os

import fsspec
import pytest
from hypothesis import given, settings

from hybridrl.errors import JournalError
from hybridrl.master.service.journal import JournaledState, history, replay
from hybridrl.master.state.events import CheckpointCommitted, StepCompleted
from hybridrl.master.state.reducer import JobState, reduce
from tests.master.state.test_reducer import events, st, starts


def steps(count):
    return [StepCompleted(step) for step in range(1, count + 1)]


def write(path, sequence, **options):
    journal = JournaledState(str(path), **options)
    for event in sequence:
        journal.apply(event)
    journal.close()
    return journal


def only_file(path):
    [name] = os.listdir(path)
    return path / name


@settings(max_examples=60, deadline=None)
@given(starts, st.lists(events, max_size=25), st.integers(1, 7))
def test_any_prefix_replays_to_the_live_state(tmp_path_factory, start, sequence, snapshot_every):
    path = str(tmp_path_factory.mktemp("journal"))
    journal = JournaledState(path, snapshot_every=snapshot_every)
    for event in [start, *sequence]:
        journal.apply(event)
        assert replay(path) == (journal.state, journal.num_events)
    journal.close()
    state = JobState()
    for entry in history(path):  # without the snapshots
        state, _ = reduce(state, entry.event)
    assert state == journal.state


def test_a_new_writer_continues_where_the_old_one_ended(tmp_path):
    write(tmp_path, steps(3))
    journal = write(tmp_path, [StepCompleted(9), CheckpointCommitted(9, "global_step_9")])
    assert (journal.state.step, journal.state.commit, journal.num_events) == (9, "global_step_9", 5)
    assert [entry.event for entry in history(str(tmp_path))] == [
        *steps(3),
        StepCompleted(9),
        CheckpointCommitted(9, "global_step_9"),
    ]


@pytest.mark.parametrize("cut", [1, 5, 30])
def test_a_torn_last_line_does_not_count(tmp_path, cut):
    write(tmp_path, steps(3))
    file = only_file(tmp_path)
    file.write_bytes(file.read_bytes()[:-cut])
    assert replay(str(tmp_path))[0].step == 2
    journal = write(tmp_path, [StepCompleted(7)])
    assert replay(str(tmp_path)) == (journal.state, 3)
    assert journal.state.step == 7


def test_damage_elsewhere_is_an_error_that_names_file_and_line(tmp_path):
    write(tmp_path, steps(5))
    file = only_file(tmp_path)
    lines = file.read_bytes().split(b"\n")
    lines[2] = lines[2].replace(b'"step": 3', b'"step": 4')
    file.write_bytes(b"\n".join(lines))
    with pytest.raises(JournalError, match=rf"{file.name}, line 3: the checksum is wrong"):
        JournaledState(str(tmp_path))


def test_a_missing_line_is_damage(tmp_path):
    write(tmp_path, steps(5))
    file = only_file(tmp_path)
    lines = file.read_bytes().split(b"\n")
    file.write_bytes(b"\n".join([*lines[:1], *lines[2:]]))
    with pytest.raises(JournalError, match=rf"{file.name}, line 2: event 1 belongs here"):
        replay(str(tmp_path))


def test_a_missing_file_and_a_damaged_snapshot_are_damage(tmp_path):
    write(tmp_path, steps(5), snapshot_every=2)
    assert sorted(os.listdir(tmp_path)) == [
        *(f"events-{number:09d}.jsonl" for number in (0, 2, 4)),
        *(f"snapshot-{number:09d}.json" for number in (2, 4)),
    ]
    snapshot = tmp_path / "snapshot-000000004.json"
    snapshot.write_bytes(snapshot.read_bytes().replace(b'"step": 4', b'"step": 5'))
    with pytest.raises(JournalError, match="snapshot-000000004.json, line 1"):
        replay(str(tmp_path))
    snapshot.unlink()
    (tmp_path / "events-000000002.jsonl").unlink()
    with pytest.raises(JournalError, match="events-000000004.jsonl starts with event 4"):
        history(str(tmp_path))


def test_lines_that_cannot_be_written_stay_in_memory_and_the_state_advances(tmp_path):
    path = tmp_path / "journal"
    journal = JournaledState(str(path))
    journal.apply(StepCompleted(1))
    journal._close()
    path.rename(tmp_path / "away")
    journal.apply(StepCompleted(2))
    journal.apply(StepCompleted(3))
    assert (journal.state.step, journal.is_durable) == (3, False)
    (tmp_path / "away").rename(path)
    journal.flush()
    assert journal.is_durable
    assert replay(str(path)) == (journal.state, 3)


def test_storage_that_cannot_append_holds_the_same_journal():
    path = "memory://journal-of-a-test"
    journal = write(path, steps(5), snapshot_every=2)
    assert replay(path) == (journal.state, 5)
    assert [entry.event for entry in history(path)] == steps(5)
    filesystem = fsspec.filesystem("memory")
    assert len(filesystem.ls("/journal-of-a-test")) == 5 + 2


def test_events_that_change_nothing_are_not_written(tmp_path):
    journal = write(tmp_path, [StepCompleted(3), StepCompleted(3), StepCompleted(2)])
    assert (journal.num_events, len(history(str(tmp_path)))) == (1, 1)
