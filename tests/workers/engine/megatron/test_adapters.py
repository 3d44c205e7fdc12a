"""Adapters on the Megatron engine, on two real processes (gloo), equal those on the FSDP engine in one process.

Both continue one saved adapter in peft's format, whose B is not 0, so that A has a gradient too. The layout TP2 alone
is also in `test_architecture.py`, which every change runs.
"""

from pathlib import Path

import pytest
import torch

from tests.support.ranks import run_ranks
from tests.support.workers.megatron_lora_cases import (
    LAYOUTS,
    MOVED,
    adapters_by_fsdp,
    assert_adapters_equal,
    write_trained_adapter,
)
from tests.support.workers.megatron_models import NEEDS_MEGATRON, save_models

LIMIT_S = 900

pytestmark = [NEEDS_MEGATRON, pytest.mark.slow, pytest.mark.timeout(LIMIT_S + 60)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("megatron_lora")
    models = sorted({model for model, _, _ in LAYOUTS.values()})
    save_models(path, models)
    for model in models:
        write_trained_adapter(path, model)
    log = path / "ranks.log"
    run_ranks("tests.support.workers.megatron_lora_rank", 2, path, *LAYOUTS, MOVED, log=log, timeout_s=LIMIT_S)
    return path


@pytest.mark.parametrize("layout", LAYOUTS)
def test_adapters_compute_train_and_resume_as_under_fsdp(folder, layout):
    found = torch.load(folder / f"{layout}.pt")
    assert_adapters_equal(found, adapters_by_fsdp(folder, LAYOUTS[layout][0]))
    assert found["resumes"]


def test_a_checkpoint_of_tensor_parallel_adapters_continues_in_two_pipeline_stages(folder):
    saved, found = torch.load(folder / "TP2.pt"), torch.load(folder / f"{MOVED}.pt")
    assert found["unscaled_adapters"].keys() == saved["unscaled_adapters"].keys()
    assert all(torch.equal(found["unscaled_adapters"][name], t) for name, t in saved["unscaled_adapters"].items())
    assert found["norm"] == pytest.approx(saved["next norm"], rel=1e-5)
