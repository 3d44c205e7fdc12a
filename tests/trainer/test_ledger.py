"""The step ledger: what it adds up to, what it refuses, and what a killed process or a full disk leaves of it."""

import json
import os
import resource

import pytest

from hybridrl.errors import CheckpointError
from hybridrl.framework import OnlineRLContext, Task, stage
from hybridrl.trainer.ledger import FILE, StepLedger, account, read_ledger

TAKEN = {"actor": [4, 4]}


def metrics(updates: int, epoch: int = 0) -> dict[str, float]:
    return {"training/epoch": epoch, "actor/num_updates": float(updates)}


def ledger_of(folder, *, rows: int = 4) -> StepLedger:
    return StepLedger(str(folder), rows=rows)


def begun(folder) -> StepLedger:
    """A ledger of two steps with two prompts and two optimizer steps each, and what its commits hold."""
    ledger = ledger_of(folder)
    ledger.begin()
    ledger.end_step(1, metrics(2), prompts=[2, 0])
    ledger.end_step(2, metrics(4), prompts=[3, 1])
    return ledger


def told(folder):
    return account(read_ledger(str(folder / FILE)))


def test_steps_that_a_killed_process_had_done_behind_its_last_commit_do_not_count(tmp_path):
    ledger = begun(tmp_path)
    committed = ledger.commit(TAKEN)
    ledger.end_step(3, metrics(6, 1), prompts=[1, 0])  # killed before this one is committed
    successor = ledger_of(tmp_path)
    successor.go_on_from(committed, path="global_step_2", step=2, taken=TAKEN)
    successor.end_step(3, metrics(6, 1), prompts=[1, 0])
    result = told(tmp_path)
    assert result.problems() == [] and sorted(result.steps) == [1, 2, 3] and result.again == 1
    assert "runs of a stage per step: 0" in str(result)  # nothing was wrapped here
    assert "every stage and every prompt exactly once" in str(result)


def test_what_did_not_happen_once_is_named(tmp_path):
    ledger = ledger_of(tmp_path)
    ledger.begin()
    ledger.end_step(1, metrics(2), prompts=[2, 0])
    ledger.end_step(3, metrics(4), prompts=[2, 1])
    ledger.end_step(4, metrics(6, 1), prompts=[0])
    assert told(tmp_path).problems() == [
        "step 2 is missing",
        "epoch 0: prompts [2] were used more than once (1 in all)",
        "epoch 0: prompts [3] were not used (1 in all)",
    ]


def test_runs_of_stages_that_are_not_pure_are_counted(tmp_path):
    ledger = ledger_of(tmp_path)
    ledger.begin()

    @stage("update", pure=False)
    def update(ctx):
        pass

    @stage("look")
    def look(ctx):
        pass

    @stage("log")
    def log(ctx):
        step = ctx.total_step + 1
        ctx.metrics |= ledger.end_step(step, metrics(step), prompts=[step])

    counted = ledger(update)
    assert ledger(look) is look
    with Task(ctx=OnlineRLContext()) as task:
        task.use(counted).use(ledger(look)).use(log)
        task.run(max_step=1)
        assert task.ctx.metrics == {"ledger/runs_per_stage": 1.0} and told(tmp_path).problems() == []
        task.use(counted)
        task.run(max_step=2)
    assert told(tmp_path).problems() == ["step 3: update ran 2 times"]


def test_weights_with_other_updates_than_the_ledger_knows_of_are_not_committed(tmp_path):
    ledger = begun(tmp_path)
    with pytest.raises(CheckpointError, match=r"the actor has \[5\] optimizer steps in its weights after step 2, .* knows of 4"):
        ledger.commit({"actor": [5, 5]})
    with pytest.raises(CheckpointError, match=r"\[3, 4\]"):
        ledger.commit({"actor": [4, 3]})
    committed = ledger.commit(TAKEN)
    with pytest.raises(CheckpointError, match="an update ran twice, or not at all"):
        ledger_of(tmp_path).go_on_from(committed, path=None, step=2, taken={"actor": [2, 2]})


def test_a_commit_older_than_the_ledger_is_gone_on_from(tmp_path):
    ledger = ledger_of(tmp_path)
    ledger.go_on_from(None, path="global_step_7", step=7, taken={"actor": [14]})
    ledger.end_step(8, metrics(16, 3), prompts=[0])
    ledger.commit({"actor": [16]})
    assert told(tmp_path).problems() == [] and sorted(told(tmp_path).steps) == [8]


def test_a_half_written_last_line_is_cut_off_and_damage_elsewhere_is_named(tmp_path):
    ledger = begun(tmp_path)
    committed = ledger.commit(TAKEN)
    path = tmp_path / FILE
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"step": 3, "epo')
    ledger_of(tmp_path).go_on_from(committed, path=None, step=2, taken=TAKEN)
    assert path.read_bytes().startswith(whole) and len(read_ledger(str(path))) == 4
    lines = path.read_text().splitlines()
    entry = json.loads(lines[1])
    path.write_text("\n".join([lines[0], json.dumps(entry | {"prompts": [2, 1]}), *lines[2:]]) + "\n")
    with pytest.raises(CheckpointError, match=r"ledger.jsonl is damaged in line 2; move it away"):
        ledger_of(tmp_path).go_on_from(committed, path=None, step=2, taken=TAKEN)
    path.write_text("\n".join([lines[0], *lines[2:]]) + "\n")  # a line that is gone is damage, too
    with pytest.raises(CheckpointError, match="damaged in line 2"):
        read_ledger(str(path))


def test_the_ledger_of_another_run_is_refused(tmp_path):
    committed = begun(tmp_path / "one").commit(TAKEN)
    other = ledger_of(tmp_path / "two")
    other.begin()
    other.end_step(1, metrics(4), prompts=[0])
    with pytest.raises(CheckpointError, match="it is the ledger of another run"):
        ledger_of(tmp_path / "two").go_on_from(committed, path=None, step=2, taken=TAKEN)


def test_lines_that_a_full_disk_did_not_take_are_written_later_and_a_commit_waits_for_them(tmp_path):
    ledger = begun(tmp_path)
    size = os.path.getsize(tmp_path / FILE)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 10, before[1]))
    try:
        ledger.end_step(3, metrics(6, 1), prompts=[0])
        with pytest.raises(OSError):
            ledger.commit({"actor": [6]})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert os.path.getsize(tmp_path / FILE) == size  # no half line
    ledger.end_step(4, metrics(8, 1), prompts=[1])
    ledger.commit({"actor": [8]})
    assert sorted(told(tmp_path).steps) == [1, 2, 3, 4] and told(tmp_path).problems() == []
