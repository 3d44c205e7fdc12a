import json
import math

import pytest

from hybridrl import cli
from hybridrl.cli.evaluate import estimates, grouped, table
from tests.support.end_to_end.runs import settings


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
    assert [line.split()[0] for line in table("t", rows)[1:]] == ["avg@4", "pass@1", "pass@2", "pass@4", "maj@4"]
    found = {estimate.name: estimate.mean for estimate in estimates(grouped(rows))}
    assert found["maj@4"] > 0.8 and found["avg@4"] == 0.75


def test_accuracy_goes_before_a_score_with_penalties():
    [first, *_] = estimates(grouped([sample("a", -1.0, acc=1.0), sample("b", 0.3, acc=0.0)]))
    assert first.mean == 0.5


def test_a_model_is_evaluated_with_all_samples_kept(tmp_path, tiny_qwen2, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    words = dict(word.split("=", 1) for word in settings(tmp_path, tiny_qwen2))
    file, own = words["data.val_files"], [f"{name}={words[name]}" for name in words if name.startswith("custom_reward")]
    command = ["eval", file, str(tiny_qwen2), "--n", "2", "--output", "out"]
    lengths = ["data.max_prompt_length=48", "data.max_response_length=8"]
    assert cli.main([*command, *lengths, *own]) == 0
    shown = capsys.readouterr().out
    rows = [json.loads(line) for line in (tmp_path / "out" / "samples" / "0.jsonl").read_text().splitlines()]
    assert len(grouped(rows)) * 2 == len(rows)
    assert f"{len(rows) // 2} prompts, {len(rows)} samples" in shown and "avg@2" in shown
    assert cli.main([*command, *lengths, *own]) == 2
    assert "out: has samples already" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["nowhere.parquet", "MODEL"], "TASK nowhere.parquet: no such file; give a parquet file, or one of gsm8k"),
        (["arithmetic", "http://127.0.0.1:8000/v1"], "an endpoint is not evaluated by this command"),
        (["arithmetic", "MODEL", "--n", "0"], "--n=0: must be 1 or more"),
    ],
)
def test_wrong_input_is_one_error(words, text, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["eval", *words]) == 2
    error = capsys.readouterr().err
    assert text in error and "Traceback" not in error
