"""Two processes of one engine end a time slice after the same step, and notice when they differ."""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]


def test_the_first_ranks_clock_counts_and_both_ranks_raise_where_they_differ(tmp_path):
    script = [sys.executable, "-m", "tests.support.workers.engine_peers_rank"]
    store = str(tmp_path / "store")
    ranks = [
        subprocess.Popen([*script, str(rank), store], cwd=ROOT, stdout=subprocess.PIPE, text=True) for rank in (0, 1)
    ]
    first, second = (json.loads(process.communicate(timeout=60)[0].splitlines()[-1]) for process in ranks)
    assert first == second
    assert first[:2] == [False, True] and first[4] is False
    assert all(text.startswith("ranks [1] of a tensor-parallel engine have finished other") for text in first[2:4])
