"""`main_sft`: the loss on the assistant's tokens falls, resume is exact, two ranks equal one."""

from pathlib import Path

import pytest
from safetensors.torch import load_file

from data_preprocess import full_hh_rlhf
from hybridrl import main_sft
from hybridrl.master.service.journal import replay
from hybridrl.master.state.tables import JobPhase
from tests.support.end_to_end.runs import largest_difference, metrics


def run(folder, model, **changes):
    import pyarrow as pa
    import pyarrow.parquet as pq

    folder.mkdir(exist_ok=True)
    rows = [
        {
            "messages": [
                {"role": "user", "content": f"How much is {i} and 2?"},
                {"role": "assistant", "content": f"#### {i + 2}"},
                {"role": "user", "content": "And one more?"},
                {"role": "assistant", "content": f"#### {i + 3}"},
            ]
        }
        for i in range(10)
    ]
    pq.write_table(pa.Table.from_pylist(rows), folder / "sft.parquet")
    values = {
        "data.train_files": folder / "sft.parquet",
        "data.val_files": folder / "sft.parquet",
        "data.train_batch_size": 4,
        "data.max_length": 96,
        "model.path": model,
        "optim.lr": 3e-3,
        "trainer.backend": "local",
        "trainer.device": "cpu",
        "trainer.num_threads": 1,
        "trainer.total_training_steps": 6,
        "trainer.save_freq": 3,
        "trainer.test_freq": 6,
        "trainer.logger": "[jsonl]",
        "trainer.default_local_dir": folder / "run",
    } | {key.replace("__", "."): value for key, value in changes.items()}
    assert main_sft.main([f"{key}={value}" for key, value in values.items()]) == 0
    return metrics(folder / "run")


def exported(folder, step):
    return load_file(folder / f"run/global_step_{step}/huggingface/model.safetensors")


def test_adapters_lower_the_loss_and_are_exported_merged(tmp_path, tiny_qwen2):
    rows = run(tmp_path / "lora", tiny_qwen2, model__lora_rank=8, optim__lr=1e-2)
    assert rows[-1]["train/loss"] < 0.95 * rows[0]["train/loss"]
    started, ended = load_file(tiny_qwen2 / "model.safetensors"), exported(tmp_path / "lora", 6)
    assert {name for name in started if not ended[name].equal(started[name])} == {
        n for n in started if n.endswith("proj.weight")
    }


def test_the_loss_falls_and_a_resumed_run_ends_the_same(tmp_path, tiny_qwen2):
    rows = run(tmp_path / "whole", tiny_qwen2)
    assert rows[-1]["train/loss"] < 0.9 * rows[0]["train/loss"] and rows[-1]["val/loss"] < rows[0]["train/loss"]
    assert 0 < rows[-1]["perf/mfu/update"] < 1
    run(tmp_path / "parts", tiny_qwen2, trainer__total_training_steps=3)
    assert [row["step"] for row in run(tmp_path / "parts", tiny_qwen2)] == [1, 2, 3, 4, 5, 6]
    assert largest_difference(exported(tmp_path / "whole", 6), exported(tmp_path / "parts", 6)) == 0


def test_an_engine_of_the_users_ends_as_fsdp(tmp_path, tiny_qwen2, capsys):
    toy = f"{Path(__file__).parents[1] / 'support' / 'third_party' / 'toy_engine.py'}:ToyEngine"
    rows = run(tmp_path / "toy", tiny_qwen2, strategy=toy, engine_config="{foreach:true}", trainer__save_freq=6)
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    run(tmp_path / "fsdp", tiny_qwen2, trainer__save_freq=6)
    assert largest_difference(exported(tmp_path / "toy", 6), exported(tmp_path / "fsdp", 6)) < 1e-4


def test_the_sft_split_of_hh_rlhf_can_be_trained_on(tmp_path, tiny_qwen2):
    raw = Path(__file__).parents[1] / "data" / "raw"
    assert full_hh_rlhf.main(["--split", "sft", "--local_dir", str(tmp_path), "--data_source", str(raw)]) == 0
    files = dict.fromkeys(("data__train_files", "data__val_files"), tmp_path / "sft" / "train.parquet")
    rows = run(tmp_path / "run", tiny_qwen2, **files, data__max_length=512, trainer__total_training_steps=2)
    assert rows[-1]["train/loss"] > 0 and rows[-1]["val/loss"] > 0


@pytest.mark.timeout(300)
@pytest.mark.slow
def test_two_ranks_with_packing_take_the_same_steps_as_one_without(tmp_path, tiny_qwen2, ray_cluster):
    run(tmp_path / "one", tiny_qwen2, trainer__total_training_steps=3)
    run(
        tmp_path / "two",
        tiny_qwen2,
        trainer__total_training_steps=3,
        trainer__backend="ray",
        trainer__n_gpus_per_node=2,
        model__use_remove_padding=True,
        data__max_token_len_per_gpu=128,
    )
    assert largest_difference(exported(tmp_path / "one", 3), exported(tmp_path / "two", 3)) < 1e-5
    [journal] = (tmp_path / "two" / "run" / "master").iterdir()  # on Ray a master monitors the run
    state, _ = replay(str(journal))
    assert (state.state, state.step, set(state.workers)) == (JobPhase.SUCCEEDED, 3, {"trainer", "sft-0", "sft-1"})
    assert state.commit.endswith("global_step_3")
