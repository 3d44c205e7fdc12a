"""`GRPOTrainer`: a run from Python with a function and rows that are in no file."""

import threading

import pytest
import torch
from transformers import AutoModelForCausalLM

from hybridrl import ConfigError, GRPOTrainer
from hybridrl.errors import CheckpointError, DataError
from tests.support.end_to_end.reward_functions import share_of_digits, takes_completions

ROWS = [{"prompt": f"{a} + {a} =", "ground_truth": str(2 * a), "level": a} for a in range(6)]
SMALL = {
    "data.max_prompt_length": 32,
    "data.max_response_length": 8,
    "actor_rollout_ref.rollout.n": 3,
    "actor_rollout_ref.actor.optim.lr": 1e-3,
    "trainer.total_training_steps": 2,
    "trainer.num_threads": 1,
    "trainer.logger": ["jsonl"],
    "reward_model.num_processes": 1,
}
LOCK = threading.Lock()


def trainer_of(tmp_path, model="model", *, reward_fn=share_of_digits, rows=ROWS, **changes) -> GRPOTrainer:
    settings = SMALL | {key.replace("__", "."): value for key, value in changes.items()}
    return GRPOTrainer(model, reward_fn, rows, output_dir=tmp_path / "run", settings=settings)


def test_rows_and_a_function_of_the_program_train_a_model_that_is_saved(tmp_path, tiny_qwen2):
    trainer = trainer_of(tmp_path, tiny_qwen2)
    assert trainer.config.data.train_batch_size == trainer.config.actor_rollout_ref.actor.ppo_mini_batch_size == 6
    metrics = trainer.train()
    assert [row["step"] for row in metrics] == [1, 2]
    assert metrics[0]["reward/error_ratio"] == 0 and metrics[0]["reward_extra/level/mean"] == 2.5
    assert metrics[1]["actor/grad_norm"] > 0
    trainer.save_model(tmp_path / "new")
    old, new = (AutoModelForCausalLM.from_pretrained(path).state_dict() for path in (tiny_qwen2, tmp_path / "new"))
    assert old.keys() == new.keys() and not all(torch.equal(old[name], new[name]) for name in old)
    assert [row["step"] for row in trainer_of(tmp_path, tiny_qwen2, trainer__total_training_steps=3).train()] == [
        1,
        2,
        3,
    ]


def test_a_hugging_face_dataset_and_a_list_of_dicts_give_the_same_rows(tmp_path):
    from datasets import Dataset

    of_dataset, of_list = (trainer_of(tmp_path, rows=rows)._tables for rows in (Dataset.from_list(ROWS), iter(ROWS)))
    assert of_dataset == of_list
    [(path, table)] = of_list.items()
    assert path == str(tmp_path / "run" / "data" / "train.parquet")
    assert table.to_pylist()[3] == {
        "data_source": "python",
        "reward_model": {"style": "rule", "ground_truth": "6"},
        "prompt": "3 + 3 =",
        "extra_info": {"index": 3, "level": 3},
    }


def test_files_are_taken_as_they_are(tmp_path):
    assert trainer_of(tmp_path, rows="a.parquet").config.data.train_files == ["a.parquet"]
    assert trainer_of(tmp_path, rows=[tmp_path / "a", tmp_path / "b"]).config.data.train_files == [
        str(tmp_path / name) for name in "ab"
    ]


@pytest.mark.parametrize(
    ("rows", "error", "text"),
    [
        (None, ConfigError, "train_dataset=None: give rows"),
        ([], DataError, "the dataset has no rows"),
        ([{"question": "1 + 1"}], DataError, "row 0 has columns question; each row is a mapping with a prompt"),
        ([{"prompt": "a"}, {"prompt": 3}], DataError, "row 1: prompt is of type int; give a text or a list"),
        ([{"prompt": "a", "level": 1}, {"prompt": "b", "level": "x"}], DataError, "columns of one type each"),
    ],
)
def test_rows_that_cannot_be_used_are_refused_at_once(tmp_path, rows, error, text):
    with pytest.raises(error, match=text):
        trainer_of(tmp_path, rows=rows)


def test_a_value_that_is_no_function_is_refused_at_once(tmp_path):
    with pytest.raises(ConfigError, match="reward_fn=0.5: give a function"):
        trainer_of(tmp_path, reward_fn=0.5)


def test_settings_are_checked_like_those_of_a_command_line(tmp_path):
    with pytest.raises(ConfigError, match=r"trainer\.total_epoch\b.*trainer\.total_epochs"):
        trainer_of(tmp_path, trainer__total_epoch=3)
    with pytest.raises(ConfigError, match=r"data\.max_prompt_length=long: must be a whole number"):
        trainer_of(tmp_path, data__max_prompt_length="long")


@pytest.mark.parametrize(
    ("reward_fn", "text"),
    [
        (takes_completions, "reward_fn=takes_completions: .*take these keyword arguments"),
        (lambda **_: LOCK, "cannot be sent to a score process: .*lock.*create them inside the function"),
    ],
)
def test_a_reward_function_that_cannot_be_used_is_refused_before_the_model_is_loaded(
    tmp_path, tiny_qwen2, reward_fn, text
):
    with pytest.raises(ConfigError, match=text):
        trainer_of(tmp_path, tiny_qwen2, reward_fn=reward_fn).train()


def test_a_model_is_saved_only_after_training(tmp_path):
    with pytest.raises(CheckpointError, match="has no checkpoint; call train"):
        trainer_of(tmp_path).save_model(tmp_path / "new")
