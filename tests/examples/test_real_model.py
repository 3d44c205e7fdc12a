"""`benchmarks/real_model.py` on the tiny model."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
STAGES = ("gen", "prefill", "update", "push", "snapshot", "peak")


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_stages_of_a_step_are_measured_beside_bare_loops(tiny_qwen2):
    words = ["--prompts", "2", "--n", "2", "--tokens", "4", "--rounds", "1", "--threads", "1", "--dtypes", "bfloat16"]
    command = [sys.executable, ROOT / "benchmarks/real_model.py", tiny_qwen2, *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=True, cwd=ROOT)
    rows = [line.split() for line in done.stdout.splitlines()[2:]]
    assert [row[:3] for row in rows] == [["bfloat16", "1", stage] for stage in STAGES]
    for row in rows[:-1]:
        cpu, bare_cpu, _, wall, bare_wall, ratio = map(float, row[3:9])
        assert min(cpu, bare_cpu, wall, bare_wall) >= 0 and ratio > 0
    assert float(rows[-1][-1]) > 0.1  # both processes hold torch
