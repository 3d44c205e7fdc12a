"""The same prompts, seeds and weights through `hf` and through `vllm` in every placement: hybrid, colocated, separated,
and over tensor-parallel ranks.
"""

from functools import partial
from importlib.util import find_spec

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen2Config

from hybridrl import main_ppo
from hybridrl.config import PPOConfig, load_config
from hybridrl.protocol import DataProto
from hybridrl.single_controller.launch import launch
from hybridrl.single_controller.local_worker_group import launch_locally
from hybridrl.single_controller.worker_group import RayClassWithInitArgs
from hybridrl.trainer.ppo.policy.policy_workers import PolicyWorkers
from hybridrl.trainer.ppo.policy.rollout_pipeline import RolloutPipeline
from hybridrl.trainer.roles import ResourcePoolManager, Role
from hybridrl.workers.actor_rollout_ref import ActorRolloutRefWorker
from tests.support.end_to_end.runs import metrics, settings

PROMPT, RESPONSE, NUM_PROMPTS = 16, 12, 7
TOGETHER = {Role.Actor: "pool", Role.Rollout: "pool"}
APART = {Role.Actor: "train_pool", Role.Rollout: "rollout_pool"}
TENSOR_PARALLEL = "actor_rollout_ref__rollout__tensor_model_parallel_size"
needs_vllm = pytest.mark.skipif(find_spec("vllm") is None, reason="the module vllm is not installed")


@pytest.fixture(scope="module")
def model_path(tmp_path_factory, tiny_tokenizer):
    path = tmp_path_factory.mktemp("model")
    config = Qwen2Config(
        vocab_size=len(tiny_tokenizer),
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        tie_word_embeddings=True,
        max_position_embeddings=64,
        initializer_range=0.2,
        bos_token_id=None,
        eos_token_id=tiny_tokenizer.eos_token_id,
    )
    with torch.random.fork_rng():
        torch.manual_seed(3)
        AutoModelForCausalLM.from_config(config).save_pretrained(path)
    tiny_tokenizer.save_pretrained(path)
    return path


def prompts_of() -> DataProto:
    ids = torch.randint(3, 300, (NUM_PROMPTS, PROMPT), generator=torch.Generator().manual_seed(0))
    mask = (torch.arange(PROMPT) >= torch.arange(NUM_PROMPTS)[:, None]).long()
    columns = {
        "attention_mask": mask,
        "position_ids": (mask.cumsum(-1) - 1).clamp(min=0),
        "seeds": torch.arange(NUM_PROMPTS) + 7,
    }
    return DataProto.from_dict(tensors={"input_ids": ids * mask} | columns)


def generated(folder, model_path, *, pools, mapping, colocate="process", top_k=1, **changes) -> DataProto:
    """Start the roles in these pools, push the actor's weights, and return responses with the trainer's log-probs.

    top_k=1 is greedy, and returns log-probs. Heads and layers are those of `model_path`.
    """
    folder.mkdir()
    changes = {
        "data__max_prompt_length": PROMPT,
        "data__max_response_length": RESPONSE,
        "actor_rollout_ref__rollout__top_k": top_k,
        "actor_rollout_ref__rollout__n": 2,
        "actor_rollout_ref__rollout__kv_cache_memory_mb": 4,
        "actor_rollout_ref__rollout__max_num_seqs": 16,
        **changes,
    }
    config = load_config(
        PPOConfig, settings(folder, model_path, **changes), program="main_ppo", config_name="ppo_trainer"
    )
    local = pools is None
    manager = ResourcePoolManager(pools or {"pool": [1]}, mapping, use_gpu=False, backend="local" if local else "ray")
    manager.create_resource_pool(job=folder.name)
    classes = {str(role): RayClassWithInitArgs(ActorRolloutRefWorker, config, str(role)) for role in mapping}
    pool_of_role, started = {str(role): pool for role, pool in mapping.items()}, manager.resource_pool_dict
    groups = {}
    try:
        if local:
            groups = launch_locally(classes, {role: started[pool] for role, pool in pool_of_role.items()})
        else:
            groups = launch(manager.plan(folder.name, pool_of_role, colocate=colocate), classes, started)
        for group in groups.values():
            group.init_model()
        pipeline = RolloutPipeline(PolicyWorkers(groups), config)
        pipeline.push_weights(1)
        batch = pipeline.generate(prompts_of())
        return batch.union(pipeline.workers.actor.compute_log_prob(batch))
    finally:
        for group in groups.values():
            group.shutdown()
        manager.release()


