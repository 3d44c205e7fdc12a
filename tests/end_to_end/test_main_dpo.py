"""`main_dpo`: every loss trains, resume is exact, two ranks equal one, and a job that cannot run is refused."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from safetensors.torch import load_file

from data_preprocess import full_hh_rlhf
from hybridrl import main_dpo
from tests.support.end_to_end.runs import largest_difference, metrics

RAW = Path(__file__).parents[1] / "data" / "raw"
ROOT = Path(__file__).parents[2]


def write(path: Path, rows: list[dict]) -> Path:
    import pyarrow as pa
    import pyarrow.parquet as pq

    path.parent.mkdir(exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows), path)
    return path


def pairs(num_rows: int = 10) -> list[dict]:
    """Return pairs in which the number of the question is preferred to a long and wrong answer."""
    wrong = "I do not know, ask somebody else."
    return [
        {"prompt": f"Say {i}, please.", "chosen": f"#### {i}", "rejected": wrong[: 8 + 2 * i]} for i in range(num_rows)
    ]


def labelled(num_rows: int = 10) -> list[dict]:
    """Return the responses of the pairs one by one, with labels."""
    return [
        {"prompt": row["prompt"], "completion": row[key], "label": key == "chosen"}
        for row in pairs(num_rows)
        for key in ("chosen", "rejected")
    ]


def arguments(folder: Path, model: Path, rows: list[dict] | None = None, **changes) -> list[str]:
    file = write(folder / "pairs.parquet", pairs() if rows is None else rows)
    values = {
        "data.train_files": file,
        "data.val_files": file,
        "data.train_batch_size": 4,
        "data.max_length": 96,
        "data.max_token_len_per_gpu": 400,
        "model.path": model,
        "optim.lr": 1e-3,
        "trainer.backend": "local",
        "trainer.device": "cpu",
        "trainer.num_threads": 1,
        "trainer.total_training_steps": 6,
        "trainer.save_freq": 3,
        "trainer.test_freq": 6,
        "trainer.logger": "[jsonl]",
        "trainer.default_local_dir": folder / "run",
    } | {key.replace("__", "."): value for key, value in changes.items()}
    return [f"{key}={value}" for key, value in values.items()]


def run(folder: Path, model: Path, rows: list[dict] | None = None, **changes) -> list[dict]:
    assert main_dpo.main(arguments(folder, model, rows, **changes)) == 0
    return metrics(folder / "run")


def exported(folder: Path, step: int) -> dict:
    return load_file(folder / f"run/global_step_{step}/huggingface/model.safetensors")


def test_dpo_starts_at_log_2_learns_the_pairs_and_a_resumed_run_ends_the_same(tmp_path, tiny_qwen2):
    rows = run(tmp_path / "whole", tiny_qwen2)
    assert rows[0]["train/loss"] == pytest.approx(0.693147, abs=1e-5)
    assert rows[0]["rewards/margins"] == pytest.approx(0.0, abs=1e-4)
    assert rows[-1]["val/rewards/accuracies"] == 1.0 and rows[-1]["val/loss"] < 0.3
    assert rows[-1]["val/rewards/margins"] > 0 and "train/grad_norm" in rows[-1]
    assert 0 < rows[-1]["perf/mfu/update"] < 1 and 0 < rows[-1]["perf/mfu/ref"] < 1
    run(tmp_path / "parts", tiny_qwen2, trainer__total_training_steps=3)
    assert [row["step"] for row in run(tmp_path / "parts", tiny_qwen2)] == [1, 2, 3, 4, 5, 6]
    assert largest_difference(exported(tmp_path / "whole", 6), exported(tmp_path / "parts", 6)) == 0


@pytest.mark.parametrize("loss_type", ["ipo", "orpo", "simpo", "kto"])
def test_the_other_losses_learn_the_same_preference_and_micro_batches_change_nothing(tmp_path, tiny_qwen2, loss_type):
    rows = labelled() if loss_type == "kto" else None
    settings = {"loss__loss_type": loss_type, "trainer__total_training_steps": 4, "trainer__test_freq": 4}
    whole = run(tmp_path / "whole", tiny_qwen2, rows, data__use_dynamic_bsz=False, **settings)
    assert whole[-1]["train/loss"] < whole[0]["train/loss"]
    assert whole[-1]["val/rewards/margins"] > 0
    small = {"data__micro_batch_size_per_gpu": 1, "model__use_remove_padding": True}
    run(tmp_path / "small", tiny_qwen2, rows, data__use_dynamic_bsz=False, **small, **settings)
    assert largest_difference(exported(tmp_path / "whole", 4), exported(tmp_path / "small", 4)) < 1e-6


@pytest.mark.parametrize("rows", [labelled(), pairs()], ids=["labels", "pairs"])
def test_kto_starts_at_one_half_and_reports_both_kinds_of_responses(tmp_path, tiny_qwen2, rows):
    settings = {"loss__loss_type": "kto", "trainer__total_training_steps": 2, "trainer__test_freq": 2}
    first, last = run(tmp_path, tiny_qwen2, rows, **settings)
    assert first["train/loss"] == pytest.approx(0.5, abs=1e-5) and first["kl"] == pytest.approx(0.0, abs=1e-4)
    for name in ("rewards/chosen", "rewards/rejected", "logps/chosen"):
        assert name in last and f"val/{name}" in last


def test_adapters_learn_against_the_model_without_them(tmp_path, tiny_qwen2):
    rows = run(tmp_path, tiny_qwen2, model__lora_rank=8, optim__lr=1e-2)
    assert rows[0]["train/loss"] == pytest.approx(0.693147, abs=1e-5)
    assert rows[-1]["val/rewards/accuracies"] == 1.0


def test_pairs_of_hh_rlhf_can_be_trained_on(tmp_path, tiny_qwen2):
    assert full_hh_rlhf.main(["--split", "rm", "--local_dir", str(tmp_path), "--data_source", str(RAW)]) == 0
    files = {"data__train_files": tmp_path / "rm/train.parquet", "data__val_files": tmp_path / "rm/test.parquet"}
    limits = {"data__max_length": 512, "data__max_token_len_per_gpu": 1024, "trainer__total_training_steps": 2}
    rows = run(tmp_path / "run", tiny_qwen2, **files, **limits, trainer__test_freq=2)
    assert rows[0]["train/loss"] == pytest.approx(0.693147, abs=1e-5) and rows[-1]["val/loss"] > 0


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_two_ranks_with_packing_take_the_same_steps_as_one_without(tmp_path, tiny_qwen2, ray_cluster):
    run(tmp_path / "one", tiny_qwen2, trainer__total_training_steps=3, trainer__test_freq=3, optim__lr=1e-4)
    run(
        tmp_path / "two",
        tiny_qwen2,
        trainer__total_training_steps=3,
        trainer__test_freq=3,
        optim__lr=1e-4,
        trainer__backend="ray",
        trainer__master=False,
        trainer__n_gpus_per_node=2,
        model__use_remove_padding=True,
        data__max_token_len_per_gpu=192,
    )
    assert largest_difference(exported(tmp_path / "one", 3), exported(tmp_path / "two", 3)) < 1e-6
    one, two = (metrics(tmp_path / name / "run")[-1] for name in ("one", "two"))
    for name in ("train/loss", "rewards/margins", "val/loss", "val/rewards/accuracies"):
        assert one[name] == pytest.approx(two[name], abs=1e-5), name


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_killed_run_ends_bit_equal_after_the_same_command(tmp_path, tiny_qwen2):
    settings = {"trainer__save_freq": 1, "trainer__total_training_steps": 20, "trainer__test_freq": -1}
    run(tmp_path / "whole", tiny_qwen2, **settings)
    command = [sys.executable, "-m", "hybridrl.main_dpo", *arguments(tmp_path / "killed", tiny_qwen2, **settings)]
    process = subprocess.Popen(command, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)})
    deadline = time.monotonic() + 200
    while not (tmp_path / "killed/run/global_step_3").exists():
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait(timeout=30)
    assert not (tmp_path / "killed/run/global_step_20").exists()
    run(tmp_path / "killed", tiny_qwen2, **settings)
    assert largest_difference(exported(tmp_path / "whole", 20), exported(tmp_path / "killed", 20)) == 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"loss__loss_type": "dppo"}, "loss.loss_type=dppo: there is no such loss; did you mean dpo?"),
        (
            {"loss__loss_type": "kto", "data__chosen_key": "best"},
            "has no column 'label' (data.label_key); it has prompt, chosen, rejected",
        ),
        ({"data__chosen_key": "best"}, "has no column 'best' (data.chosen_key)"),
        ({"data__max_length": 8}, "is longer than data.max_length=8"),
    ],
)
def test_a_job_that_cannot_run_is_refused_in_one_line(tmp_path, tiny_qwen2, capsys, changes, message):
    assert main_dpo.main(arguments(tmp_path, tiny_qwen2, **changes)) == 2
    error = capsys.readouterr().err
    assert message in error and "Traceback" not in error and "loading" not in error


def test_equal_responses_are_refused(tmp_path, tiny_qwen2, capsys):
    rows = [*pairs(2), {"prompt": "a", "chosen": "b", "rejected": "b"}]
    assert main_dpo.main(arguments(tmp_path, tiny_qwen2, rows)) == 2
    assert "'rejected' are equal (1 of 3 rows are)" in capsys.readouterr().err
