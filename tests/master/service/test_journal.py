import os

import fsspec
import pytest
from hypothesis import given, settings

from hybridrl.errors import JournalError
from hybridrl.master.service.journal import JobContext, history, replay
from hybridrl.master.state.events import Committed, Stepped
from hybridrl.master.state.reducer import JobState, reduce
from tests.master.state.test_reducer import begins, events, st


def steps(count):
    return [Stepped(step) for step in range(1, count + 1)]


def write(path, story, **options):
    journal = JobContext(str(path), **options)
    for event in story:
        journal.apply(event)
    journal.close()
    return journal


def only_file(path):
    [name] = os.listdir(path)
    return path / name


@settings(max_examples=60, deadline=None)
@given(begins, st.lists(events, max_size=25), st.integers(1, 7))
def test_any_prefix_replays_to_the_live_state(tmp_path_factory, begun, story, snapshot_every):
    path = str(tmp_path_factory.mktemp("journal"))
    journal = JobContext(path, snapshot_every=snapshot_every)
    for event in [begun, *story]:
        journal.apply(event)
        assert replay(path) == (journal.state, journal.num_events)
    journal.close()
    state = JobState()
    for entry in history(path):  # without the snapshots
        state, _ = reduce(state, entry.event)
    assert state == journal.state


def test_a_new_writer_goes_on_where_the_old_one_ended(tmp_path):
    write(tmp_path, steps(3))
    journal = write(tmp_path, [Stepped(9), Committed(9, "global_step_9")])
    assert (journal.state.step, journal.state.commit, journal.num_events) == (9, "global_step_9", 5)
    assert [entry.event for entry in history(str(tmp_path))] == [*steps(3), Stepped(9), Committed(9, "global_step_9")]


@pytest.mark.parametrize("cut", [1, 5, 30])
def test_a_torn_last_line_never_counted(tmp_path, cut):
    write(tmp_path, steps(3))
    file = only_file(tmp_path)
    file.write_bytes(file.read_bytes()[:-cut])
    assert replay(str(tmp_path))[0].step == 2
    journal = write(tmp_path, [Stepped(7)])
    assert replay(str(tmp_path)) == (journal.state, 3)
    assert journal.state.step == 7


def test_damage_elsewhere_is_an_error_that_names_file_and_line(tmp_path):
    write(tmp_path, steps(5))
    file = only_file(tmp_path)
    lines = file.read_bytes().split(b"\n")
    lines[2] = lines[2].replace(b'"step": 3', b'"step": 4')
    file.write_bytes(b"\n".join(lines))
    with pytest.raises(JournalError, match=rf"{file.name}, line 3: the checksum is wrong"):
        JobContext(str(tmp_path))


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
    with pytest.raises(JournalError, match="events-000000004.jsonl begins with event 4"):
        history(str(tmp_path))


def test_what_cannot_be_written_waits_and_the_state_goes_on(tmp_path):
    path = tmp_path / "journal"
    journal = JobContext(str(path))
    journal.apply(Stepped(1))
    journal._close()
    path.rename(tmp_path / "away")
    journal.apply(Stepped(2))
    journal.apply(Stepped(3))
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


def test_events_that_change_nothing_leave_no_trace(tmp_path):
    journal = write(tmp_path, [Stepped(3), Stepped(3), Stepped(2)])
    assert (journal.num_events, len(history(str(tmp_path)))) == (1, 1)
