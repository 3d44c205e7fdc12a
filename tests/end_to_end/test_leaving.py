"""SIGTERM or Ctrl-C in the middle of a step: the run commits and exits with 143 or 130.

A resumed run has the result of an undisturbed one.
"""

import os
import signal
import threading
import time

import pytest

from hybridrl import main_ppo
from hybridrl.trainer.checkpoint.ledger_audit import audit
from hybridrl.trainer.checkpoint.step_ledger import FILE, read_ledger
from tests.end_to_end.test_main_sft import exported, run
from tests.support.end_to_end.runs import largest_difference, metrics, settings, weights

TERMINATED, INTERRUPTED = 143, 130
# Sends a signal to its own process in step 2, once.
CODE = """
import os, pathlib, signal

def use(task, trainer):
    task.insert_before("old_log_prob", lambda ctx: terminate(trainer))

def terminate(trainer):
    done = pathlib.Path(__file__).with_name("terminated")
    if trainer.global_steps == 2 and not done.exists():
        done.touch()
        os.kill(os.getpid(), signal.{name})
"""
CHANGES = {
    "actor_rollout_ref__actor__shuffle": True,
    "trainer__total_training_steps": 4,
    "trainer__val_before_train": False,
    "trainer__test_freq": -1,
}
PARTIAL = {"trainer__partial_rollout": True, "actor_rollout_ref__rollout__mode": "async"}


@pytest.fixture(autouse=True)
def python_handles_ctrl_c():
    """A test run in the background ignores Ctrl-C."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def terminating(folder, number: signal.Signals) -> dict:
    folder.mkdir(exist_ok=True)
    (folder / "terminate.py").write_text(CODE.replace("{name}", number.name))
    return {"trainer__middleware": f"[{folder}/terminate.py:use]"}


@pytest.mark.parametrize(
    ("number", "more"),
    [(signal.SIGTERM, {}), (signal.SIGTERM, {"trainer__lag": 2} | PARTIAL), (signal.SIGINT, {})],
    ids=["in step", "two batches ahead", "Ctrl-C"],
)
def test_a_terminated_run_resumes_bit_for_bit(tmp_path, tiny_qwen2, capsys, number, more):
    (tmp_path / "whole").mkdir()
    assert main_ppo.main(settings(tmp_path / "whole", tiny_qwen2, **CHANGES | more)) == 0
    parts = settings(
        tmp_path / "parts",
        tiny_qwen2,
        **terminating(tmp_path / "parts", number),
        **CHANGES | more,
        trainer__save_freq=3,
    )
    before, how = signal.getsignal(number), "interrupted" if number == signal.SIGINT else "terminated"
    assert main_ppo.main(parts) == (INTERRUPTED if number == signal.SIGINT else TERMINATED)
    newest = tmp_path / "parts/run/global_step_2"
    errors = capsys.readouterr().err
    assert errors.splitlines()[-1].startswith(f"{how}; {newest} is committed; the next run resumes from it")
    assert signal.getsignal(number) is before and [row["step"] for row in metrics(tmp_path / "parts/run")] == [
        1,
        2,
    ]
    assert main_ppo.main(parts) == 0
    ends = [weights(tmp_path / name / "run/global_step_4", tmp_path / f"hf_{name}") for name in ("whole", "parts")]
    assert largest_difference(*ends) == 0
    same = ("critic/score/mean", "actor/grad_norm", "actor/loss", "actor/num_updates", "ledger/runs_per_stage")
    rows = [
        [[row[name] for name in same] for row in metrics(tmp_path / folder / "run")] for folder in ("whole", "parts")
    ]
    assert rows[0] == rows[1] and {row[-1] for row in rows[0]} == {1}
    ledger = audit(read_ledger(str(tmp_path / "parts/run" / FILE)))
    assert ledger.problems() == [] and sorted(ledger.steps) == [1, 2, 3, 4] and ledger.num_repeated == 0
    assert sorted(ledger.prompts()[0]) == list(range(10))  # 4, 4 and 2 of 10 prompts, then the next epoch


def test_a_first_checkpoint_is_committed_when_the_time_without_one_is_over(tmp_path, tiny_qwen2, monkeypatch):
    monkeypatch.setattr("hybridrl.trainer.loop.FIRST_COMMIT_S", 0.0)
    for name, save_freq, steps in (("often", 3, [1, 3, 4]), ("never", -1, [])):
        (tmp_path / name).mkdir()
        arguments = settings(tmp_path / name, tiny_qwen2, **CHANGES, trainer__save_freq=save_freq)
        assert main_ppo.main(arguments) == 0
        found = (tmp_path / name / "run").glob("global_step_*")
        assert sorted(int(path.name.rpartition("_")[2]) for path in found) == steps


def test_before_training_a_run_terminates_at_once(tmp_path, tiny_qwen2, capsys):
    (tmp_path / "early.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGTERM)\n")
    arguments = settings(tmp_path, tiny_qwen2, **CHANGES, trainer__middleware=f"[{tmp_path}/early.py:use]")
    assert main_ppo.main(arguments) == TERMINATED
    assert "terminated; nothing was committed" in capsys.readouterr().err and not list(
        (tmp_path / "run").glob("global_step*")
    )


def test_terminated_fine_tuning_resumes_bit_for_bit(tmp_path, tiny_qwen2):
    with pytest.raises(AssertionError):  # `run` expects success
        threading.Thread(target=terminate_after, args=(tmp_path / "parts/run/metrics.jsonl", 2), daemon=True).start()
        run(tmp_path / "parts", tiny_qwen2, trainer__total_training_steps=200, trainer__save_freq=-1)
    [step] = [int(path.name.rpartition("_")[2]) for path in (tmp_path / "parts/run").glob("global_step_*")]
    assert 2 <= step < 200
    for name in ("parts", "whole"):
        run(tmp_path / name, tiny_qwen2, trainer__total_training_steps=step + 2)
    assert largest_difference(*(exported(tmp_path / name, step + 2) for name in ("whole", "parts"))) == 0


def terminate_after(path, num_lines: int) -> None:
    """Send SIGTERM to this process when the run has logged this many steps."""
    while not path.exists() or len(path.read_text().splitlines()) < num_lines:
        time.sleep(0.005)
    os.kill(os.getpid(), signal.SIGTERM)
