"""Runs with pictures by the real program, up to an exported model.

Learning and Ray are slow.
"""

import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoImageProcessor, AutoModelForCausalLM, AutoModelForImageTextToText

from examples.vision.build_model import TEXTS, build_model, make_tokenizer
from examples.vision.make_data import make_rows, swapped
from hybridrl import main_distill, main_dpo, main_ppo, main_rm, main_sft
from hybridrl.cli import export_checkpoint
from hybridrl.trainer.data.images import messages_with_images
from hybridrl.workers.images import decoded_image
from tests.support.end_to_end.pictures import save_model_and_rows
from tests.support.workers.image_cases import model_inputs, read_processor

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return save_model_and_rows(tmp_path_factory.mktemp("pictures"))


def save_text_model(folder: Path) -> Path:
    """Write a model of text that reads the tokens of the model with pictures."""
    tokenizer = make_tokenizer(TEXTS)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = AutoConfig.for_model("qwen2", vocab_size=len(tokenizer), num_key_value_heads=2, **sizes)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder / "text")
    tokenizer.save_pretrained(folder / "text")
    return folder / "text"


def words(folder: Path, run: Path, **changes: object) -> list[str]:
    values = {
        "algorithm.adv_estimator": "grpo",
        "data.train_files": folder / "train.parquet",
        "data.val_files": folder / "train.parquet",
        "data.train_batch_size": 4,
        "data.max_prompt_length": 32,
        "data.max_response_length": 3,
        "actor_rollout_ref.model.path": folder / "model",
        "actor_rollout_ref.model.use_remove_padding": True,
        "actor_rollout_ref.actor.use_prefix_grouper": True,
        "actor_rollout_ref.actor.ppo_mini_batch_size": 2,
        "actor_rollout_ref.actor.optim.lr": 1e-3,
        "actor_rollout_ref.rollout.name": "hf",
        "actor_rollout_ref.rollout.n": 4,
        "custom_reward_function.path": ROOT / "examples" / "vision" / "make_data.py",
        "trainer.backend": "local",
        "trainer.master": False,
        "trainer.num_threads": 1,
        "trainer.total_training_steps": 2,
        "trainer.save_freq": 2,
        "trainer.logger": ["jsonl"],
        "trainer.default_local_dir": run,
    } | {name.replace("__", "."): value for name, value in changes.items()}
    return [f"{name}={value}" for name, value in values.items()]


