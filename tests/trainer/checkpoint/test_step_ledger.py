"""The step ledger: its audit, its refusals, and its state after a killed process or a full disk."""

import json
import os
import resource

import pytest

from hybridrl.errors import CheckpointError
from hybridrl.framework import OnlineRLContext, Task, stage
from hybridrl.trainer.checkpoint.ledger_audit import PromptCount, audit, main
from hybridrl.trainer.checkpoint.step_ledger import FILE, StepLedger, read_ledger
from hybridrl.trainer.data.epoch_sampler import EpochSampler

NUM_UPDATES = {"actor": [4, 4]}


def run_step(ledger: StepLedger, step: int, updates: int, *, prompts: list[int], epoch: int = 0) -> None:
    """Record a step after which the actor has `updates` optimizer steps in its weights."""
    ledger.record_update("actor", {"actor/num_updates": [updates - 1.0, float(updates)]}, prefix="actor")
    ledger.end_step(step, epoch=epoch, prompts=prompts)


def ledger_of(folder, *, rows: int = 4) -> StepLedger:
    return StepLedger(str(folder), rows=rows)


def two_steps(folder) -> StepLedger:
    """Return a ledger of two steps with two prompts and two optimizer steps each."""
    ledger = ledger_of(folder)
    ledger.start()
    run_step(ledger, 1, 2, prompts=[2, 0])
    run_step(ledger, 2, 4, prompts=[3, 1])
    return ledger


def audit_of(folder):
    return audit(read_ledger(str(folder / FILE)))


def test_steps_that_a_killed_process_did_not_commit_do_not_count(tmp_path):
    ledger = two_steps(tmp_path)
    committed = ledger.commit(NUM_UPDATES)
    run_step(ledger, 3, 6, prompts=[1, 0], epoch=1)  # killed before this one is committed
    successor = ledger_of(tmp_path)
    successor.resume_from(committed, path="global_step_2", step=2, num_updates=NUM_UPDATES)
    run_step(successor, 3, 6, prompts=[1, 0], epoch=1)
    result = audit_of(tmp_path)
    assert result.problems() == [] and sorted(result.steps) == [1, 2, 3] and result.num_repeated == 1
    assert "runs of a stage per step: 0" in str(result)  # nothing was wrapped here
    assert "every stage and every prompt exactly once" in str(result)


def test_lines_that_a_full_disk_did_not_take_do_not_break_the_chain_of_a_resumed_run(tmp_path, monkeypatch):
    ledger = two_steps(tmp_path)
    committed = ledger.commit(NUM_UPDATES)

    def full(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "write", full)
        run_step(ledger, 3, 6, prompts=[1, 0], epoch=1)
        ledger.resume_from(committed, path=None, step=2, num_updates=NUM_UPDATES)  # a rollback in the same process
    run_step(ledger, 3, 6, prompts=[1, 0], epoch=1)
    result = audit_of(tmp_path)
    assert result.problems() == [] and sorted(result.steps) == [1, 2, 3]


def test_what_did_not_happen_exactly_once_is_named(tmp_path):
    ledger = ledger_of(tmp_path)
    ledger.start()
    run_step(ledger, 1, 2, prompts=[2, 0])
    run_step(ledger, 3, 4, prompts=[2, 1])
    run_step(ledger, 4, 6, prompts=[0], epoch=1)
    assert audit_of(tmp_path).problems() == [
        "step 2 is missing",
        "epoch 0: prompts [2] were used more than once (1 in all)",
        "epoch 0: prompts [3] were not used (1 in all)",
    ]


def test_runs_of_stages_that_are_not_pure_are_counted(tmp_path):
    ledger = ledger_of(tmp_path)
    ledger.start()

    @stage("update", pure=False)
    def update(ctx):
        pass

    @stage("read")
    def read(ctx):
        pass

    @stage("log")
    def log(ctx):
        ctx.metrics |= ledger.metrics()
        run_step(ledger, ctx.total_step + 1, ctx.total_step + 1, prompts=[ctx.total_step + 1])

    counted = ledger(update)
    assert ledger(read) is read
    with Task(ctx=OnlineRLContext()) as task:
        task.use(counted).use(ledger(read)).use(log)
        task.run(max_step=1)
        assert task.ctx.metrics == {"ledger/runs_per_stage": 1.0} and audit_of(tmp_path).problems() == []
        task.use(counted)
        task.run(max_step=2)
    assert audit_of(tmp_path).problems() == ["step 3: update ran 2 times"]


def test_weights_with_other_updates_than_the_ledger_are_not_committed(tmp_path):
    ledger = two_steps(tmp_path)
    with pytest.raises(CheckpointError, match=r"actor has \[5\].* step 2, .* 4"):
        ledger.commit({"actor": [5, 5]})
    with pytest.raises(CheckpointError, match=r"\[3, 4\]"):
        ledger.commit({"actor": [4, 3]})
    committed = ledger.commit(NUM_UPDATES)
    with pytest.raises(CheckpointError, match="an update ran twice, or not at all"):
        ledger_of(tmp_path).resume_from(committed, path=None, step=2, num_updates={"actor": [2, 2]})


