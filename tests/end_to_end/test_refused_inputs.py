"""Inputs of a run that cannot work: one line before the model is loaded, with the file or the setting."""

import shutil

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hybridrl import RayPPOTrainer, main_ppo
from tests.support.end_to_end.runs import metrics, settings, train

pytestmark = pytest.mark.timeout(180)


def refusal(capsys, words: list[str]) -> str:
    """Run the program, expect a refusal before a model is loaded, and return its one line."""
    capsys.readouterr()
    assert main_ppo.main(words) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    return err


@pytest.fixture
def loads_nothing(monkeypatch):
    def init_workers(trainer):
        raise AssertionError("the models are loaded")

    monkeypatch.setattr(RayPPOTrainer, "init_workers", init_workers)


def rewrite(path, **columns):
    table = pq.read_table(path)
    for name, value in columns.items():
        column = pa.array([value] * table.num_rows)
        table = table.set_column(table.column_names.index(name), name, column)
    pq.write_table(table, path)


def without(words: list[str], prefix: str) -> list[str]:
    return [word for word in words if not word.startswith(prefix)]


@pytest.mark.parametrize("name", ["train", "val"])
def test_an_unknown_data_source_is_refused_before_a_model_is_loaded(tmp_path, tiny_qwen2, capsys, loads_nothing, name):
    words = without(settings(tmp_path, tiny_qwen2), "custom_reward_function")
    rewrite(tmp_path / f"{name}.parquet", data_source="nobody/knows")
    text = refusal(capsys, words)
    assert text.startswith(f"{tmp_path}/{name}.parquet row 0: no reward function for data_source='nobody/knows'; there")


def test_a_reward_model_column_of_texts_is_refused_before_a_model_is_loaded(
    tmp_path, tiny_qwen2, capsys, loads_nothing
):
    words = settings(tmp_path, tiny_qwen2)
    rewrite(tmp_path / "train.parquet", reward_model="gold")
    assert "'reward_model' must have a mapping" in refusal(capsys, words)


def test_a_cut_model_file_is_named_before_a_model_is_loaded(tmp_path, tiny_qwen2, capsys, loads_nothing):
    model = shutil.copytree(tiny_qwen2, tmp_path / "model")
    whole = (model / "model.safetensors").read_bytes()
    (model / "model.safetensors").write_bytes(whole[:-1000])
    text = refusal(capsys, settings(tmp_path, model))
    assert f"actor_rollout_ref.model.path={model}: model.safetensors is damaged" in text


def test_a_run_that_only_validates_needs_no_training_files(tmp_path, tiny_qwen2):
    words = without(settings(tmp_path, tiny_qwen2, trainer__val_only=True), "data.train_files")
    assert main_ppo.main(words) == 0
    assert [entry["step"] for entry in metrics(tmp_path / "run")] == [0]


def test_a_checkpoint_is_validated_without_its_training_files(tmp_path, tiny_qwen2):
    trained = train(tmp_path, tiny_qwen2)
    words = without(settings(tmp_path, tiny_qwen2, trainer__val_only=True), "data.train_files")
    assert main_ppo.main(words) == 0
    again = metrics(tmp_path / "run")[-1]
    core = {name: value for name, value in again.items() if name.startswith("val-core/")}
    assert again["step"] == 2 and core and core.items() <= trained[-1].items()


def test_a_run_with_other_adapters_does_not_resume_and_says_which(tmp_path, tiny_qwen2, capsys):
    train(tmp_path, tiny_qwen2, trainer__total_training_steps=1)
    capsys.readouterr()
    changed = settings(tmp_path, tiny_qwen2, actor_rollout_ref__model__lora_rank=4)
    assert main_ppo.main(changed) == 1
    line, *rest = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert "other adapters: actor_rollout_ref.model.lora_rank 0 -> 4" in line and not rest


def test_numbers_beside_the_score_are_training_metrics(tmp_path, tiny_qwen2):
    words = settings(tmp_path, tiny_qwen2, trainer__total_training_steps=1, trainer__val_before_train=False)
    (tmp_path / "reward.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    return {'score': len(solution_str), 'acc': 0.25, 'text': 'a'}\n"
    )
    assert main_ppo.main(words) == 0
    last = metrics(tmp_path / "run")[-1]
    assert last["reward_extra/acc/mean"] == 0.25 and "reward_extra/text/mean" not in last
