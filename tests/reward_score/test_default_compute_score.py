"""Each data source has its score function."""

import subprocess
import sys
from pathlib import Path

import pytest

from reward_score import DATA_SOURCES, default_compute_score


@pytest.mark.parametrize("source", ["openai/gsm8k", "hybridrl/arithmetic"])
def test_gsm8k_sources_read_the_number_after_the_mark(source):
    assert default_compute_score(source, "#### 1,000", "1000") == 1.0
    assert default_compute_score(source, r"\boxed{1000}", "1000") == 0.0


@pytest.mark.parametrize("source", ["lighteval/MATH", "DigitalLearningGmbH/MATH-lighteval", "HuggingFaceH4/MATH-500"])
def test_math_sources_read_the_box(source):
    assert default_compute_score(source, r"\boxed{\frac{2}{4}}", r"\frac{1}{2}", {"index": 0}) == 1.0
    assert default_compute_score(source, "#### 1", "1") == 0.0


@pytest.mark.parametrize("source", ["math_dapo", "math_dapo_reasoning", "aime_2024"])
def test_dapo_sources_return_score_and_accuracy(source):
    assert default_compute_score(source, "Answer: 7", "7") == {"score": 1.0, "acc": True, "pred": "7"}


def test_keyword_arguments_reach_the_score_function():
    assert default_compute_score("openai/gsm8k", "#### 1", "2", None, format_score=0.25) == 0.25


def test_the_error_for_an_unknown_source_lists_the_known_ones_and_the_setting():
    with pytest.raises(NotImplementedError, match="custom_reward_function.path") as caught:
        default_compute_score("my/data", "", "")
    assert "'my/data'" in str(caught.value) and all(source in str(caught.value) for source in DATA_SOURCES)


def test_importing_the_score_functions_loads_no_sympy_torch_or_hybridrl():
    code = (
        "import sys, reward_score; print([name for name in ('sympy', 'math_verify', 'torch', 'ray', "
        "'hybridrl') if name in sys.modules])"
    )
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd=Path(__file__).parents[2]
    )
    assert run.stdout.strip() == "[]", run.stderr