def metrics(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_grpo_with_pictures_trains_what_it_sampled_and_exports_a_model_that_loads(folder, tmp_path):
    changes = {"actor_rollout_ref__actor__calculate_old_log_probs": True, "algorithm__use_kl_in_reward": True}
    assert main_ppo.main(words(folder, tmp_path / "run", **changes)) == 0
    rows = [row for row in metrics(tmp_path / "run") if "training/rollout_log_probs_diff_max" in row]
    assert len(rows) == 2 and all(row["training/rollout_log_probs_diff_max"] < 1e-5 for row in rows)
    assert all(row["actor/grad_norm"] > 0 and row["actor/shared_prefix_ratio"] > 0.3 for row in rows)
    export_checkpoint(str(tmp_path / "run" / "global_step_2"), str(tmp_path / "hf"))
    before, after = (
        AutoModelForImageTextToText.from_pretrained(path).state_dict() for path in (folder / "model", tmp_path / "hf")
    )
    assert before.keys() == after.keys() and not torch.equal(
        *(s["model.visual.patch_embed.proj.weight"] for s in (before, after))
    )
    assert AutoImageProcessor.from_pretrained(tmp_path / "hf").patch_size == 8


def test_qwen3_5_reads_pictures_if_it_is_not_said_to_be_of_text_only(folder, tmp_path, caplog, capsys):
    model = build_model(tmp_path / "model", family="qwen3_5")
    more = load_file(model / "model.safetensors") | {"mtp.norm.weight": torch.ones(64)}
    save_file(more, model / "model.safetensors", metadata={"format": "pt"})
    actor = "actor_rollout_ref__actor__"
    changes = {"actor_rollout_ref__model__path": model, f"{actor}calculate_old_log_probs": True}
    changes |= {f"{actor}entropy_coeff": 0.1}  # all of its first answers may have the same reward
    assert main_ppo.main(words(folder, tmp_path / "text", **changes)) != 0
    assert "Qwen3.5 does with model.override_config.language_model_only=false" in capsys.readouterr().err + caplog.text
    changes |= {"actor_rollout_ref__model__override_config__language_model_only": "false"}
    assert main_ppo.main(words(folder, tmp_path / "run", **changes)) == 0
    rows = [row for row in metrics(tmp_path / "run") if "training/rollout_log_probs_diff_max" in row]
    assert len(rows) == 2 and all(row["training/rollout_log_probs_diff_max"] < 1e-5 for row in rows)
    assert all(row["actor/grad_norm"] > 0 and row["actor/shared_prefix_ratio"] > 0.3 for row in rows)
    export_checkpoint(str(tmp_path / "run" / "global_step_2"), str(tmp_path / "hf"))
    before, after = (load_file(path / "model.safetensors") for path in (model, tmp_path / "hf"))
    assert before.keys() == after.keys()
    unchanged = {name for name in before if torch.equal(before[name], after[name])}
    assert "mtp.norm.weight" in unchanged and not any(".visual." in name for name in unchanged)
    assert not AutoConfig.from_pretrained(tmp_path / "hf").language_model_only
    assert AutoImageProcessor.from_pretrained(tmp_path / "hf").patch_size == 8


def test_a_critic_and_adapters_learn_from_pictures_and_the_tower_of_adapters_stays(folder, tmp_path):
    changes = {
        "algorithm__adv_estimator": "gae",
        "critic__model__use_remove_padding": True,
        "critic__ppo_micro_batch_size_per_gpu": 4,
        "actor_rollout_ref__model__lora_rank": 4,
        "actor_rollout_ref__model__target_modules": ["all-linear", "visual.qkv"],
        "algorithm__use_kl_in_reward": True,
    }
    assert main_ppo.main(words(folder, tmp_path / "run", **changes)) == 0
    rows = [row for row in metrics(tmp_path / "run") if "training/rollout_log_probs_diff_max" in row]
    assert len(rows) == 2 and all(row["training/rollout_log_probs_diff_max"] < 1e-5 for row in rows)
    assert all(row["actor/grad_norm"] > 0 and row["critic/grad_norm"] > 0 for row in rows)
    assert rows[0]["actor/reward_kl_penalty"] == pytest.approx(0, abs=1e-6), "new adapters are the reference itself"
    export_checkpoint(str(tmp_path / "run" / "global_step_2"), str(tmp_path / "hf"))
    before, after = (
        AutoModelForImageTextToText.from_pretrained(path).state_dict() for path in (folder / "model", tmp_path / "hf")
    )
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert {name.rpartition(".")[0].rpartition(".")[2] for name in changed if ".visual." in name} == {"qkv"}
    assert any(".q_proj." in name for name in changed)


@pytest.mark.parametrize("mode", ["k1", pytest.param("reverse_kl", marks=pytest.mark.slow)])
def test_a_student_with_pictures_that_is_its_own_teacher_has_no_divergence_and_learns_from_another(
    folder, tmp_path, mode
):
    build_model(tmp_path / "other", family="qwen2_5_vl", seed=1)
    loss, found = "distillation__distillation_loss__", {}
    for name, teacher in (("itself", folder / "model"), ("other", tmp_path / "other")):
        changes = {
            "distillation__teacher_models__teacher_model__model_path": teacher,
            f"{loss}loss_mode": mode,
            f"{loss}use_policy_gradient": mode == "k1",
            "actor_rollout_ref__actor__ppo_mini_batch_size": 4,
            "trainer__total_training_steps": 1,
            "trainer__save_freq": -1,
        }
        assert main_distill.main(words(folder, tmp_path / name, **changes)) == 0
        [found[name]] = [row for row in metrics(tmp_path / name) if "distillation/kl" in row]
    assert abs(found["itself"]["distillation/kl"]) < 1e-6 and found["itself"]["actor/grad_norm"] < 1e-4
    assert abs(found["other"]["distillation/kl"]) > 1e-4 and found["other"]["actor/grad_norm"] > 1e-3


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"reward_model__enable": True, "reward_model__model__path": "{model}"},
            "reward_model.enable=true .score with a reward function, .*: it does not run with .*, which reads images",
        ),
        (
            {"algorithm__adv_estimator": "gae", "critic__model__path": "{text}"},
            "critic.model.path=.*/text: it gets the images .* and reads text only; choose a model of the same family",
        ),
        (
            {
                "distillation__enabled": True,
                "distillation__teacher_models__teacher_model__model_path": "{text}",
            },
            "teacher_models.teacher_model.model_path=.*/text: it gets the images as .* and reads text only",
        ),
        (
            {"actor_rollout_ref__actor__strategy": "megatron"},
            "strategy=megatron supports the model types .* not qwen2_5_vl",
        ),
        (
            {"actor_rollout_ref__model__lora_rank": 4, "actor_rollout_ref__model__target_modules": ["visual.up"]},
            r"linear layers are .*visual.qkv.* or use all-linear and visual.all-linear",
        ),
    ],
)
def test_what_does_not_run_with_images_is_refused_by_name(folder, tmp_path, capsys, caplog, changes, message):
    places = {"{model}": folder / "model", "{text}": save_text_model(folder)}
    changes = {name: places.get(str(value), value) for name, value in changes.items()}
    assert main_ppo.main(words(folder, tmp_path / "run", **changes)) != 0
    assert re.search(message, capsys.readouterr().err + caplog.text)


