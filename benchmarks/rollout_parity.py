"""Check that `hf` and `vllm` generate the same tokens from the same prompts, seeds and weights in every placement.

Each row starts the roles anew (hybrid: actor and rollout in one process; colocated: a process each on one device;
separated: a pool each). It pushes the actor's weights, puts a rollout on the trainer's pool to sleep once, and
generates: greedy, and with --seeded also sampled. The table says whether the tokens equal those of `hf` hybrid. It has
the largest difference of their float32 log-probs to that reference and to the trainer's own. The target is 1e-4.

    python benchmarks/rollout_parity.py [--prompts 16] [--samples 4] [--response 24] [--seeded]

Exits with status 1 if greedy tokens differ or a log-prob misses the target.
"""

import argparse
import os
import sys
import tempfile
from pathlib import Path

import ray
import torch
from step_time import prepare
from transformers import Qwen2Config, Qwen2ForCausalLM

from hybridrl.config import PPOConfig, load_config
from hybridrl.protocol import DataProto
from hybridrl.single_controller.placement.resource_pool import RayResourcePool
from hybridrl.single_controller.ray_worker_group import RayClassWithInitArgs, RayWorkerGroup
from hybridrl.trainer.ppo.policy.policy_workers import PolicyWorkers
from hybridrl.trainer.ppo.policy.rollout_pipeline import RolloutPipeline
from hybridrl.workers.actor_rollout_ref import ActorRolloutRefWorker

PROMPT = 24
TARGET = 1e-4
HYBRID, APART = ("actor_rollout",), ("actor", "rollout")
# Name of the row -> engine, roles, and whether they share one pool.
ROWS = {
    "hf hybrid": ("hf", HYBRID, True),
    "vllm hybrid": ("vllm", HYBRID, True),
    "vllm colocated": ("vllm", APART, True),
    "vllm separated": ("vllm", APART, False),
}


def build_model(quickstart: Path) -> None:
    """Write a model of the quick start's size with its tokenizer, heads of 32 and large weights.

    vLLM's CPU attention has no heads of 24. Large weights make the next token depend on the tokens before it.
    """
    config = Qwen2Config.from_pretrained(quickstart)
    shape = {
        "hidden_size": 96,
        "intermediate_size": 256,
        "num_attention_heads": 3,
        "num_key_value_heads": 3,
        "initializer_range": 0.1,
    }
    for key, value in shape.items():
        setattr(config, key, value)
    torch.manual_seed(0)
    Qwen2ForCausalLM(config).save_pretrained(quickstart)


def prompts_of(num_rows: int, vocab_size: int) -> DataProto:
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(3, vocab_size, (num_rows, PROMPT), generator=draw)
    mask = (torch.arange(PROMPT) >= torch.randint(0, PROMPT // 2, (num_rows, 1), generator=draw)).long()
    columns = {
        "attention_mask": mask,
        "position_ids": (mask.cumsum(-1) - 1).clamp(min=0),
        "seeds": torch.arange(num_rows) + 7,
    }
    return DataProto.from_dict(tensors={"input_ids": ids * mask} | columns)


def config_of(model: Path, folder: Path, *, engine: str, response: int, samples: int, greedy: bool) -> PPOConfig:
    values = {
        "algorithm.adv_estimator": "grpo",
        "data.train_files": folder / "data/train.parquet",
        "data.max_prompt_length": PROMPT,
        "data.max_response_length": response,
        "actor_rollout_ref.model.path": model,
        "actor_rollout_ref.rollout.name": engine,
        "actor_rollout_ref.rollout.n": samples,
        "actor_rollout_ref.rollout.top_k": 1 if greedy else -1,
        "actor_rollout_ref.rollout.dtype": "float32",
        "actor_rollout_ref.rollout.kv_cache_memory_mb": 16,
        "actor_rollout_ref.rollout.max_num_seqs": 64,
        "trainer.num_threads": 1,
    }
    words = [f"{key}={value}" for key, value in values.items()]
    return load_config(PPOConfig, words, program="rollout_parity", config_name="ppo_trainer")


def generated(config: PPOConfig, prompts: DataProto, *, roles: tuple[str, ...], one_pool: bool) -> DataProto:
    """Start these roles, push the actor's weights, and return generated rows with the trainer's log-probs."""
    count = 1 if one_pool else len(roles)
    pools = [
        RayResourcePool([1], use_gpu=False, name_prefix=f"parity-{index}", max_colocate_count=len(roles))
        for index in range(count)
    ]
    groups = {}
    try:
        for index, role in enumerate(roles):
            pool = pools[0 if one_pool else index]
            groups[role] = RayWorkerGroup(pool, RayClassWithInitArgs(ActorRolloutRefWorker, config, role), role=role)
            groups[role].init_model(1)
        policy = PolicyWorkers(groups, sleep=one_pool)
        pipeline = RolloutPipeline(policy, config)
        pipeline.push_weights(1)
        policy.sleep_rollout()
        batch = pipeline.generate(prompts)
        return batch.union(policy.actor.compute_log_prob(batch))
    finally:
        for group in groups.values():
            group.shutdown()
        for pool in pools:
            pool.release()


def difference(batch: DataProto, other: torch.Tensor) -> float:
    mask = batch.batch["response_mask"].bool()
    return (batch.batch["rollout_log_probs"] - other)[mask].abs().max().item()


def same_tokens(batch: DataProto, reference: DataProto) -> bool:
    return all(torch.equal(batch.batch[name], reference.batch[name]) for name in ("responses", "response_mask"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--samples", type=int, default=4, help="of each prompt, when sampling; 2 or more")
    parser.add_argument("--response", type=int, default=24, help="most new tokens of a response")
    parser.add_argument("--seeded", action="store_true", help="sample with seeds, too")
    arguments = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    passed, reference = True, {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepare(folder)
        build_model(folder / "model")
        prompts = prompts_of(arguments.prompts, Qwen2Config.from_pretrained(folder / "model").vocab_size)
        ray.init(address="local", num_cpus=4, include_dashboard=False, log_to_driver=False)
        print(
            f"{'rollout':<16}{'draws':>9}{'tokens':>8}{'same as hf':>12}{'log-probs to hf':>17}{'to the trainer':>16}",
            flush=True,
        )
        for row, (engine, roles, one_pool) in ROWS.items():
            for greedy in (True, False)[: 1 + arguments.seeded]:
                sizes = {"response": arguments.response, "samples": 2 if greedy else arguments.samples}
                config = config_of(folder / "model", folder, engine=engine, greedy=greedy, **sizes)
                batch = generated(config, prompts, roles=roles, one_pool=one_pool)
                expected = reference.setdefault(greedy, batch)
                same, count = same_tokens(batch, expected), int(batch.batch["response_mask"].sum())
                to_hf = difference(batch, expected.batch["rollout_log_probs"]) if same else float("nan")
                to_trainer = difference(batch, batch.batch["old_log_probs"])
                passed &= to_trainer < TARGET and (to_hf < TARGET if same else not greedy)
                draws, verdict = "greedy" if greedy else "seeded", "yes" if same else "no"
                print(f"{row:<16}{draws:>9}{count:>8}{verdict:>12}{to_hf:>17.1e}{to_trainer:>16.1e}", flush=True)
        ray.shutdown()
    sys.exit(0 if passed else 1)


if __name__ == "__main__":
    main()
