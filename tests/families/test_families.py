"""Families of models through engine, rollout, push, export and resume, each against plain transformers in float32."""

import re
from importlib.metadata import version
from pathlib import Path

import pytest
from packaging.version import Version

from tests.families.__main__ import page
from tests.families.configurations import FAMILIES
from tests.families.measure import LIMIT, ROLLOUT_LIMITS, measure_family
from tests.families.vllm_cpu import measure_apart

pytestmark = pytest.mark.usefixtures("process_group")
PAGE = Path(__file__).parents[2] / "docs" / "families.md"


@pytest.mark.parametrize("family", FAMILIES)
def test_log_probs_and_gradients_are_those_of_plain_transformers(family):
    for name, cell in measure_family(family).layouts.items():
        assert not cell.refusal, name
        assert cell.log_probs < LIMIT, name
        assert cell.gradients < LIMIT, name


@pytest.mark.parametrize("family", FAMILIES)
def test_a_push_a_rollout_an_export_and_a_resume_keep_the_model(family):
    row = measure_family(family)
    assert row.rollout.log_probs < ROLLOUT_LIMITS.get(family, LIMIT)
    assert row.export.log_probs < LIMIT
    assert row.resumes


@pytest.mark.skipif(
    Version(version("transformers")) >= Version("5.20"), reason="the page is that of set-up's transformers, below 5.20"
)
def test_the_page_has_the_words_that_the_command_prints():
    assert words(PAGE.read_text(encoding="utf-8")) == words(page()), "run python -m tests.families > docs/families.md"


def test_recurrent_layers_that_cannot_continue_compute_rows_apart_and_a_line_says_so():
    [note] = measure_family("Jamba").layouts["shared prefixes"].notes
    assert "has recurrent layers that do not continue from a state (JambaMambaMixer); every row is computed" in note


@pytest.mark.vllm
@pytest.mark.slow
def test_a_model_that_vllm_does_not_build_on_this_device_is_refused():
    # In a process of its own: the try leaves vLLM's decorators on the model's class in transformers.
    refused = measure_apart("Bamba", "float32")["refused"]
    assert re.search(r"name=vllm: the installed vLLM does not build .*; use .*name=hf", refused)


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.timeout(400)
@pytest.mark.parametrize("family", ["DeepSeek-V3", "gpt-oss", "Falcon-H1"])
def test_vllm_computes_with_pushed_weights_that_it_keeps_otherwise(family):
    assert float(measure_apart(family, "float32")["difference"]) < 1e-5


def words(text: str) -> list[str]:
    """Return the lines without the numbers that a command measured."""
    return [re.sub(r"\d\.?\d*e-\d+|\b0\b", "0", line) for line in text.splitlines()]
