import math

import pytest

from hybridrl.evaluation.estimates import estimates, grouped, table


def sample(prompt: str, score: float, **more) -> dict:
    return {"id": f"{prompt}:0", "score": score, **more}


def test_estimates_are_means_over_prompts_with_the_interval_of_a_mean():
    rows = [sample("a", 1.0), sample("a", 0.0), sample("b", 1.0), sample("b", 1.0), sample("c", 0.0), sample("c", 0.0)]
    found = {estimate.name: estimate for estimate in estimates(grouped(rows))}
    assert [*found] == ["avg@2", "pass@1", "pass@2"]
    assert found["avg@2"].mean == found["pass@1"].mean == pytest.approx(0.5)
    assert found["avg@2"].half_width == pytest.approx(1.96 * 0.5 / math.sqrt(3), abs=1e-4)
    assert found["pass@2"].mean == pytest.approx(2 / 3)


def test_scores_between_0_and_1_have_no_pass_rate_and_one_prompt_no_interval():
    [only] = estimates(grouped([sample("a", 0.5), sample("a", 0.25)]))
    assert (only.name, only.mean) == ("avg@2", 0.375) and math.isnan(only.half_width)


def test_the_majority_counts_where_answers_are_known():
    rows = [sample("a", float(text == "4"), pred=text) for text in ("4", "4", "4", "5")]
    assert [line.split()[0] for line in table("t", grouped(rows))[1:]] == [
        "avg@4",
        "pass@1",
        "pass@2",
        "pass@4",
        "maj@4",
    ]
    found = {estimate.name: estimate.mean for estimate in estimates(grouped(rows))}
    assert found["maj@4"] > 0.8 and found["avg@4"] == 0.75


def test_accuracy_goes_before_a_score_with_penalties():
    [first, *_] = estimates(grouped([sample("a", -1.0, acc=1.0), sample("b", 0.3, acc=0.0)]))
    assert first.mean == 0.5


def test_no_prompts_have_no_estimates():
    assert table("t", []) == ["t: 0 prompts, 0 samples"]
