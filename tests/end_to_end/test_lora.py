"""LoRA in whole runs: adapters learn, rollouts and exports get them merged, and a resumed run continues with them."""

import pytest
from safetensors.torch import load_file

from hybridrl import main_ppo, main_sft
from hybridrl.cli import export_checkpoint
from hybridrl.config import PPOConfig, load_config
from hybridrl.config.checks.adapters import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from hybridrl.trainer.roles import Role
from tests.support.end_to_end.runs import largest_difference, metrics, settings, train, weights

pytestmark = pytest.mark.timeout(300)
LORA = {"actor_rollout_ref__model__lora_rank": 4, "actor_rollout_ref__model__lora_alpha": 8, "trainer__test_freq": -1}


def test_a_run_with_adapters_learns_resumes_and_exports_a_plain_model(tmp_path, tiny_qwen2):
    rows = train(tmp_path / "run", tiny_qwen2, trainer__total_training_steps=3, **LORA)
    assert all(row["actor/grad_norm"] > 0 for row in rows if "actor/grad_norm" in row)
    # The rollout has the trainer's weights: the pushed weights contain the adapters.
    assert all(
        row["training/rollout_probs_diff_max"] < 1e-4 for row in rows if "training/rollout_probs_diff_max" in row
    )

    folder = tmp_path / "run/run"
    again = ["trainer.resume_mode=resume_path", f"trainer.resume_from_path={folder / 'global_step_2'}"]
    other = tmp_path / "again"
    other.mkdir()
    assert main_ppo.main([*settings(other, tiny_qwen2, trainer__total_training_steps=3, **LORA), *again]) == 0
    policies = [
        weights(where / "global_step_3", tmp_path / name) for where, name in ((folder, "a"), (other / "run", "b"))
    ]
    assert largest_difference(*policies) == 0

    started = load_file(tiny_qwen2 / "model.safetensors")
    assert policies[0].keys() == started.keys()
    changed = {name for name in started if not policies[0][name].equal(started[name])}
    assert changed == {name for name in started if name.endswith("proj.weight")}


