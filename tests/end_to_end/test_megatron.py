"""`strategy=megatron` end to end on Ray.

PPO with critic, reference and reward model takes the same steps as FSDP in one process, with several layouts and
placements of the rollout. A checkpoint resumes with another layout, and its export resumes with FSDP.
"""

import pytest
import torch

from tests.support.end_to_end.runs import largest_difference, train, weights
from tests.support.workers.megatron_models import NEEDS_MEGATRON, save_two_groups
from tests.support.workers.routing_cases import save_mixture

SAME = (
    "actor/pg_loss",
    "actor/kl_loss",
    "actor/grad_norm",
    "actor/entropy",
    "critic/vf_loss",
    "critic/grad_norm",
    "critic/score/mean",
)
NO_VALIDATION = {"trainer__test_freq": -1, "trainer__val_before_train": False}
MEGATRON = {
    "actor_rollout_ref__actor__strategy": "megatron",
    "critic__strategy": "megatron",
    "trainer__backend": "ray",
    "trainer__n_gpus_per_node": 2,
}
LAYOUT = "actor_rollout_ref__actor__megatron__"
TP2, PP2 = {f"{LAYOUT}tensor_model_parallel_size": 2}, {f"{LAYOUT}pipeline_model_parallel_size": 2}
# Transport of the weights to a rollout in a separate pool -> layout of the actor.
LAYOUT_OF_TRANSPORT = {"object_store": TP2, "shared_memory": PP2, "broadcast": TP2, "disk": PP2}

pytestmark = [NEEDS_MEGATRON, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def model(tiny_qwen2, tmp_path_factory):
    return save_two_groups(tiny_qwen2, tmp_path_factory.mktemp("two_groups"))


@pytest.fixture(scope="module")
def ppo(model, tiny_tokenizer, tmp_path_factory):
    """Settings of PPO with critic, reference policy and a reward model, whose score is the reward as it is."""
    from transformers import AutoModelForSequenceClassification

    folder = tmp_path_factory.mktemp("reward_model")
    with torch.random.fork_rng():
        torch.manual_seed(1)
        AutoModelForSequenceClassification.from_pretrained(model, num_labels=1).save_pretrained(folder)
    tiny_tokenizer.save_pretrained(folder)
    function = folder / "reward.py"
    function.write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n    return "
        "extra_info['rm_score']\n"
    )
    return NO_VALIDATION | {
        "algorithm__adv_estimator": "gae",
        "actor_rollout_ref__actor__use_kl_loss": True,
        "actor_rollout_ref__actor__entropy_coeff": 0.01,
        "critic__optim__lr": 1e-3,
        "reward_model__enable": True,
        "reward_model__model__path": folder,
        "custom_reward_function__path": function,
    }


@pytest.fixture(scope="module")
def by_fsdp(model, ppo, tmp_path_factory):
    folder = tmp_path_factory.mktemp("fsdp")
    return train(folder, model, **ppo), weights(folder / "run" / "global_step_2", folder / "hf"), folder


@pytest.fixture(scope="module")
def by_tensor_parallelism(model, ppo, tmp_path_factory, ray_cluster):
    folder = tmp_path_factory.mktemp("tp2")
    return train(folder, model, **ppo, **MEGATRON, **TP2), folder


def assert_same_run(found: list[dict], folder, by_fsdp, *, step: int = 2) -> None:
    """The metrics of these steps, and the weights of the last one, are those of FSDP in one process."""
    expected, expected_weights, _ = by_fsdp
    rows = {row["step"]: row for row in expected}
    for row in found:
        for name in SAME if row["step"] else ():
            assert row[name] == pytest.approx(rows[row["step"]][name], abs=1e-6, rel=1e-4), (name, row["step"])
    assert found[-1]["step"] == step
    assert largest_difference(weights(folder / f"run/global_step_{step}", folder / "hf"), expected_weights) < 1e-5


def test_tensor_parallel_ppo_takes_the_same_steps_as_fsdp_in_one_process(by_fsdp, by_tensor_parallelism):
    found, folder = by_tensor_parallelism
    assert_same_run(found, folder, by_fsdp)
    assert (
        len({row["critic/score/mean"] for row in found if row["step"]}) == 2
    )  # the reward model's, not one number for all


