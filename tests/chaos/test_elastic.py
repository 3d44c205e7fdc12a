"""A run that loses a machine goes on with fewer ranks, takes it back, and learns what an undisturbed run learns.

AdamW divides by the size of the gradient, so it turns a rounding difference in a tiny gradient into a part of a whole
step. With a learning rate of 1e-4 that stays far below the limit, and one lost or repeated update would be 1e-4.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from hybridrl.trainer.checkpoint.step_ledger import FILE, audit, read_ledger
from tests.support.end_to_end.runs import largest_difference, metrics, train, weights

ROOT = Path(__file__).parents[2]
STEPS, LOST_IN, RETURNS_IN = 20, 7, 11
CHANGES = {
    "actor_rollout_ref__actor__optim__lr": 1e-4,
    "trainer__total_training_steps": STEPS,
    "trainer__save_freq": 4,
    "trainer__test_freq": -1,
}
ELASTIC = {"trainer.nnodes": 2, "trainer.min_ranks": 1, "trainer.placement_timeout_s": 3}
MAX_DIFFERENCE, MIN_MOVE = 1e-5, 1e-3  # between the runs; between start and end
pytestmark = [pytest.mark.chaos, pytest.mark.timeout(1800)]


def test_a_run_goes_on_without_a_machine_and_takes_it_back(tmp_path, tiny_qwen2):
    calm = tmp_path / "calm"
    train(calm, tiny_qwen2, **CHANGES)
    words = [f"{name.replace('__', '.')}={value}" for name, value in (CHANGES | ELASTIC).items()]
    (tmp_path / "lost").mkdir()
    command = [sys.executable, "-m", "tests.support.chaos.returning_node", tmp_path / "lost", tiny_qwen2]
    command += [LOST_IN, RETURNS_IN, *words]
    done = subprocess.run([*map(str, command)], cwd=ROOT, capture_output=True, text=True, timeout=1500)
    print(done.stdout, done.stderr)
    assert done.returncode == 0, done.stderr

    rows = [row for row in metrics(tmp_path / "lost/run") if "actor/grad_norm" in row]
    assert [row["training/global_step"] for row in rows] == [*range(1, STEPS + 1)]
    resumed = LOST_IN - LOST_IN % 4  # the newest checkpoint before the loss
    fewer = RETURNS_IN - resumed
    assert [row["training/ranks/actor_rollout"] for row in rows] == [2] * resumed + [1] * fewer + [2] * (
        STEPS - RETURNS_IN
    )
    ledger = audit(read_ledger(str(tmp_path / "lost/run" / FILE)))
    assert ledger.problems() == [] and ledger.num_repeated == LOST_IN - 1 - resumed

    said = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    changed = [one for one in said if one.get("event") == "RanksChanged"]
    assert [one["sizes"] for one in changed] == [{"actor_rollout": 1}, {"actor_rollout": 2}]
    assert "with 1 of 2 ranks" in changed[0]["text"] and "are there again" in changed[1]["text"]
    assert len([one for one in said if one.get("event") == "WorkerFailed"]) == 1  # ended ranks are no failures

    end, same = (weights(run / f"run/global_step_{STEPS}", run / "hf") for run in (tmp_path / "lost", calm))
    first = weights(calm / "run/global_step_4", calm / "first")
    assert largest_difference(end, same) < MAX_DIFFERENCE
    assert largest_difference(same, first) > MIN_MOVE
