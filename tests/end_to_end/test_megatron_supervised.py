"""Programs that train one model on fixed data, and PPO with adapters, on two tensor-parallel Megatron processes.

They take the same steps as FSDP in one process, and their exports are equal.
"""

from pathlib import Path

import pytest
from safetensors.torch import load_file

from hybridrl.cli import export_checkpoint
from hybridrl.config.checks.adapters import ADAPTER_WEIGHTS
from tests.end_to_end import test_main_dpo, test_main_rm, test_main_sft
from tests.support.end_to_end.runs import train, weights
from tests.support.workers.engine_cases import UNDETERMINED
from tests.support.workers.megatron_models import NEEDS_MEGATRON, save_two_groups

TWO = {"trainer__backend": "ray", "trainer__master": False, "trainer__n_gpus_per_node": 2}
TP2 = {"strategy": "megatron", "megatron__tensor_model_parallel_size": 2}
STEPS = {"trainer__total_training_steps": 3, "trainer__test_freq": 3, "optim__lr": 1e-4}
LORA = {"model__lora_rank": 4, "optim__lr": 3e-4}
PROGRAMS = {
    "sft": (test_main_sft.run, {}),
    "sft with adapters": (test_main_sft.run, LORA),
    "dpo with adapters": (test_main_dpo.run, LORA),
    "rm": (test_main_rm.run, {}),
}

pytestmark = [NEEDS_MEGATRON, pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def model(tiny_qwen2, tmp_path_factory) -> Path:
    return save_two_groups(tiny_qwen2, tmp_path_factory.mktemp("two_groups"))


def largest_difference(one: Path, other: Path) -> float:
    """Return the largest difference of two files of tensors, but for a bias whose gradient is rounding alone."""
    found, expected = load_file(one), load_file(other)
    assert found.keys() == expected.keys()
    return max((found[name] - expected[name]).abs().max() for name in found if not name.endswith(UNDETERMINED)).item()


@pytest.mark.parametrize("program", PROGRAMS)
def test_two_tensor_parallel_processes_take_the_same_steps_as_fsdp(tmp_path, model, ray_cluster, program):
    run, settings = PROGRAMS[program]
    rows = {"one": run(tmp_path / "one", model, **STEPS | settings)}
    rows["two"] = run(tmp_path / "two", model, **STEPS | settings, **TP2, **TWO)
    assert [row["step"] for row in rows["two"]] == [1, 2, 3]
    for one, two in zip(rows["one"], rows["two"], strict=True):
        for name in ("train/loss", "train/grad_norm", "val/loss", "rewards/margins", "val/rewards/margins"):
            if name in one:
                assert two[name] == pytest.approx(one[name], abs=1e-5, rel=1e-4), (name, one["step"])
    assert "val/loss" in rows["two"][-1]
    exports = ["huggingface/model.safetensors"]
    exports += [f"lora_adapter/{ADAPTER_WEIGHTS}"] if "model__lora_rank" in settings else []
    for name in exports:
        one, two = (tmp_path / folder / "run/global_step_3" / name for folder in ("one", "two"))
        assert largest_difference(one, two) < 1e-5, name


@pytest.mark.parametrize("push", ["merged", "adapter"])
def test_ppo_with_adapters_and_a_reference_takes_the_same_steps_as_fsdp(tmp_path, model, ray_cluster, push):
    policy = "actor_rollout_ref__"
    settings = {
        f"{policy}model__lora_rank": 4,
        f"{policy}model__lora_alpha": 8,
        f"{policy}actor__use_kl_loss": True,
        f"{policy}rollout__weight_sync__lora": push,
        "trainer__test_freq": -1,
        "trainer__val_before_train": False,
    }
    megatron = {f"{policy}actor__strategy": "megatron", f"{policy}actor__megatron__tensor_model_parallel_size": 2}
    rows = {"one": train(tmp_path / "one", model, **settings)}
    rows["two"] = train(tmp_path / "two", model, **settings, **megatron, **TWO)
    for one, two in zip(rows["one"], rows["two"], strict=True):
        for name in ("actor/pg_loss", "actor/kl_loss", "actor/grad_norm", "critic/score/mean"):
            assert two[name] == pytest.approx(one[name], abs=1e-6, rel=1e-4), (name, one["step"])
        assert two["training/rollout_probs_diff_max"] < 1e-4  # the rollout has the adapters
    assert rows["two"][-1]["actor/kl_loss"] > 0
    for folder in ("one", "two"):
        step = tmp_path / folder / "run/global_step_2"
        weights(step, tmp_path / folder / "model")
        export_checkpoint(str(step), str(tmp_path / folder / "adapter"), adapter=True)
    for name in ("model/model.safetensors", f"adapter/{ADAPTER_WEIGHTS}"):
        assert largest_difference(tmp_path / "one" / name, tmp_path / "two" / name) < 1e-5, name