@pytest.mark.slow
def test_pushes_between_processes_carry_the_adapters(tmp_path, tiny_qwen2, ray_cluster):
    """Merged or alone, to another process and inside the one process of trainer.backend=local."""
    steps = LORA | {"trainer__total_training_steps": 3, "trainer__save_freq": -1}
    pools = {"trainer__backend": "ray", "actor_rollout_ref__rollout__n_gpus_per_node": 1}
    alone = {"actor_rollout_ref__rollout__weight_sync__lora": "adapter"}
    ways = {"local": {}, "ray": pools, "local_alone": alone, "ray_alone": pools | alone}
    for name, more in ways.items():
        train(tmp_path / name, tiny_qwen2, **steps | more)
    expected, *others = ([row.get("actor/grad_norm") for row in metrics(tmp_path / name / "run")] for name in ways)
    assert any(expected)
    assert others == [expected] * 3  # alpha / rank is 2, so that scaling B rounds nothing


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.timeout(600)
@pytest.mark.parametrize("pool", [0, 2], ids=["in the actors' processes", "in a pool of its own"])
def test_adapters_alone_reach_an_engine_over_two_processes(tmp_path, tiny_qwen2, tiny_tokenizer, ray_cluster, pool):
    """After every push the engine's probabilities are the trainer's.

    Entropy moves by 2e-3 nats: among some 300 tokens of about equal probability one has to move by 1e-6 for that, which
    is ten times more.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    model, rollout = tmp_path / "two_groups", "actor_rollout_ref__rollout__"
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tiny_qwen2, num_key_value_heads=2)).save_pretrained(
        model
    )
    tiny_tokenizer.save_pretrained(model)
    engine = {f"{rollout}name": "vllm", f"{rollout}tensor_model_parallel_size": 2, f"{rollout}kv_cache_memory_mb": 8}
    more = {
        f"{rollout}weight_sync__lora": "adapter",
        f"{rollout}n_gpus_per_node": pool,
        "trainer__n_gpus_per_node": 1 if pool else 2,
    }
    fast = {"actor_rollout_ref__actor__optim__lr": 0.05, "trainer__total_training_steps": 4, "trainer__save_freq": -1}
    rows = train(tmp_path / "run", model, **LORA, **engine, **more, **fast, trainer__backend="ray")
    steps = [row for row in rows if "training/rollout_probs_diff_max" in row]
    assert len(steps) == 4 and all(row["training/rollout_probs_diff_max"] < 1e-7 for row in steps)
    assert max(row["actor/entropy"] for row in steps) - min(row["actor/entropy"] for row in steps) > 2e-3


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["actor_rollout_ref.model.lora_alpha=32"],
            "lora_alpha=32: has no effect without actor_rollout_ref.model.lora_rank",
        ),
        (
            ["actor_rollout_ref.model.lora_rank=4", "actor_rollout_ref.model.target_modules=[]"],
            "no layer would be trained",
        ),
        (
            ["actor_rollout_ref.rollout.weight_sync.lora=adapter"],
            "weight_sync.lora=adapter: there are no adapters; set actor_rollout_ref",
        ),
        (
            ["actor_rollout_ref.model.lora_rank=4", "actor_rollout_ref.model.target_modules=[query]"],
            "the model's linear layers are down_proj",
        ),
    ],
    ids=str,
)
def test_invalid_lora_settings_are_refused(tmp_path, tiny_qwen2, capsys, words, message):
    assert main_ppo.main([*settings(tmp_path, tiny_qwen2), *words]) == 2
    assert message in capsys.readouterr().err


def test_supervised_fine_tuning_refuses_lora_settings_without_effect(tmp_path, tiny_qwen2, capsys):
    assert main_sft.main([f"model.path={tiny_qwen2}", "model.lora_alpha=3"]) == 2
    assert "model.lora_alpha=3: has no effect without model.lora_rank" in capsys.readouterr().err


def test_an_exported_adapter_is_continued_from_and_the_actor_without_it_is_the_reference(tmp_path, tiny_qwen2):
    kl = LORA | {"actor_rollout_ref__actor__use_kl_loss": True, "trainer__val_before_train": False}
    rows = train(tmp_path / "run", tiny_qwen2, trainer__total_training_steps=2, **kl)
    step = tmp_path / "run/run/global_step_2"
    export_checkpoint(str(step), str(tmp_path / "adapter"), adapter=True)
    assert sorted(path.name for path in (tmp_path / "adapter").iterdir()) == [ADAPTER_CONFIG, ADAPTER_WEIGHTS]
    # The first step begins at the reference, and moves away from it.
    assert rows[0]["actor/kl_loss"] < rows[1]["actor/kl_loss"] < 1

    saved = {"actor_rollout_ref__model__lora_adapter_path": tmp_path / "adapter"}
    more = kl | saved | {"trainer__total_training_steps": 1, "actor_rollout_ref__actor__optim__lr": 1e-12}
    del more["actor_rollout_ref__model__lora_rank"], more["actor_rollout_ref__model__lora_alpha"]
    [row] = train(tmp_path / "more", tiny_qwen2, **more)
    assert row["actor/kl_loss"] > rows[0]["actor/kl_loss"]  # the reference is the model without the adapter
    found = weights(tmp_path / "more/run/global_step_1", tmp_path / "found")
    assert largest_difference(found, weights(step, tmp_path / "expected")) < 1e-6


def test_with_adapters_there_is_no_second_copy_of_the_weights():
    words = ["actor_rollout_ref.actor.use_kl_loss=true", "actor_rollout_ref.model.lora_rank=4"]
    for count, expected in ((1, True), (2, False)):
        config = load_config(PPOConfig, words[:count], program="p", config_name="ppo_trainer")
        assert (Role.RefPolicy in main_ppo.worker_classes(config)) == expected


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "adapter_config.json of a LoRA adapter cannot be read"),
        (["r"], "lora_rank=3: the adapter in"),
    ],
    ids=str,
)
def test_an_adapter_that_cannot_be_continued_from_is_refused_before_anything_starts(
    tmp_path, tiny_qwen2, capsys, words, message
):
    if words:
        (tmp_path / ADAPTER_CONFIG).write_text('{"peft_type": "LORA", "r": 4, "lora_alpha": 8}')
        (tmp_path / ADAPTER_WEIGHTS).touch()
    changes = {"actor_rollout_ref__model__lora_adapter_path": tmp_path, "actor_rollout_ref__model__lora_rank": 3}
    assert main_ppo.main(settings(tmp_path, tiny_qwen2, **changes)) == 2
    assert message in capsys.readouterr().err
