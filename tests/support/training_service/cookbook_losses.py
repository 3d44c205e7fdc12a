"""DPO and off-policy distillation of the cookbook, with local data: `python cookbook_losses.py URL MODEL OUT [STEPS]`.

MODEL is a directory and the server's name of the model. The teacher is the model that DPO has made. Prints a
JSON object with the first and last value of each loss.
"""

import asyncio
import json
import os
import sys
from pathlib import Path

os.environ.update(TINKER_API_KEY="tml-local", TINKER_TELEMETRY="0", HF_HUB_OFFLINE="1")

import chz
import datasets
import tinker_cookbook
from tinker_cookbook.distillation import train_off_policy
from tinker_cookbook.distillation.datasets import TeacherConfig
from tinker_cookbook.preference import train_dpo
from tinker_cookbook.preference.dpo_datasets import DPODatasetBuilderFromComparisons
from tinker_cookbook.preference.preference_datasets import ComparisonDatasetBuilder
from tinker_cookbook.preference.types import Comparison, LabeledComparison
from tinker_cookbook.supervised.data import FromConversationFileBuilder
from tinker_cookbook.supervised.types import ChatDatasetBuilderCommonConfig

BATCH, RANK, RENDERER = 8, 8, "role_colon"
CONVERSATIONS = Path(tinker_cookbook.__file__).parent / "example_data" / "conversations.jsonl"


@chz.chz
class Sums(ComparisonDatasetBuilder):
    """A sum is better than none."""

    num: int

    def get_train_and_test_datasets(self):
        pairs = [{"x": number % 9, "y": number // 9 % 9} for number in range(self.num)]
        return datasets.Dataset.from_list(pairs), None

    def example_to_labeled_comparison(self, example):
        x, y = example["x"], example["y"]
        question = [{"role": "user", "content": f"What is {x} + {y}?"}]
        right, wrong = ([{"role": "assistant", "content": text}] for text in (str(x + y), "I do not know."))
        return LabeledComparison(Comparison(question, right, wrong), "A")


def common(model):
    return ChatDatasetBuilderCommonConfig(
        model_name_for_tokenizer=model, renderer_name=RENDERER, max_length=128, batch_size=BATCH
    )


def rows_of(directory):
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


def report(name, losses):
    print(json.dumps({"loss": name, "steps": len(losses), "first": losses[0], "last": losses[-1]}), flush=True)


def main(url, model, out, steps="6"):
    num, out = int(steps), Path(out)
    shared = {"model_name": model, "renderer_name": RENDERER, "lora_rank": RANK, "base_url": url, "max_steps": num}
    pairs = DPODatasetBuilderFromComparisons(comparison_builder=Sums(num=2 * BATCH * num), common_config=common(model))
    train_dpo.main(
        train_dpo.Config(
            log_path=str(out / "dpo"), recipe_name="dpo", dataset_builder=pairs, learning_rate=1e-2, **shared
        )
    )
    report("dpo", [row["dpo_loss"] for row in rows_of(out / "dpo") if "dpo_loss" in row])

    last = json.loads((out / "dpo" / "checkpoints.jsonl").read_text().splitlines()[-1])
    teacher = TeacherConfig(base_model=model, load_checkpoint_path=last["sampler_path"])
    data = FromConversationFileBuilder(file_path=str(CONVERSATIONS), common_config=common(model))
    pair = train_off_policy.DatasetWithTeacher(dataset_builder=data, teacher_config=teacher)
    distilled = out / "distillation"
    config = train_off_policy.Config(
        log_path=str(distilled),
        recipe_name="off_policy",
        dataset_configs=[pair],
        n_teacher_targets=5,
        batch_size=BATCH,
        learning_rate=3e-3,
        **shared,
    )
    asyncio.run(train_off_policy.main(config))
    report("distillation", [row["train/loss:sum"] / row["train/num_tokens:sum"] for row in rows_of(distilled)])


if __name__ == "__main__":
    main(*sys.argv[1:])
