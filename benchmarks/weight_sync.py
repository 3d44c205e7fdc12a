"""Cost of a weight push by each transport: seconds, bytes, GB/s, and its share of a GRPO step.

A push is all of it: cast, transport, loading into the rollout's engine (`hf`, float32), fingerprints at both ends and
their comparison. One actor process, one or more rollout processes on this machine. Transports run in turn, so that
other load affects all alike. Each turn opens its channel with one push and measures the next.

"adapters" are pushes of weight_sync.lora=adapter, rank 16 on all linear layers: A and B are sent, and the weights that
they change are loaded. GB/s counts the bytes sent. A step is that of a short GRPO run of the first model (32 prompts, 8
samples each), with this push's median in place of its own. The last line per model is the fastest transport between
processes, of those that `auto` can choose on one machine.

    python benchmarks/weight_sync.py [--models 4M 50M] [--receivers 1] [--rounds 5] [--steps 3] [--bucket_mb 64]
"""

import argparse
import contextlib
import os
import shutil
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import ray
from step_time import prepare
from transformers import Qwen2Config, Qwen2ForCausalLM

from hybridrl import main_ppo
from hybridrl.config import PPOConfig, load_config
from hybridrl.single_controller.placement.resource_pool import RayResourcePool
from hybridrl.single_controller.ray_worker_group import RayClassWithInitArgs, RayWorkerGroup
from hybridrl.trainer.ppo.policy.policy_workers import PolicyWorkers
from hybridrl.trainer.ppo.policy.rollout_pipeline import RolloutPipeline
from hybridrl.trainer.run.report import merge_steps
from hybridrl.trainer.run.tracking import read_metrics
from hybridrl.workers.actor_rollout_ref import ActorRolloutRefWorker

CHOICES = ("object_store", "shared_memory", "broadcast")
TRANSPORTS = ("in_process", "object_store", "shared_memory", "broadcast", "disk")
# Parameters in millions -> width, feed-forward width, layers. The vocabulary is the quick start's.
SIZES = {"4M": (256, 688, 5), "50M": (640, 1720, 10)}
SKIPPED_STEPS = 1
RANK = 16