def test_a_run_resumes_from_a_checkpoint_older_than_its_ledger(tmp_path):
    ledger = ledger_of(tmp_path)
    ledger.resume_from(None, path="global_step_7", step=7, num_updates={"actor": [14]})
    run_step(ledger, 8, 16, prompts=[0], epoch=3)
    ledger.commit({"actor": [16]})
    assert audit_of(tmp_path).problems() == [] and sorted(audit_of(tmp_path).steps) == [8]


def test_a_half_written_last_line_is_cut_off_and_damage_elsewhere_is_named(tmp_path):
    ledger = two_steps(tmp_path)
    committed = ledger.commit(NUM_UPDATES)
    path = tmp_path / FILE
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"step": 3, "epo')
    successor = ledger_of(tmp_path)
    successor.resume_from(committed, path=None, step=2, num_updates=NUM_UPDATES)
    assert path.read_bytes() == whole
    run_step(successor, 3, 6, prompts=[0], epoch=1)
    assert path.read_bytes().startswith(whole) and len(read_ledger(str(path))) == 5
    lines = path.read_text().splitlines()
    entry = json.loads(lines[1])
    path.write_text("\n".join([lines[0], json.dumps(entry | {"prompts": [2, 1]}), *lines[2:]]) + "\n")
    with pytest.raises(CheckpointError, match="ledger.jsonl .*damaged in line 2; move"):
        ledger_of(tmp_path).resume_from(committed, path=None, step=2, num_updates=NUM_UPDATES)
    path.write_text("\n".join([lines[0], *lines[2:]]) + "\n")  # a missing line is damage, too
    with pytest.raises(CheckpointError, match="damaged in line 2"):
        read_ledger(str(path))


def test_the_ledger_of_another_run_is_rejected(tmp_path):
    committed = two_steps(tmp_path / "one").commit(NUM_UPDATES)
    other = ledger_of(tmp_path / "two")
    other.start()
    run_step(other, 1, 4, prompts=[0])
    with pytest.raises(CheckpointError, match="it is the ledger of another run"):
        ledger_of(tmp_path / "two").resume_from(committed, path=None, step=2, num_updates=NUM_UPDATES)


def test_lines_that_a_full_disk_rejected_are_written_later_and_a_commit_requires_them(tmp_path):
    ledger = two_steps(tmp_path)
    size = os.path.getsize(tmp_path / FILE)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 10, before[1]))
    try:
        run_step(ledger, 3, 6, prompts=[0], epoch=1)
        with pytest.raises(OSError):
            ledger.commit({"actor": [6]})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert os.path.getsize(tmp_path / FILE) == size  # no half line
    run_step(ledger, 4, 8, prompts=[1], epoch=1)
    ledger.commit({"actor": [8]})
    assert sorted(audit_of(tmp_path).steps) == [1, 2, 3, 4] and audit_of(tmp_path).problems() == []


def test_a_run_without_steps_writes_nothing_and_roles_without_reports_are_not_compared(tmp_path):
    ledger = two_steps(tmp_path)
    committed = ledger.commit(NUM_UPDATES)
    size = os.path.getsize(tmp_path / FILE)
    ledger_of(tmp_path).resume_from(committed, path="global_step_2", step=2, num_updates=NUM_UPDATES)
    assert os.path.getsize(tmp_path / FILE) == size
    own = ledger_of(tmp_path)
    own.resume_from(committed, path="global_step_2", step=2, num_updates=NUM_UPDATES)
    own.end_step(3, epoch=None, prompts=[])  # custom stages
    assert own.commit({"actor": [7, 7]})["updates"] == {"actor": 7} and audit_of(tmp_path).problems() == []


def test_a_step_that_is_retried_in_the_same_process_counts_once(tmp_path):
    ledger = two_steps(tmp_path)
    run_step(ledger, 3, 6, prompts=[1, 0], epoch=1)
    ledger.record_update("actor", {"actor/num_updates": [8.0]}, prefix="actor")  # a process is lost during step 4
    ledger.rewind(2)
    run_step(ledger, 3, 6, prompts=[1, 0], epoch=1)
    assert ledger.commit({"actor": [6, 6]})["updates"] == {"actor": 6}
    assert audit_of(tmp_path).problems() == [] and audit_of(tmp_path).num_repeated == 1


ORDER = {"seed": 3, "shuffle": True}  # of 6 rows: 2, 5, 4, 1, 3, 0 in epoch 0 and 1, 2, 0, 4, 5, 3 in epoch 1


