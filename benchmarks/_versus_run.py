"""One contender of `versus_trl.py`, in a process of its own: GRPO on the job in JOB, measured step by step.

    python benchmarks/_versus_run.py ours|shared|trl JOB OUT

JOB is a JSON file, see `versus_trl.Job.settings`. OUT gets one JSON line per step: `wall_s`, `cpu_s`, `reward`,
`tokens` (generated). All contenders train the same model on the same prompts with the same reward.
"""

import json
import os
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

ADAM = {"lr": 3e-4, "betas": (0.9, 0.95), "weight_decay": 0.01}
CLIP_LOW, CLIP_HIGH = 0.2, 0.28


class Clock:
    """Seconds of each step: of the wall, and of this process's CPU."""

    def __init__(self, out: Path):
        self._out, self._start = out, (0.0, 0.0)

    def start(self) -> None:
        self._start = time.perf_counter(), time.process_time()

    def stop(self, **more: float) -> None:
        wall, cpu = time.perf_counter() - self._start[0], time.process_time() - self._start[1]
        with self._out.open("a") as file:
            file.write(json.dumps({"wall_s": wall, "cpu_s": cpu, **more}) + "\n")


def run_ours(job: dict[str, Any], clock: Clock, *, shares_prefixes: bool = False) -> None:
    from hybridrl import main_ppo
    from hybridrl.trainer.ppo.trainer import RayPPOTrainer

    class Measured(RayPPOTrainer):
        def next_batch(self, ctx: Any) -> None:
            clock.start()
            super().next_batch(ctx)

        def log(self, ctx: Any) -> None:
            super().log(ctx)
            tokens = float(ctx.batch.batch["response_mask"].sum())
            clock.stop(reward=ctx.metrics["critic/score/mean"], tokens=tokens)

    with tempfile.TemporaryDirectory() as folder:
        settings = {
            "algorithm.adv_estimator": "grpo",
            "data.train_files": job["data"],
            "data.train_batch_size": job["prompts"],
            "data.max_prompt_length": job["prompt_tokens"],
            "data.max_response_length": job["response_tokens"],
            "data.seed": job["seed"],
            "actor_rollout_ref.model.path": job["model"],
            "actor_rollout_ref.actor.optim.lr": job.get("lr", ADAM["lr"]),
            "actor_rollout_ref.actor.optim.betas": json.dumps(ADAM["betas"]),
            "actor_rollout_ref.actor.optim.weight_decay": ADAM["weight_decay"],
            "actor_rollout_ref.actor.ppo_mini_batch_size": job["prompts"],
            "actor_rollout_ref.actor.ppo_max_token_len_per_gpu": 4096,
            "actor_rollout_ref.actor.use_prefix_grouper": shares_prefixes,
            "actor_rollout_ref.actor.clip_ratio_low": CLIP_LOW,
            "actor_rollout_ref.actor.clip_ratio_high": CLIP_HIGH,
            "actor_rollout_ref.actor.fsdp_config.dtype": job.get("dtype", "float32"),
            "actor_rollout_ref.rollout.name": job.get("rollout", "hf"),
            "actor_rollout_ref.rollout.kv_cache_memory_mb": 512,
            "actor_rollout_ref.rollout.dtype": job.get("dtype", "float32"),
            "actor_rollout_ref.rollout.n": job["n"],
            "trainer.backend": job.get("backend", "local"),
            "trainer.num_threads": job["threads"],
            "trainer.seed": job["seed"],
            "trainer.total_training_steps": job["steps"],
            "trainer.val_before_train": False,
            "trainer.test_freq": -1,
            "trainer.save_freq": -1,
            "trainer.logger": "[jsonl]",
            "trainer.default_local_dir": folder,
        }
        if main_ppo.main([f"{key}={value}" for key, value in settings.items()], trainer_cls=Measured):
            sys.exit("our run failed")


def run_trl(job: dict[str, Any], clock: Clock) -> None:
    import torch
    from datasets import Dataset
    from pyarrow.parquet import read_table
    from transformers import AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    from reward_score.gsm8k import compute_score

    torch.set_num_threads(job["threads"])
    scores: list[float] = []
    tokens: list[float] = []

    def reward(completions: list, ground_truth: list[str], **_: Any) -> list[float]:
        found = [
            float(compute_score(answer[0]["content"], truth))
            for answer, truth in zip(completions, ground_truth, strict=True)
        ]
        scores.append(sum(found) / len(found))
        tokens.append(float(sum(map(len, _["completion_ids"]))))
        return found

    class Steps(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            clock.start()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            clock.stop(reward=scores[-1], tokens=tokens[-1])

    rows = read_table(job["data"]).to_pylist()
    data = Dataset.from_list([{"prompt": r["prompt"], "ground_truth": r["reward_model"]["ground_truth"]} for r in rows])
    samples = job["prompts"] * job["n"]
    micro = min(samples, job["trl_micro_batch"])
    with tempfile.TemporaryDirectory() as folder:
        config = GRPOConfig(
            output_dir=folder,
            per_device_train_batch_size=micro,
            gradient_accumulation_steps=samples // micro,
            num_generations=job["n"],
            max_completion_length=job["response_tokens"],
            max_steps=job["steps"],
            learning_rate=job.get("lr", ADAM["lr"]),
            adam_beta1=ADAM["betas"][0],
            adam_beta2=ADAM["betas"][1],
            weight_decay=ADAM["weight_decay"],
            lr_scheduler_type="constant",
            max_grad_norm=1.0,
            epsilon=CLIP_LOW,
            epsilon_high=CLIP_HIGH,
            loss_type="dapo",
            beta=0.0,
            temperature=1.0,
            top_k=0,
            seed=job["seed"],
            use_cpu=True,
            bf16=job.get("dtype") == "bfloat16",  # weights stay float32, as ours and by TRL's default
            gradient_checkpointing=False,
            model_init_kwargs={"dtype": "float32"},
            logging_steps=10**6,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
        trainer = GRPOTrainer(
            job["model"],
            reward,
            args=config,
            train_dataset=data,
            processing_class=AutoTokenizer.from_pretrained(job["model"], padding_side="left"),
            callbacks=[Steps()],
        )
        trainer.train()


def main() -> None:
    who, job, out = sys.argv[1:]
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    sys.path.insert(0, str(Path(__file__).parents[1]))
    {"ours": run_ours, "shared": partial(run_ours, shares_prefixes=True), "trl": run_trl}[who](
        json.loads(Path(job).read_text()), Clock(Path(out))
    )


if __name__ == "__main__":
    main()
