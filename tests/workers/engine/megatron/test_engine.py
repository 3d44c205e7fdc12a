"""The Megatron engine on real processes (gloo), and FSDP's, against plain Hugging Face models in float32: the table of
parity.

python -m pytest -q tests/workers/engine/megatron/test_engine.py            a layout of each sort, up to two processes
python -m pytest -q tests/workers/engine/megatron/test_engine.py -m slow    the others, up to four processes
python -m tests.support.workers.megatron_parity                                       prints the table
"""

import pytest

from tests.support.workers.megatron_models import CASES, NEEDS_MEGATRON, save_models
from tests.support.workers.megatron_parity import LIMIT_S, compare, plain_results, run_cases

QUICK = ("TP2", "PP2, untied, packed", "CP2", "TP2+SP, shared prefixes", "qwen3_moe, EP2")
ATOL = 1e-5

pytestmark = [NEEDS_MEGATRON, pytest.mark.timeout(LIMIT_S + 60)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("megatron")
    save_models(path, sorted({model for _, model, _, _ in CASES.values()}))
    return path


@pytest.fixture(scope="module")
def references(folder):
    """What a Hugging Face model computes and becomes, by model and batch, computed once."""
    found: dict[tuple, dict] = {}

    def of(case: str) -> dict:
        key = CASES[case][1], CASES[case][3].get("share_prefixes")
        found[key] = found.get(key) or plain_results(folder, case)
        return found[key]

    return of


@pytest.fixture(scope="module")
def run(folder):
    """Runs a case. The first of `QUICK` runs all of them: starting their processes takes most of the time."""
    done: set[str] = set()

    def at_once(case: str) -> None:
        if case not in done:
            cases = QUICK if case in QUICK else (case,)
            done.update(cases)  # also if one fails: the files of its processes are in the way of a second attempt
            run_cases(folder, cases)

    return at_once


def cases() -> list:
    return [case if case in QUICK else pytest.param(case, marks=pytest.mark.slow) for case in CASES]


@pytest.mark.parametrize("case", cases())
def test_a_layout_computes_and_trains_as_the_plain_model_does(folder, references, run, case):
    expected = references(case)
    run(case)
    differences, found = compare(folder, case, expected)
    for name, value in differences.items():
        assert value < ATOL, (name, differences)
    assert [step["grad_norm"] for step in found["reports"]] == pytest.approx(expected["norms"], rel=1e-4)
    assert all(step["skipped"] == 0 for step in found["reports"])
