"""The example that trains the quick start by both engines: two processes can share its model, and the comparison is
right.
"""

import json

import pytest

from data_preprocess import arithmetic
from examples.megatron import compare
from examples.quickstart import build_model
from hybridrl.config.checks.megatron import local_model_config, model_problems
from hybridrl.config.schema.workers import MegatronConfig


@pytest.mark.parametrize(("heads", "fits"), [(3, False), (4, True)])
def test_two_tensor_parallel_processes_share_four_heads_and_not_three(tmp_path, heads, fits):
    assert (
        arithmetic.main(
            ["--local_dir", str(tmp_path), "--num_train", "10", "--num_test", "10", "--num_sft_train", "500"]
        )
        == 0
    )
    assert build_model.main(["--data", str(tmp_path), "--out", str(tmp_path / "model"), "--heads", str(heads)]) == 0
    model = local_model_config(str(tmp_path / "model"))
    assert model["hidden_size"] == 32 * heads
    assert bool(list(model_problems(MegatronConfig(tensor_model_parallel_size=2), model, key="k"))) != fits


def test_the_comparison_of_two_runs_writes_a_picture_and_prints_accuracies_and_differences(tmp_path, capsys):
    for run, last_norm in (("fsdp", 2.0), ("megatron", 2.5)):
        (tmp_path / run).mkdir()
        steps = [
            {"step": step, "actor/grad_norm": norm, "critic/score/mean": 0.5, "val-core/words/reward/mean@1": accuracy}
            | {name: 1.0 for name in ("actor/entropy", "response_length/mean", "training/rollout_probs_diff_max")}
            for step, norm, accuracy in ((1, 1.0, 0.25), (2, last_norm, 0.75))
        ]
        (tmp_path / run / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in steps))
    assert (
        compare.main([str(tmp_path / "fsdp"), str(tmp_path / "megatron"), "--out", str(tmp_path / "curves.png")]) == 0
    )
    printed = capsys.readouterr().out
    assert "megatron: held-out accuracy 0.250 before, 0.750 after" in printed
    assert (
        "largest differences of megatron from fsdp: training reward 0.0e+00" in printed
        and "gradient norm 5.0e-01" in printed
    )
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_the_moving_average_of_a_straight_line_is_the_line_except_at_the_end():
    line = [2.0 * i for i in range(20)]
    assert compare.moving_average(line, 7)[:17] == pytest.approx(line[:17])
    assert compare.moving_average([0.0, 3.0, 0.0, 3.0], 3) == pytest.approx([0.0, 1.0, 2.0, 1.5])


def test_one_bad_step_at_the_end_does_not_bend_the_moving_average():
    average = compare.moving_average([1.0] * 99 + [0.4], 10)
    assert average[-1] == pytest.approx(0.9)  # of six values, one is 0.4
    assert min(average[:94]) == 1.0
