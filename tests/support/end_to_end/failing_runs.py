"""Run `main_ppo` on Ray in a separate process, with planted faults (`tests/support/chaos/faults.py`)."""

import json
import os
import subprocess
import sys
from pathlib import Path

from hybridrl.view.readers.failures import recoveries
from tests.support.end_to_end.runs import settings

ROOT = Path(__file__).parents[3]
ON_RAY = {
    "trainer__backend": "ray",
    "trainer__n_gpus_per_node": 2,
    "trainer__total_training_steps": 3,
    "trainer__test_freq": -1,
    "trainer__save_freq": 3,
    "trainer__middleware": f"[{ROOT / 'tests/support/chaos/faults.py'}:plant]",
    "actor_rollout_ref__model__external_lib": f"[{ROOT / 'tests/support/chaos/victim.py'}]",
    "actor_rollout_ref__actor__shuffle": True,
}
SAME = ("critic/score/mean", "actor/grad_norm", "actor/pg_loss", "critic/vf_loss", "training/global_step")
"""Metrics of a step that do not depend on the clock."""


def fault(
    step: int,
    stage: str,
    role: str,
    rank: int = 0,
    *,
    kind: str = "kill",
    method: str | None = None,
    after_s: float = 0.0,
) -> dict[str, object]:
    """Return a fault, see `tests/support/chaos/faults.py`."""
    return {
        "step": step,
        "stage": stage,
        "role": role,
        "rank": rank,
        "kind": kind,
        "method": method,
        "after_s": after_s,
    }


def run_with(
    folder: Path, model: Path, *faults: dict, timeout_s: float = 240.0, **changes: object
) -> subprocess.CompletedProcess:
    """Run until the process exits. `folder` gets log.jsonl, see `events`, and run/ with the metrics."""
    folder.mkdir(exist_ok=True)
    environment = os.environ | {
        "FAULTS": json.dumps(faults),
        "FAULTS_LOG": str(folder / "log.jsonl"),
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-m", "hybridrl.main_ppo", *settings(folder, model, **(ON_RAY | changes))]
    return subprocess.run(command, env=environment, cwd=ROOT, timeout=timeout_s, capture_output=True, text=True)


def events(folder: Path, what: str) -> list[dict]:
    """Return the logged events of this kind: "hit", "stage", "said" or "back"."""
    path = folder / "log.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [entry for line in lines if (entry := json.loads(line))["what"] == what]


def hits(folder: Path) -> list[dict]:
    return events(folder, "hit")


def losses(folder: Path) -> list[dict]:
    """Return the recoveries of the run, the fields of `RecoveryCompleted` for each."""
    return recoveries(str(folder / "run"))