def supervised_words(folder: Path, run: Path, **changes: object) -> list[str]:
    values = {
        "data.train_files": folder,
        "data.train_batch_size": 4,
        "model.path": folder.parent / "model",
        "model.use_remove_padding": True,
        "optim.lr": 1e-3,
        "trainer.backend": "local",
        "trainer.master": False,
        "trainer.num_threads": 1,
        "trainer.total_training_steps": 1,
        "trainer.logger": ["jsonl"],
        "trainer.default_local_dir": run,
    } | {name.replace("__", "."): value for name, value in changes.items()}
    return [f"{name}={value}" for name, value in values.items()]


def log_probs_of_answers(folder: Path, rows: list[dict], answers: list[str]) -> list[torch.Tensor]:
    """Return each answer's log-probs by plain transformers, one row at a time."""
    model = AutoModelForImageTextToText.from_pretrained(folder / "model").eval()
    tokenizer, processor = read_processor(str(folder / "model"))
    found = []
    for row, answer in zip(rows, answers, strict=True):
        pictures = [decoded_image(image["bytes"], "row") for image in row.get("images") or []]
        messages = messages_with_images(row["prompt"], len(pictures), "row")
        tokens = np.array(tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False))
        tokens, inputs = processor(tokens, pictures) if pictures else (tokens, None)
        own = tokenizer(f"{answer}<|im_end|>")["input_ids"]
        ids, more = torch.tensor([[*tokens, *own]]), {}
        if inputs is not None:
            more = model_inputs(inputs)
            more["mm_token_type_ids"] = (ids == model.config.image_token_id).int()
        model.model.rope_deltas = None
        with torch.no_grad():
            logits = model(input_ids=ids, **more).logits[0, -len(own) - 1 : -1]
        found.append(logits.log_softmax(-1).gather(-1, torch.tensor(own)[:, None])[:, 0])
    return found


