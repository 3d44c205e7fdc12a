"""`main_rm`: accuracy on held-out pairs rises, resume is exact, two ranks equal one, and PPO loads the result."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from hybridrl import main_rm
from tests.end_to_end.test_main_dpo import arguments, pairs
from tests.support.end_to_end.runs import largest_difference, metrics, train


def run(folder: Path, model: Path, rows: list[dict] | None = None, **changes) -> list[dict]:
    assert main_rm.main(arguments(folder, model, rows, **changes)) == 0
    return metrics(folder / "run")


def export(folder: Path, step: int) -> Path:
    return folder / f"run/global_step_{step}/huggingface"


def exported(folder: Path, step: int) -> dict[str, torch.Tensor]:
    return load_file(export(folder, step) / "model.safetensors")


def test_a_reward_model_learns_the_pairs_and_a_resumed_run_ends_the_same(tmp_path, tiny_qwen2):
    rows = run(tmp_path / "whole", tiny_qwen2)
    assert rows[-1]["val/rewards/accuracies"] == 1.0 and rows[-1]["val/loss"] < rows[0]["train/loss"]
    run(tmp_path / "parts", tiny_qwen2, trainer__total_training_steps=3)
    assert [row["step"] for row in run(tmp_path / "parts", tiny_qwen2)] == [1, 2, 3, 4, 5, 6]
    assert largest_difference(exported(tmp_path / "whole", 6), exported(tmp_path / "parts", 6)) == 0


def test_micro_batches_and_packing_change_nothing(tmp_path, tiny_qwen2):
    # Adam divides by the size of the gradient, so that rounding of tiny gradients shows in steps of the learning rate
    settings = {"trainer__total_training_steps": 3, "data__use_dynamic_bsz": False, "optim__lr": 1e-4}
    run(tmp_path / "whole", tiny_qwen2, **settings)
    small = {"data__micro_batch_size_per_gpu": 1, "model__use_remove_padding": True}
    run(tmp_path / "small", tiny_qwen2, **settings, **small)
    assert largest_difference(exported(tmp_path / "whole", 3), exported(tmp_path / "small", 3)) < 1e-6


def test_a_margin_that_is_reached_is_no_reason_to_go_on(tmp_path, tiny_qwen2):
    rows = [row | {"gap": gap} for row, gap in zip(pairs(2), (-50.0, -50.0), strict=True)]
    settings = {"trainer__total_training_steps": 1, "trainer__test_freq": -1, "trainer__save_freq": -1}
    [step] = run(tmp_path, tiny_qwen2, rows, data__margin_key="gap", **settings)
    assert step["train/loss"] < 1e-6 and step["train/grad_norm"] < 1e-6


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_two_ranks_take_the_same_steps_as_one(tmp_path, tiny_qwen2, ray_cluster):
    settings = {"trainer__total_training_steps": 3, "trainer__test_freq": 3, "optim__lr": 1e-4}
    run(tmp_path / "one", tiny_qwen2, **settings)
    more = {"trainer__backend": "ray", "trainer__master": False, "trainer__n_gpus_per_node": 2}
    run(tmp_path / "two", tiny_qwen2, **settings, **more)
    assert largest_difference(exported(tmp_path / "one", 3), exported(tmp_path / "two", 3)) < 1e-6
    one, two = (metrics(tmp_path / name / "run")[-1] for name in ("one", "two"))
    assert one["val/loss"] == pytest.approx(two["val/loss"], abs=1e-5)


KEEP_BATCH = """
import torch

def use(task, trainer):
    def keep_batch(ctx):
        names = ("input_ids", "attention_mask", "token_level_scores")
        torch.save({name: ctx.batch.batch[name] for name in names}, PATH)

    task.insert_after("reward", keep_batch)
"""


def test_the_scores_in_a_ppo_step_are_those_of_the_trained_model(tmp_path, tiny_qwen2):
    from transformers import AutoModelForSequenceClassification

    run(tmp_path, tiny_qwen2, trainer__total_training_steps=2, trainer__save_freq=2, trainer__test_freq=-1)
    model = AutoModelForSequenceClassification.from_pretrained(export(tmp_path, 2)).eval()
    assert model.config.num_labels == 1 and model.config.architectures == ["Qwen2ForSequenceClassification"]
    kept = tmp_path / "batch.pt"
    (tmp_path / "keep.py").write_text(KEEP_BATCH.replace("PATH", repr(str(kept))))
    train(
        tmp_path / "ppo",
        tiny_qwen2,
        reward_model__enable=True,
        reward_model__model__path=export(tmp_path, 2),
        custom_reward_function__path="null",
        trainer__middleware=f"{tmp_path}/keep.py:use",
        trainer__total_training_steps=1,
        trainer__test_freq=-1,
        trainer__save_freq=-1,
    )
    batch = torch.load(kept, weights_only=True)
    scores = batch["token_level_scores"].sum(-1)
    assert scores.shape == (12,) and scores.std() > 0.01
    for tokens, is_real, score in zip(batch["input_ids"], batch["attention_mask"].bool(), scores, strict=True):
        with torch.no_grad():
            states = model.model(input_ids=tokens[is_real][None]).last_hidden_state
            assert float(model.score(states[0, -1])) == pytest.approx(float(score), abs=1e-5)


def test_adapters_are_refused(tmp_path, tiny_qwen2, capsys):
    assert main_rm.main(arguments(tmp_path, tiny_qwen2, model__lora_rank=4)) == 2
    assert "model.lora_rank=4: main_rm trains a new score head" in capsys.readouterr().err