def build_model(name: str, quickstart: Path, out: Path) -> Path:
    """Write a Qwen2 of this size with random weights and the quick start's tokenizer."""
    width, inner, layers = SIZES[name]
    shutil.copytree(quickstart, out)
    config = Qwen2Config.from_pretrained(quickstart)
    shape = {
        "hidden_size": width,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "layer_types": ["full_attention"] * layers,
    }
    for key, value in (shape | {"num_attention_heads": width // 64, "num_key_value_heads": width // 64}).items():
        setattr(config, key, value)
    Qwen2ForCausalLM(config).save_pretrained(out)
    return out


def words(model: Path, folder: Path, **more: object) -> list[str]:
    values = {
        "algorithm.adv_estimator": "grpo",
        "data.train_files": folder / "data/train.parquet",
        "data.train_batch_size": 32,
        "data.max_prompt_length": 64,
        "data.max_response_length": 26,
        "actor_rollout_ref.model.path": model,
        "actor_rollout_ref.actor.ppo_mini_batch_size": 32,
        "actor_rollout_ref.rollout.name": "hf",
        "actor_rollout_ref.rollout.n": 8,
        "trainer.num_threads": 1,
        "trainer.resume_mode": "disable",
    }
    return [f"{key}={value}" for key, value in (values | more).items()]


@contextlib.contextmanager
def worker_groups(config: PPOConfig, *, receivers: int):
    """Start a hybrid policy, an actor, and rollouts, by role, for the length of a block."""
    groups, pools = {}, []
    try:
        for role, size in {"actor_rollout": 1, "actor": 1, "rollout": receivers}.items():
            pools.append(RayResourcePool([size], use_gpu=False, name_prefix=f"bench-{role}"))
            groups[role] = RayWorkerGroup(
                pools[-1], RayClassWithInitArgs(ActorRolloutRefWorker, config, role), role=role
            )
            groups[role].init_model(1)
        yield groups
    finally:
        for group in groups.values():
            group.shutdown()
        for pool in pools:
            pool.release()


def pushes(config: PPOConfig, *, receivers: int, rounds: int) -> dict[str, tuple[int, list[float]]]:
    """Return per transport the bytes of a push (0 inside one process) and the seconds of one push per round."""
    took: dict[str, list[float]] = {transport: [] for transport in TRANSPORTS}
    num_bytes = dict.fromkeys(TRANSPORTS, 0)
    with worker_groups(config, receivers=receivers) as groups:
        for number in range(rounds):
            for transport in TRANSPORTS:
                roles = ["actor_rollout"] if transport == "in_process" else ["actor", "rollout"]
                policy = PolicyWorkers({role: groups[role] for role in roles})
                pipeline = RolloutPipeline(policy, with_transport(config, transport))
                pipeline.push_weights(2 * number)
                start = time.perf_counter()
                push = pipeline.push_weights(2 * number + 1)
                took[transport].append(time.perf_counter() - start)
                if push.sent:
                    num_bytes[transport] = policy.actor.fetch(push.sent)[0].num_bytes
    return {transport: (num_bytes[transport], took[transport]) for transport in TRANSPORTS}


def with_transport(config: PPOConfig, transport: str) -> PPOConfig:
    policy = config.actor_rollout_ref
    weight_sync = replace(policy.rollout.weight_sync, transport=transport)
    return replace(config, actor_rollout_ref=replace(policy, rollout=replace(policy.rollout, weight_sync=weight_sync)))


def step_without_push(model: Path, folder: Path, *, steps: int) -> float:
    """Return the seconds of a GRPO step of this model without its push."""
    out = folder / "run"
    run = {
        "trainer.total_training_steps": steps + SKIPPED_STEPS,
        "trainer.logger": "[jsonl]",
        "trainer.default_local_dir": out,
    }
    with open(os.devnull, "w") as null, contextlib.redirect_stdout(null):
        if main_ppo.main(words(model, folder, **run)):
            sys.exit("the run failed")
    rows = merge_steps(read_metrics(out / "metrics.jsonl"))[SKIPPED_STEPS:]
    return statistics.median(row["timing_s/step"] - row["timing_s/update_weights"] for row in rows)


def print_rows(model: str, what: str, found: dict[str, tuple[int, list[float]]], step_s: float | None) -> None:
    """Print one row per transport. step_s: seconds of a step without its push."""
    for transport, (num_bytes, took) in found.items():
        median = statistics.median(took)
        share = "" if step_s is None else f"{median / (step_s + median):.1%}"
        traffic = f"{num_bytes / 1e6:8.2f} {num_bytes / 1e9 / median:6.2f}" if num_bytes else f"{'-':>8} {'-':>6}"
        print(f"{model:>5} {what:>9} {transport:>14} {median:9.3f} {min(took):7.3f} {traffic} {share:>10}", flush=True)


def config_of(model: Path, folder: Path, *, bucket_mb: int, adapters: bool) -> PPOConfig:
    sync = {"transport": "disk", "directory": folder / "weights", "bucket_mb": bucket_mb}
    given: dict[str, object] = {f"actor_rollout_ref.rollout.weight_sync.{key}": value for key, value in sync.items()}
    if adapters:
        given |= {"actor_rollout_ref.model.lora_rank": RANK, "actor_rollout_ref.rollout.weight_sync.lora": "adapter"}
    return load_config(PPOConfig, words(model, folder, **given), program="weight_sync", config_name="ppo_trainer")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=SIZES, default=list(SIZES), help="by size")
    parser.add_argument("--receivers", type=int, default=1, help="rollout processes")
    parser.add_argument("--rounds", type=int, default=5, help="measured pushes of each kind")
    parser.add_argument(
        "--steps", type=int, default=3, help="measured GRPO steps of the first model; 0 leaves the share out"
    )
    parser.add_argument("--bucket_mb", type=int, default=64, help="actor_rollout_ref.rollout.weight_sync.bucket_mb")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepare(folder)
        ray.init(address="local", num_cpus=3 + arguments.receivers, include_dashboard=False, log_to_driver=False)
        print(f"{arguments.receivers} receiver(s), buckets of {arguments.bucket_mb} MB, {arguments.rounds} pushes each")
        columns = {
            "model": 5,
            "pushed": 9,
            "transport": 14,
            "median s": 9,
            "best s": 7,
            "MB": 8,
            "GB/s": 6,
            "of a step": 10,
        }
        print(" ".join(f"{name:>{width}}" for name, width in columns.items()), flush=True)
        for index, size in enumerate(arguments.models):
            model = build_model(size, folder / "model", folder / size)
            step_s = step_without_push(model, folder, steps=arguments.steps) if index == 0 and arguments.steps else None
            for what in ("weights", "adapters"):
                config = config_of(model, folder, bucket_mb=arguments.bucket_mb, adapters=what == "adapters")
                found = pushes(config, receivers=arguments.receivers, rounds=arguments.rounds)
                print_rows(size, what, found, step_s)
                if what == "weights":
                    medians = {transport: statistics.median(found[transport][1]) for transport in CHOICES}
            print(f"{size:>5}: fastest of {', '.join(CHOICES)} is {min(medians, key=medians.__getitem__)}", flush=True)
    ray.shutdown()


if __name__ == "__main__":
    main()