def test_fine_tuning_with_pictures_has_the_loss_of_plain_transformers_padded_and_packed(folder, tmp_path):
    rows = make_rows(4, seed=1, kinds=("colour",))
    del rows[3]["images"]
    rows[3]["prompt"] = [{"role": "user", "content": "Which colour ?"}]
    answers = [str(row["ground_truth"]) for row in rows]
    talks = [
        {"messages": [*row["prompt"], {"role": "assistant", "content": answer}], "images": row.get("images")}
        for row, answer in zip(rows, answers, strict=True)
    ]
    pq.write_table(pa.Table.from_pylist(talks), folder / "talks.parquet")
    expected = -torch.cat(log_probs_of_answers(folder, rows, answers)).mean()
    for packed in (True, False):
        run = tmp_path / str(packed)
        changes = {"model__use_remove_padding": packed, "freeze_vision_tower": packed}
        assert main_sft.main(supervised_words(folder / "talks.parquet", run, **changes)) == 0
        [found] = [row for row in metrics(run) if "train/loss" in row]
        assert found["train/loss"] == pytest.approx(float(expected), abs=1e-5) and found["train/grad_norm"] > 0


def test_an_engine_of_the_users_without_images_is_refused_before_training(folder, tmp_path, capsys):
    toy = f"{ROOT / 'tests' / 'support' / 'third_party' / 'toy_engine.py'}:ToyEngine"
    assert main_sft.main(supervised_words(folder / "train.parquet", tmp_path / "run", strategy=toy)) == 2
    assert re.search(r"strategy=\S+ToyEngine: the engine computes no images.* set fsdp", capsys.readouterr().err)


def test_preferences_with_pictures_have_the_log_probs_of_plain_transformers(folder, tmp_path):
    rows = make_rows(4, seed=1, kinds=("colour",))
    chosen = [str(row["ground_truth"]) for row in rows]
    pairs = [
        {"prompt": row["prompt"], "chosen": answer, "rejected": "How many", "images": row["images"]}
        for row, answer in zip(rows, chosen, strict=True)
    ]
    pq.write_table(pa.Table.from_pylist(pairs), folder / "pairs.parquet")
    assert main_dpo.main(supervised_words(folder / "pairs.parquet", tmp_path / "run")) == 0
    [found] = [row for row in metrics(tmp_path / "run") if "train/loss" in row]
    for name, answers in (("logps/chosen", chosen), ("logps/rejected", ["How many"] * 4)):
        sums = [log_probs.sum() for log_probs in log_probs_of_answers(folder, rows, answers)]
        assert found[name] == pytest.approx(float(torch.stack(sums).mean()), abs=1e-5)


def test_training_a_reward_model_with_pictures_is_refused_by_name(folder, tmp_path, capsys):
    rows = make_rows(4, seed=1, kinds=("colour",))
    pairs = [{"prompt": row["prompt"], "chosen": "red", "rejected": "one", "images": row["images"]} for row in rows]
    pq.write_table(pa.Table.from_pylist(pairs), folder / "judged.parquet")
    assert main_rm.main(supervised_words(folder / "judged.parquet", tmp_path / "run")) == 2
    assert "row 0 has images in column 'images' (data.image_key), and the model, or" in capsys.readouterr().err


LOOP = """
from dataclasses import replace

from PIL import Image
from hybridrl.serving.agent_loop import AgentLoop, function_tool, register_agent_loop
from hybridrl.serving.agent_loop.tools.tool_agent import ToolAgentLoop, ToolCall

@function_tool
def look(side: int):
    return ["What", Image.new("RGB", (side, 16), "red")]

@register_agent_loop("looks_again")
class LooksAgain(AgentLoop):
    "Two turns; the second one sees another picture."

    async def run(self, sampling_params, **row):
        response = self.respond(row)
        await response.sample(sampling_params)
        colour = (row["request"].seed % 200, 0, 0)
        text, images = self.text_of(["What", Image.new("RGB", (32, 16), colour)])
        if response.observe(*self.encode(text, images)):
            await response.sample(sampling_params)
        return replace(response.output(), reward=float(sum(response.ids) % 5))

@register_agent_loop("calls_a_tool")
class CallsATool(ToolAgentLoop):
    "Each turn that ends calls the tool."

    def parse_tool_calls(self, text):
        return [ToolCall("look", {"side": 32})]
"""


