"""A run that loses a machine goes on with fewer ranks, takes it back, and learns the same.

AdamW divides by the size of the gradient, so it turns a rounding difference in a tiny gradient into a part of a whole
step. With a learning rate of 1e-4 that stays far below the limit, and one lost or repeated update would be 1e-4.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from hybridrl.trainer.checkpoint.ledger_audit import audit
from hybridrl.trainer.checkpoint.step_ledger import FILE, read_ledger
from tests.support.end_to_end.runs import largest_difference, metrics, weights

ROOT = Path(__file__).parents[2]
STEPS, LOST_IN, RETURNS_IN, SAVE_FREQ = 20, 7, 11, 4
CHANGES = {
    "actor_rollout_ref.actor.optim.lr": 1e-4,
    "trainer.total_training_steps": STEPS,
    "trainer.save_freq": SAVE_FREQ,
    "trainer.test_freq": -1,
}
MAX_DIFFERENCE, MIN_MOVE = 1e-5, 1e-3  # between the runs; between start and end
RUN_TIMEOUT_S = 900
pytestmark = [pytest.mark.chaos, pytest.mark.timeout(2 * RUN_TIMEOUT_S + 100)]


class Case(NamedTuple):
    """A run that has one rank less for some steps.

    Attributes:
        ranks: Of the actor.
        settings: Beside `CHANGES`.
        calm: What is different in the undisturbed run.
        calm_nodes: Of the undisturbed run.
        nodes: Of the disturbed run, at its start.
        loss: Event of `returning_node`.
    """

    ranks: int
    settings: dict
    calm: dict
    calm_nodes: int
    nodes: int
    loss: str = "lose"


CASES = {
    # One rank less, and then as before; the undisturbed run has one rank.
    "fsdp": Case(2, {}, {}, 1, 2),
    "megatron": Case(2, {"actor_rollout_ref.actor.strategy": "megatron"}, {}, 1, 2),
    # Rows that no number of ranks divides, a rollout with a machine of its own, and a batch that is pending.
    "ahead": Case(
        3,
        {
            "actor_rollout_ref.rollout.n_gpus_per_node": 1,
            "actor_rollout_ref.rollout.mode": "async",
            "trainer.lag": 1,
        },
        {"trainer.nnodes": 1},
        2,
        4,
    ),
    # The rollout loses its machine, and gets one of the actor's.
    "rollout": Case(2, {"actor_rollout_ref.rollout.n_gpus_per_node": 1}, {"trainer.nnodes": 1}, 2, 3, "lose_rollout"),
}


def run(folder, model, *, nodes, events="-", error="", **settings):
    """Run the program on a cluster of so many nodes; return what it printed as JSON.

    Args:
        error: Expected part of its error; empty: it succeeds.
    """
    folder.mkdir()
    words = [f"{name}={value}" for name, value in settings.items()]
    command = [sys.executable, "-m", "tests.support.chaos.returning_node", folder, model, nodes, events]
    done = subprocess.run([*map(str, command), *words], cwd=ROOT, capture_output=True, text=True, timeout=RUN_TIMEOUT_S)
    print(done.stdout, done.stderr)
    assert (done.returncode != 0) == bool(error) and error in done.stderr
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


@pytest.mark.parametrize("name", CASES)
def test_a_run_goes_on_without_a_machine_and_takes_it_back(tmp_path, tiny_qwen2, name):
    case = CASES[name]
    run(tmp_path / "calm", tiny_qwen2, nodes=case.calm_nodes, **(CHANGES | case.settings | case.calm))
    elastic = {"trainer.nnodes": case.ranks, "trainer.min_ranks": case.ranks - 1, "trainer.placement_timeout_s": 3}
    planned = f"{LOST_IN}:{case.loss},{RETURNS_IN}:return"
    said = run(tmp_path / "lost", tiny_qwen2, nodes=case.nodes, events=planned, **(CHANGES | case.settings | elastic))

    role = "actor" if "actor_rollout_ref.rollout.n_gpus_per_node" in case.settings else "actor_rollout"
    rows = [row for row in metrics(tmp_path / "lost/run") if "actor/grad_norm" in row]
    assert [row["training/global_step"] for row in rows] == [*range(1, STEPS + 1)]
    resumed = LOST_IN - LOST_IN % SAVE_FREQ  # the newest checkpoint before the loss
    all_ranks, fewer = [case.ranks], [case.ranks - 1]
    assert [row[f"training/ranks/{role}"] for row in rows] == (
        all_ranks * resumed + fewer * (RETURNS_IN - resumed) + all_ranks * (STEPS - RETURNS_IN)
    )
    ledger = audit(read_ledger(str(tmp_path / "lost/run" / FILE)))
    assert ledger.problems() == [] and ledger.num_repeated == LOST_IN - 1 - resumed

    events = [one for one in said if "event" in one]
    changed = [one for one in events if one["event"] == "RanksChanged"]
    assert [one["sizes"][role] for one in changed] == fewer + all_ranks
    assert f"with {fewer[0]} of {all_ranks[0]} ranks" in changed[0]["text"]
    assert "are there again" in changed[1]["text"]
    after = events[events.index(changed[0]) :]
    assert [
        one for one in after if one["event"] == "WorkerFailed"
    ] == []  # ranks that the trainer ended are no failures

    end, same = (
        weights(tmp_path / run / f"run/global_step_{STEPS}", tmp_path / run / "hf") for run in ("lost", "calm")
    )
    first = weights(tmp_path / f"calm/run/global_step_{SAVE_FREQ}", tmp_path / "calm/first")
    difference, moved = largest_difference(end, same), largest_difference(same, first)
    print(f"\n{name}: the parameters differ by {difference:.1e}, and moved by {moved:.1e}; {seconds(said)}")
    assert difference < MAX_DIFFERENCE and moved > MIN_MOVE


def test_a_run_starts_with_the_machines_that_are_there_and_ends_with_the_reason_below_the_minimum(tmp_path, tiny_qwen2):
    short = CHANGES | {"trainer.total_training_steps": 3, "trainer.save_freq": 1, "trainer.nnodes": 3}
    short |= {"trainer.min_ranks": 2, "trainer.placement_timeout_s": 3}
    expected = (
        "the machines that answer hold 1 of 3 ranks beside the rest of the job, fewer than trainer.min_ranks=2; add "
        "nodes to the Ray cluster or lower trainer.min_ranks, and start the same command again"
    )
    run(tmp_path / "lost", tiny_qwen2, nodes=2, events="3:lose", error=expected, **short)
    rows = [row for row in metrics(tmp_path / "lost/run") if "actor/grad_norm" in row]
    ranks = [row["training/ranks/actor_rollout"] for row in rows]
    assert ranks in ([2, 2], [2, 2, 2])  # a quick step ends before its process has noticed that the node is gone
    assert (tmp_path / "lost/run/global_step_2").is_dir()


def seconds(said):
    """Return how long the two changes took, from the fault or the return to the end of the next step."""
    done = [one["written_at"] for one in said if one.get("event") == "StepCompleted"]
    [lost] = [one["at"] for one in said if "lost" in one]
    [returned] = [one["at"] for one in said if "returned" in one]
    fewer, full = [one["written_at"] for one in said if one.get("event") == "RanksChanged"]
    after = [min(at for at in done if at > change) for change in (fewer, full)]
    return (
        f"from the loss to the choice {fewer - lost:.1f} s, to the next step {after[0] - lost:.1f} s; from the return "
        f"to the restart {full - returned:.1f} s, to the next step {after[1] - returned:.1f} s"
    )
