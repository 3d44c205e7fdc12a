"""Runs of `main_ppo` on Ray in a process of their own, with faults planted into them (`tests/chaos/faults.py`)."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

from tests.end_to_end.runs import settings

ROOT = Path(__file__).parents[2]
ON_RAY = {
    "trainer__backend": "ray",
    "trainer__n_gpus_per_node": 2,
    "trainer__total_training_steps": 3,
    "trainer__test_freq": -1,
    "trainer__save_freq": 3,
    "trainer__middleware": f"[{ROOT / 'tests/chaos/faults.py'}:plant]",
    "actor_rollout_ref__actor__shuffle": True,
}
SAME = ("critic/score/mean", "actor/grad_norm", "actor/pg_loss", "critic/vf_loss", "training/global_step")
"""Figures of a step that do not depend on the clock."""


def fault(step: int, stage: str, role: str, rank: int, *, after_s: float = 0.0, number: int = signal.SIGKILL) -> dict:
    return {"step": step, "stage": stage, "after_s": after_s, "role": role, "rank": rank, "signal": number}


def run_with(folder: Path, model: Path, *faults: dict, timeout_s: float = 240.0, **changes: object) -> subprocess.CompletedProcess:
    """Run to the end, whatever that is; `folder` gets hits.jsonl, and run/ with the metrics."""
    folder.mkdir(exist_ok=True)
    environment = os.environ | {
        "FAULTS": json.dumps(faults),
        "FAULTS_LOG": str(folder / "hits.jsonl"),
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-m", "hybridrl.main_ppo", *settings(folder, model, **(ON_RAY | changes))]
    return subprocess.run(command, env=environment, cwd=ROOT, timeout=timeout_s, capture_output=True, text=True)


def hits(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "hits.jsonl").read_text().splitlines()]