def test_a_mixture_of_experts_takes_the_same_steps_in_one_process_as_under_fsdp(tmp_path, tiny_tokenizer):
    from hybridrl.workers.engine.megatron.parallel_groups import destroy_model_parallel

    model = save_mixture(tmp_path / "model", "Qwen3Moe", tokenizer=tiny_tokenizer)
    expected = train(tmp_path / "fsdp", model, **NO_VALIDATION)
    expected_weights = weights(tmp_path / "fsdp/run/global_step_2", tmp_path / "fsdp/hf")
    found = train(tmp_path / "megatron", model, **NO_VALIDATION, actor_rollout_ref__actor__strategy="megatron")
    for row, its in zip(found, expected, strict=True):
        assert row["actor/grad_norm"] == pytest.approx(its["actor/grad_norm"], rel=1e-4)
        assert row["critic/score/mean"] == its["critic/score/mean"]
    found_weights = weights(tmp_path / "megatron/run/global_step_2", tmp_path / "megatron/hf")
    destroy_model_parallel()
    assert largest_difference(found_weights, expected_weights) < 1e-5


@pytest.mark.slow
def test_a_checkpoint_of_two_tensor_parallel_processes_resumes_in_two_pipeline_stages(
    by_fsdp, by_tensor_parallelism, model, ppo, tmp_path
):
    _, folder = by_tensor_parallelism
    step = folder / "run" / "global_step_1"
    resumed = train(
        tmp_path, model, **ppo, **MEGATRON, **PP2, trainer__resume_mode="resume_path", trainer__resume_from_path=step
    )
    assert_same_run(resumed, tmp_path, by_fsdp)


def test_the_export_of_a_megatron_checkpoint_takes_the_same_next_step_under_fsdp(
    by_fsdp, by_tensor_parallelism, ppo, tmp_path
):
    """An export has no optimizer state: the step is the first one of a new run, from the exports of both engines' first
    step.

    Both exports differ by rounding, which Adam's first step enlarges where a gradient is next to nothing: hence a tenth
    of its size.
    """
    found = {}
    for name, (*_, folder) in {"fsdp": by_fsdp, "megatron": by_tensor_parallelism}.items():
        start = tmp_path / f"{name} export"
        before = weights(folder / "run" / "global_step_1", start)
        rows = train(tmp_path / name, start, **ppo, trainer__total_training_steps=1)
        found[name] = rows[-1], weights(tmp_path / name / "run/global_step_1", tmp_path / f"{name} next")
        assert largest_difference(before, found[name][1]) > 1e-4
    for key in SAME:
        assert found["megatron"][0][key] == pytest.approx(found["fsdp"][0][key], abs=1e-6, rel=1e-4), key
    assert largest_difference(found["megatron"][1], found["fsdp"][1]) < 1e-4


@pytest.mark.slow
def test_an_export_takes_the_same_next_step_under_both_engines(by_tensor_parallelism, ppo, tmp_path):
    start = tmp_path / "export"
    weights(by_tensor_parallelism[1] / "run" / "global_step_1", start)
    one = train(tmp_path / "one", start, **ppo, trainer__total_training_steps=1)
    after = one, weights(tmp_path / "one/run/global_step_1", tmp_path / "one next"), None
    found = train(tmp_path / "two", start, **ppo, **MEGATRON, **PP2, trainer__total_training_steps=1)
    assert_same_run(found, tmp_path / "two", after, step=1)


@pytest.mark.slow
def test_two_data_parallel_ranks_of_two_processes_take_the_same_steps(by_fsdp, model, ppo, tmp_path, ray_cluster):
    four = MEGATRON | {"trainer__n_gpus_per_node": 4}
    assert_same_run(
        train(tmp_path, model, **ppo, **four, **TP2, **{f"{LAYOUT}sequence_parallel": True}), tmp_path, by_fsdp
    )


@pytest.mark.slow
@pytest.mark.parametrize("way", LAYOUT_OF_TRANSPORT)
def test_a_rollout_in_a_separate_pool_gets_the_weights_that_fsdp_sends(by_fsdp, model, ppo, tmp_path, ray_cluster, way):
    key = "actor_rollout_ref__rollout__"
    apart = {f"{key}n_gpus_per_node": 1, f"{key}weight_sync__transport": way, f"{key}weight_sync__bucket_mb": 1}
    if way == "disk":
        apart[f"{key}weight_sync__directory"] = tmp_path / "weights"
    assert_same_run(train(tmp_path, model, **ppo, **MEGATRON, **LAYOUT_OF_TRANSPORT[way], **apart), tmp_path, by_fsdp)