@pytest.mark.parametrize("loop", ["single_turn_agent", "looks_again", "calls_a_tool"])
def test_agents_train_what_they_sampled_also_after_a_picture_in_the_middle_of_a_response(folder, tmp_path, loop):
    (tmp_path / "loop.py").write_text(LOOP)
    changes = {
        "actor_rollout_ref__rollout__mode": "async",
        "actor_rollout_ref__rollout__agent__path": tmp_path / "loop.py",
        "actor_rollout_ref__rollout__agent__default_agent_loop": loop,
        "actor_rollout_ref__rollout__multi_turn__function_tool_path": tmp_path / "loop.py",
        "actor_rollout_ref__actor__calculate_old_log_probs": True,
        "data__max_response_length": {"single_turn_agent": 3, "looks_again": 12, "calls_a_tool": 40}[loop],
        "trainer__save_freq": -1,
        "algorithm__use_kl_in_reward": True,
    }
    assert main_ppo.main(words(folder, tmp_path / "run", **changes)) == 0
    rows = [row for row in metrics(tmp_path / "run") if "training/rollout_log_probs_diff_max" in row]
    assert len(rows) == 2 and all(row["training/rollout_log_probs_diff_max"] < 1e-5 for row in rows)
    assert all(row["actor/grad_norm"] > 0 for row in rows)
    turns = {row["rollout/num_turns/mean"] for row in rows}
    assert turns == {2.0} if loop == "single_turn_agent" else min(turns) > 2


@pytest.mark.parametrize("way", ["partial", "tail_batching"])
def test_parts_of_responses_and_prompts_kept_for_later_keep_their_pictures(folder, tmp_path, way):
    """Without a learning rate all versions of the weights are equal, so log-probs of old parts are, too."""
    (tmp_path / "loop.py").write_text(LOOP)
    own: dict[str, object] = {"algorithm__filter_groups__order": "tail_batching", "data__gen_batch_size": 6}
    if way == "partial":
        own = {"trainer__partial_rollout": True, "trainer__lag": 2}
        own["actor_rollout_ref__rollout__agent__default_agent_loop"] = "looks_again"
    changes = {
        "actor_rollout_ref__rollout__mode": "async",
        "actor_rollout_ref__rollout__agent__path": tmp_path / "loop.py",
        "actor_rollout_ref__actor__optim__lr": 1e-12,
        "actor_rollout_ref__actor__calculate_old_log_probs": True,
        "data__max_response_length": 12,
        "trainer__total_training_steps": 3,
        "trainer__save_freq": -1,
    }
    assert main_ppo.main(words(folder, tmp_path / "run", **changes, **own)) == 0
    rows = [row for row in metrics(tmp_path / "run") if "training/rollout_log_probs_diff_max" in row]
    assert len(rows) == 3 and all(row["training/rollout_log_probs_diff_max"] < 1e-5 for row in rows)


def test_a_resumed_run_with_pictures_goes_on_as_if_it_had_not_stopped(folder, tmp_path):
    reward = "def compute_score(solution_str, **_):\n    return float(sum(map(ord, solution_str)) % 5)\n"
    (tmp_path / "reward.py").write_text(reward)
    own = {"custom_reward_function__path": tmp_path / "reward.py", "trainer__save_freq": 1, "trainer__test_freq": -1}
    for name, lengths in (("whole", (2,)), ("resumed", (1, 2))):
        for steps in lengths:
            changes = own | {"trainer__total_training_steps": steps}
            assert main_ppo.main(words(folder, tmp_path / name, **changes)) == 0
    whole, resumed = (
        [row["actor/grad_norm"] for row in metrics(tmp_path / name) if "actor/grad_norm" in row]
        for name in ("whole", "resumed")
    )
    assert whole == resumed and len(whole) == 2 and min(whole) > 0


