import json
import os
import random
import tempfile
from pathlib import Path

import pytest

from hybridrl.errors import DataError
from hybridrl.training_service.state.ledger import NOTE, REPEATED, Conflict, Ledger, StoredAnswer, failure, has_failed

NUM_SCHEDULES = 1000
NUM_OPERATIONS = 8


@pytest.fixture
def fast_path(tmp_path):
    """A directory in memory where there is one: the schedules write some 20 000 files."""
    if not os.access("/dev/shm", os.W_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
        yield Path(name)


def run_next(ledger, *, states=True):
    """Run the next operation as a lane does; return its body, or None if it has not arrived."""
    if (operation := ledger.next()) is None:
        return None
    answer, body = StoredAnswer(b'{"of": %d}' % operation.seq_id), operation.body
    has_state = states and operation.kind != REPEATED
    if has_state:
        place = ledger.state(operation.seq_id)
        place.mkdir()
        (place / NOTE).write_bytes(answer.packed(operation.digest))
    ledger.finish(operation, answer, has_state=has_state)
    return body


def run_all(ledger):
    return [body for body in iter(lambda: run_next(ledger), None)]


def created(directory):
    ledger = Ledger(directory)
    ledger.accept(0, "create_model", b"new")
    run_all(ledger)
    return ledger


def test_operations_run_in_the_order_of_their_numbers_whatever_their_arrival(tmp_path):
    ledger = created(tmp_path)
    ledger.accept(3, REPEATED, b"3")
    ledger.accept(2, REPEATED, b"2")
    assert run_all(ledger) == []
    ledger.accept(1, REPEATED, b"1")
    assert run_all(ledger) == [b"1", b"2", b"3"]


def test_a_repeated_operation_runs_once_and_has_one_answer(tmp_path):
    ledger = created(tmp_path)
    first = ledger.accept(1, REPEATED, b"1")
    run_all(ledger)
    again = ledger.accept(1, REPEATED, b"1")
    assert again is first and run_all(ledger) == []
    assert again.answer.result(0).body == b'{"of": 1}'


@pytest.mark.parametrize(("kind", "body"), [(REPEATED, b"other"), ("optim_step", b"1")])
def test_another_request_under_a_taken_number_is_a_conflict_before_and_after_it_has_run(tmp_path, kind, body):
    ledger = created(tmp_path)
    ledger.accept(1, REPEATED, b"1")
    for _ in range(2):
        with pytest.raises(Conflict, match="seq_id=1 has another request"):
            ledger.accept(1, kind, body)
        run_all(ledger)


def test_a_number_far_ahead_is_refused(tmp_path):
    with pytest.raises(Conflict, match="at most 10000 ahead"):
        created(tmp_path).accept(10_001, REPEATED, b"")


def schedule(rng):
    """The deliveries of a client's operations: each at least once, some doubled, in any order."""
    deliveries = [*range(1, NUM_OPERATIONS + 1)]
    deliveries += rng.choices(deliveries, k=rng.randrange(6))
    rng.shuffle(deliveries)
    return deliveries


def test_in_any_schedule_of_drops_doubles_and_kills_each_operation_takes_effect_once(fast_path):
    """A dropped request is sent again later.

    A kill loses all memory, and replays what is behind the last state.
    """
    for number in range(NUM_SCHEDULES):
        rng = random.Random(number)
        directory = fast_path / str(number)
        directory.mkdir()
        ledger, effects = created(directory), {0: []}  # what each stored state has seen
        seen = []
        for seq_id in schedule(rng):
            kind = "optim_step" if seq_id % 4 == 0 else REPEATED
            if rng.random() < 0.1:  # lost, and sent again once the others have arrived
                continue
            ledger.accept(seq_id, kind, b"%d" % seq_id)
            if rng.random() < 0.5:
                seen = follow(ledger, seen, effects)
            if rng.random() < 0.1:
                ledger = Ledger(directory)
                state = ledger.recover()
                seen = list(effects[int(state.name)])
        for seq_id in range(1, NUM_OPERATIONS + 1):
            kind = "optim_step" if seq_id % 4 == 0 else REPEATED
            answer = ledger.accept(seq_id, kind, b"%d" % seq_id).answer
            seen = follow(ledger, seen, effects)
            assert answer.result(0).body == b'{"of": %d}' % seq_id
        assert seen == [b"%d" % seq_id for seq_id in range(1, NUM_OPERATIONS + 1)], number


def follow(ledger, seen, effects):
    while (operation := ledger.next()) is not None:
        seen = [*seen, operation.body]
        effects[operation.seq_id] = seen
        run_next(ledger)
    return seen


def test_after_a_kill_the_operations_behind_the_last_state_run_again_and_others_keep_their_answers(tmp_path):
    ledger = created(tmp_path)
    for seq_id, kind in enumerate([REPEATED, "optim_step", REPEATED, REPEATED], start=1):
        ledger.accept(seq_id, kind, b"%d" % seq_id)
    for _ in range(3):  # killed before 4 has run
        run_next(ledger)
    again = Ledger(tmp_path)
    assert again.recover() == again.state(2)
    assert [json.loads(again.find(seq_id).answer.result(0).body) for seq_id in (0, 1, 2)] == [
        {"of": 0},
        {"of": 1},
        {"of": 2},
    ]
    assert run_all(again) == [b"3", b"4"]


def test_a_model_that_was_never_created_is_created_after_a_kill(tmp_path):
    Ledger(tmp_path).accept(0, "create_model", b"new")
    again = Ledger(tmp_path)
    assert again.recover() is None
    assert run_all(again) == [b"new"]


def test_a_state_makes_the_requests_before_it_and_older_states_unnecessary(tmp_path):
    ledger = created(tmp_path)
    for seq_id in range(1, 5):
        ledger.accept(seq_id, "optim_step" if seq_id % 2 == 0 else REPEATED, b"x")
    run_all(ledger)
    assert [path.name for path in (tmp_path / "state").iterdir()] == ["00000004"]
    assert not list((tmp_path / "operations").glob("*.request"))


def test_after_a_loss_the_operations_behind_the_newest_state_run_again(tmp_path):
    ledger = created(tmp_path)
    for number, kind in enumerate((REPEATED, "optim_step", REPEATED, REPEATED), start=1):
        ledger.accept(number, kind, b"%d" % number)
    run_all(ledger)
    last = ledger.find(4)
    assert ledger.rewind() == ledger.state(2)
    assert run_all(ledger) == [b"3", b"4"] and ledger.find(4) is last


def test_a_step_whose_state_was_stored_before_the_loss_does_not_run_again(tmp_path):
    ledger = created(tmp_path)
    step = ledger.accept(1, "optim_step", b"1")
    place = ledger.state(1)
    place.mkdir()
    (place / NOTE).write_bytes(StoredAnswer(b"stored").packed(step.digest))
    assert ledger.rewind() == place and ledger.next() is None
    assert step.answer.result(0).body == b"stored"


def test_a_failure_stays_one_after_a_server_was_killed(tmp_path):
    ledger = created(tmp_path)
    operation = ledger.accept(1, REPEATED, b"1")
    ledger.finish(operation, failure(DataError("bad data")), has_state=False)
    again = Ledger(tmp_path)
    again.recover()
    assert has_failed(again.next().answer.result(0))
