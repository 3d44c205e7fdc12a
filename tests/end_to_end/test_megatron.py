"""`strategy=megatron` end to end on Ray: a run takes the same steps as FSDP in one process, and goes on under another layout."""

import pytest
import torch

from tests.end_to_end.runs import largest_difference, train, weights
from tests.workers.megatron_models import NEEDS_MEGATRON

SAME = ("actor/pg_loss", "actor/kl_loss", "actor/grad_norm", "actor/entropy", "critic/vf_loss", "critic/grad_norm", "critic/score/mean")
PPO = {
    "algorithm__adv_estimator": "gae",
    "actor_rollout_ref__actor__use_kl_loss": True,
    "actor_rollout_ref__actor__entropy_coeff": 0.01,
    "critic__optim__lr": 1e-3,
    "trainer__test_freq": -1,
}
MEGATRON = {
    "actor_rollout_ref__actor__strategy": "megatron",
    "critic__strategy": "megatron",
    "trainer__backend": "ray",
    "trainer__n_gpus_per_node": 2,
}
LAYOUT = "actor_rollout_ref__actor__megatron__"
TP2, PP2 = {f"{LAYOUT}tensor_model_parallel_size": 2}, {f"{LAYOUT}pipeline_model_parallel_size": 2}

pytestmark = [NEEDS_MEGATRON, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def model(tiny_qwen2, tiny_tokenizer, tmp_path_factory):
    """The tiny model with two key-value heads, so that two processes can share its attention, and a value head for the critic."""
    from transformers import AutoConfig, AutoModelForCausalLM

    folder = tmp_path_factory.mktemp("two_groups")
    config = AutoConfig.from_pretrained(tiny_qwen2, num_key_value_heads=2)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tiny_tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def by_fsdp(model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("fsdp")
    return train(folder, model, **PPO), weights(folder / "run" / "global_step_2", folder / "hf")


@pytest.fixture(scope="module")
def by_tensor_parallelism(model, tmp_path_factory, ray_cluster):
    folder = tmp_path_factory.mktemp("tp2")
    return train(folder, model, **PPO, **MEGATRON, **TP2), folder


def test_tensor_parallel_ppo_takes_the_same_steps_as_fsdp_in_one_process(by_fsdp, by_tensor_parallelism, tmp_path):
    (expected, expected_weights), (found, folder) = by_fsdp, by_tensor_parallelism
    for left, right in zip(expected[1:], found[1:], strict=True):
        for name in SAME:
            assert left[name] == pytest.approx(right[name], abs=1e-4, rel=1e-3), (name, left["step"])
    exported = weights(folder / "run" / "global_step_2", tmp_path / "hf")
    assert largest_difference(exported, expected_weights) < 1e-5


def test_a_checkpoint_of_two_tensor_parallel_processes_goes_on_in_two_stages(by_fsdp, by_tensor_parallelism, model, tmp_path):
    _, folder = by_tensor_parallelism
    step = folder / "run" / "global_step_1"
    resumed = train(tmp_path, model, **PPO, **MEGATRON, **PP2, trainer__resume_mode="resume_path", trainer__resume_from_path=step)
    (expected, expected_weights) = by_fsdp
    assert resumed[-1]["step"] == 2
    for name in SAME:
        assert resumed[-1][name] == pytest.approx(expected[-1][name], abs=1e-4, rel=1e-3), name
    assert largest_difference(weights(tmp_path / "run" / "global_step_2", tmp_path / "hf"), expected_weights) < 1e-5


@pytest.mark.slow
def test_two_data_parallel_ranks_of_two_processes_take_the_same_steps(by_fsdp, model, tmp_path, ray_cluster):
    expected, expected_weights = by_fsdp
    four = MEGATRON | {"trainer__n_gpus_per_node": 4}
    found = train(tmp_path, model, **PPO, **four, **TP2, **{f"{LAYOUT}sequence_parallel": True})
    for name in SAME:
        assert found[-1][name] == pytest.approx(expected[-1][name], abs=1e-4, rel=1e-3), name
    assert largest_difference(weights(tmp_path / "run" / "global_step_2", tmp_path / "hf"), expected_weights) < 1e-5