ATTACKED = """
from dataclasses import replace

from hybridrl.serving.agent_loop import AgentLoop, register_agent_loop
from tests.support.workers.image_attacks import ATTACKS

LEFT = [data for data, _ in ATTACKS.values()]

@register_agent_loop("sees_an_attack")
class SeesAnAttack(AgentLoop):
    "Every second sample of a prompt sees the next attack."

    async def run(self, sampling_params, **row):
        response = self.respond(row)
        await response.sample(sampling_params)
        if row["request"].sample % 2:
            data = LEFT.pop()
            response.observe(*self.encode(*self.text_of([{"type": "image", "image": data}])))
        return replace(response.output(), reward=float(sum(response.ids) % 5))
"""


def test_samples_that_see_an_attack_are_left_out_and_the_run_goes_on(folder, tmp_path):
    (tmp_path / "loop.py").write_text(ATTACKED)
    changes = {
        "actor_rollout_ref__rollout__mode": "async",
        "actor_rollout_ref__rollout__agent__path": tmp_path / "loop.py",
        "actor_rollout_ref__rollout__agent__default_agent_loop": "sees_an_attack",
        "data__train_batch_size": 6,
        "trainer__total_training_steps": 1,
        "trainer__val_before_train": False,
        "trainer__save_freq": -1,
    }
    assert main_ppo.main(words(folder, tmp_path / "run", **changes)) == 0
    [row] = [row for row in metrics(tmp_path / "run") if "actor/grad_norm" in row]
    assert row["rollout/agent/failures/DataError"] == row["rollout/agent/samples_left_out"] == 12
    assert row["actor/grad_norm"] > 0


def test_a_model_of_text_has_no_tower_to_freeze(tiny_qwen2, folder, tmp_path, capsys, caplog):
    changes = {"actor_rollout_ref__actor__freeze_vision_tower": True, "actor_rollout_ref__model__path": tiny_qwen2}
    assert main_ppo.main(words(folder, tmp_path / "run", **changes)) != 0
    assert "freeze_vision_tower=true" in capsys.readouterr().err + caplog.text


def test_swapped_rows_keep_their_questions_and_have_pictures_of_other_rows():
    rows = make_rows(8, seed=2, kinds=("colour", "count"))
    for row, other in zip(rows, swapped(rows), strict=True):
        assert row["prompt"] == other["prompt"] and row["ground_truth"] == other["ground_truth"]
        assert row["images"] != other["images"]


@pytest.mark.slow
@pytest.mark.timeout(960)
def test_the_example_learns_what_only_the_pictures_say_and_nothing_from_pictures_of_other_rows(tmp_path):
    command = ["bash", str(ROOT / "examples" / "vision" / "run.sh"), str(tmp_path)]
    environment = {"PATH": "/usr/bin:/bin", "PYTHON": sys.executable, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    subprocess.run(command, cwd=ROOT, env=environment, check=True, timeout=900)
    last = [row for row in metrics(tmp_path / "grpo") if "val-core/shapes/colour/reward/mean@1" in row][-1]
    for kind in ("colour", "count"):
        assert last[f"val-core/shapes/{kind}/reward/mean@1"] > 0.9
        assert last[f"val-core/shapes/{kind}, swapped/reward/mean@1"] < 0.4


@pytest.mark.slow
def test_a_run_on_ray_is_that_of_one_process(folder, tmp_path, ray_cluster):
    for backend in ("local", "ray"):
        assert main_ppo.main(words(folder, tmp_path / backend, trainer__backend=backend)) == 0
    one, other = (
        [row["actor/loss"] for row in metrics(tmp_path / backend) if "actor/loss" in row]
        for backend in ("local", "ray")
    )
    assert one == pytest.approx(other, abs=1e-6)
