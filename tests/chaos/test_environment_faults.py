"""A fifth of the environments dies, hangs or answers nonsense: training ends, and what is left out is counted."""

import sys
from pathlib import Path

import pytest

from tests.support.serving import faulty_nim

ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.chaos, pytest.mark.timeout(1800)]


def test_training_ends_with_faulty_environments_and_counts_what_is_left_out(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import environment_faults as benchmark

    assert len(faulty_nim.FAULTS) == 3
    runs = {rate: benchmark.train(tmp_path, rate=rate, steps=6, sft_steps=60) for rate in (0.0, 0.2)}
    lines = benchmark.table(runs, steps=6)
    print("\n".join(lines), file=sys.stderr)
    cells = {line.split(" | ")[0].strip("| "): line.rstrip(" |").split(" | ")[1:] for line in lines[2:]}
    for name in ("environment crashed", "environment hangs", "environment answered nonsense"):
        calm, faulty = map(float, cells[name])
        assert calm == 0 and faulty > 0
    # 48 games: the standard error of a share is 0.07 at most, that of a difference 0.1.
    calm, faulty = map(float, cells["reward of the tests after"])
    assert abs(calm - faulty) < 0.3
    tries = sum(float(values[1]) for values in list(cells.values())[4:])
    # A sample is left out after three failed tries; a group that has less than two samples goes with it.
    left_out = float(cells["samples left out"][1])
    assert float(cells["samples left out"][0]) == 0 and left_out <= tries / 3 + 8
    # Six steps of 128 samples: a fifth fails at first, and a fifth of the further tries.
    assert 0.1 * 768 < tries < 0.45 * 768