def counted(folder, steps, *, outcomes=None, order=ORDER):
    """Return the audit of a run over 6 rows whose steps trained on these prompts: (epoch, rows)."""
    ledger = StepLedger(str(folder), rows=6, order=order)
    ledger.start()
    for number, (epoch, rows) in enumerate(steps, 1):
        ledger.end_step(number, epoch=epoch, prompts=rows, outcomes=(outcomes or {}).get(number))
    return audit_of(folder)


def test_the_order_of_the_counted_runs_is_that_of_the_loader():
    sampler = EpochSampler(6, **ORDER)
    assert [sampler.order(epoch).tolist() for epoch in (0, 1)] == [[2, 5, 4, 1, 3, 0], [1, 2, 0, 4, 5, 3]]


def test_every_drawn_prompt_is_counted_once_in_each_epoch(tmp_path):
    result = counted(tmp_path, [(0, [2, 5]), (0, [4, 1]), (0, [3, 0]), (1, [1, 2])])
    assert str(result.prompt_count()) == "8 drawn, 8 trained once, 0 lost, 0 repeated, 0 left out"
    assert result.problems() == []


def test_a_prompt_that_was_drawn_and_stands_in_no_line_is_lost_also_in_the_epoch_that_runs(tmp_path):
    result = counted(tmp_path, [(0, [2, 5]), (0, [1, 3])])  # row 4 was drawn between them
    assert result.prompt_count() == PromptCount(drawn=5, trained=4, lost=1)
    assert result.problems() == ["epoch 0: prompts [4] were not used (1 in all)"]
    unordered = counted(tmp_path / "own sampler", [(0, [2, 5]), (0, [1, 3])], order=None)
    assert unordered.prompt_count() == PromptCount(drawn=4, trained=4)


def test_prompts_that_were_used_twice_or_are_no_rows_are_named(tmp_path):
    result = counted(tmp_path, [(0, [2, 5]), (0, [4, 2]), (0, [7])])
    assert result.prompt_count().repeated == 1
    assert "epoch 0: prompts [2] were used more than once (1 in all)" in result.problems()
    assert "epoch 0: prompts [7] are no rows of the data" in result.problems()


def test_prompts_left_out_are_counted_by_their_reason_and_waiting_ones_apart(tmp_path):
    outcomes = {
        1: {"0": {"trained": [2], "filtered": [5], "kept": [4]}},
        2: {"0": {"trained": [4], "filtered": [1], "surplus": [3], "kept": [0]}},
    }
    count = counted(tmp_path, [(0, [2]), (0, [4])], outcomes=outcomes).prompt_count()
    assert count == PromptCount(drawn=6, trained=2, waiting=1, left_out={"filtered": 2, "surplus": 1})
    assert str(count) == ("6 drawn, 2 trained once, 0 lost, 0 repeated, 3 left out (2 filtered, 1 surplus), 1 waiting")


def test_counts_of_runs_add_up():
    one = PromptCount(drawn=5, trained=3, lost=1, left_out={"filtered": 1})
    other = PromptCount(drawn=4, trained=1, repeated=2, waiting=1, left_out={"filtered": 1, "surplus": 1})
    left_out = {"filtered": 2, "surplus": 1}
    assert one + other == PromptCount(drawn=9, trained=4, lost=1, repeated=2, waiting=1, left_out=left_out)


def test_rows_before_the_first_one_of_a_ledger_that_begins_later_are_not_lost(tmp_path):
    ledger = StepLedger(str(tmp_path), rows=6, order=ORDER)
    ledger.resume_from(None, path="global_step_1", step=1, num_updates={})
    ledger.end_step(2, epoch=0, prompts=[4, 1])
    ledger.end_step(3, epoch=0, prompts=[0])  # 3 was drawn before it
    assert audit_of(tmp_path).prompt_count() == PromptCount(drawn=4, trained=3, lost=1)


def test_the_command_prints_the_audit(tmp_path, capsys):
    assert (
        main([str(tmp_path)]) == 2
        and "usage: python -m hybridrl.trainer.checkpoint.ledger_audit RUN" in capsys.readouterr().err
    )
    ledger = two_steps(tmp_path)
    assert (
        main([str(tmp_path)]) == 0
        and "prompts per epoch, of 4: 4\nprompts: 4 drawn, 4 trained once, 0 lost, 0 repeated, 0 left out\n"
        "every stage and every prompt exactly once\n"
        in capsys.readouterr().out
    )
    run_step(ledger, 4, 6, prompts=[0], epoch=1)
    assert main([str(tmp_path)]) == 1 and capsys.readouterr().out.endswith("step 3 is missing\n")
    with open(tmp_path / FILE, "a") as file:
        file.write("{}\n")
    assert main([str(tmp_path)]) == 1 and "is damaged in line 5" in capsys.readouterr().err