def compare(batch: DataProto, reference: DataProto) -> None:
    """Tokens are identical; log-probs are within 1e-4 of the reference's, and of the trainer's."""
    assert torch.equal(batch.batch["responses"], reference.batch["responses"])
    assert torch.equal(batch.batch["response_mask"], reference.batch["response_mask"])
    mask = reference.batch["response_mask"].bool()
    for other in (reference.batch["rollout_log_probs"], batch.batch["old_log_probs"]):
        assert (batch.batch["rollout_log_probs"] - other)[mask].abs().max() < 1e-4


@pytest.fixture(scope="module")
def through_hf(model_path, tmp_path_factory):
    """Return a function that generates with hf in one process, greedy (top_k=1) or not."""
    folder = tmp_path_factory.mktemp("hf")
    make = partial(generated, model_path=model_path, pools=None, mapping={Role.ActorRollout: "pool"})
    return {top_k: make(folder / str(top_k), top_k=top_k) for top_k in (1, 20)}


PLACEMENTS = {
    "hybrid": {"pools": {"pool": [2]}, "mapping": {Role.ActorRollout: "pool"}},
    "colocated": {"pools": {"pool": [2]}, "mapping": TOGETHER, "colocate": "device"},
    "separated": {"pools": {"train_pool": [1], "rollout_pool": [2]}, "mapping": APART},
    # One engine in two processes, each with one key-value head.
    "hybrid, tensor-parallel": {"pools": {"pool": [2]}, "mapping": {Role.ActorRollout: "pool"}, TENSOR_PARALLEL: 2},
    "separated, tensor-parallel": {
        "pools": {"train_pool": [1], "rollout_pool": [2]},
        "mapping": APART,
        TENSOR_PARALLEL: 2,
    },
}


@pytest.mark.slow
@pytest.mark.vllm
@needs_vllm
@pytest.mark.timeout(400)
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_vllm_generates_what_hf_generates(placement, model_path, through_hf, tmp_path, ray_cluster):
    batch = generated(
        tmp_path / placement.split(",")[0], model_path, actor_rollout_ref__rollout__name="vllm", **PLACEMENTS[placement]
    )
    compare(batch, through_hf[1])
    assert (
        not through_hf[1].batch["response_mask"].all()
        or len(set(through_hf[1].batch["responses"].flatten().tolist())) > 9
    )


@pytest.mark.timeout(300)
@pytest.mark.slow
def test_a_colocated_rollout_trains_as_the_hybrid_does(model_path, tmp_path, ray_cluster):
    """Actor and rollout have one process each on the one device of the pool."""
    rows = {}
    for name, mapping in (("hybrid", {Role.ActorRollout: "pool"}), ("colocated", TOGETHER)):
        (tmp_path / name).mkdir()
        code = main_ppo.main(
            settings(tmp_path / name, model_path, trainer__backend="ray", trainer__colocate="device"),
            workers=lambda config, mapping=mapping: dict.fromkeys(mapping, ActorRolloutRefWorker),
            pools=lambda config, workers, mapping=mapping: ResourcePoolManager({"pool": [1]}, mapping, use_gpu=False),
        )
        assert code == 0
        rows[name] = [
            {k: v for k, v in row.items() if k.startswith(("critic/", "actor/"))}
            for row in metrics(tmp_path / name / "run")
        ]
    assert rows["hybrid"] == rows["colocated"]
    assert any("actor/grad_norm" in row for row in rows["hybrid"])


def test_actor_and_rollout_as_two_roles_of_one_process_are_refused(model_path, tmp_path, ray_cluster, capsys):
    code = main_ppo.main(
        settings(tmp_path, model_path, trainer__backend="ray"),
        workers=lambda config: dict.fromkeys(TOGETHER, ActorRolloutRefWorker),
        pools=lambda config, workers: ResourcePoolManager({"pool": [1]}, TOGETHER, use_gpu=False),
    )
    assert code != 0
    assert "trainer.colocate=process: Role.Actor and Role.Rollout" in capsys.readouterr().err
