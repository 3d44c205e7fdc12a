"""PPO with a critic and GRPO on GSM8K with two FSDP ranks.

Each runs three steps; the same command then resumes it for two more. The model is the quick start's, untrained. This
shows that the whole path works on real data, not that anything is learnt.

    python benchmarks/gsm8k_two_ranks.py [--raw DIR]      DIR holds gsm8k_train.jsonl and gsm8k_test.jsonl
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

DEFAULT_RAW = Path(__file__).parents[2] / "shared" / "data"
ALGORITHMS = {
    "PPO with critic": ["algorithm.adv_estimator=gae", "critic.optim.lr=1e-4", "actor_rollout_ref.rollout.n=1"],
    "GRPO": [
        "algorithm.adv_estimator=grpo",
        "actor_rollout_ref.rollout.n=4",
        "actor_rollout_ref.actor.use_kl_loss=True",
    ],
}
SHOWN = (
    "critic/score/mean",
    "response_length/mean",
    "actor/entropy",
    "actor/grad_norm",
    "critic/vf_loss",
    "perf/throughput",
)


def python(*arguments: object) -> None:
    done = subprocess.run([sys.executable, "-m", *map(str, arguments)], capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(map(str, arguments[:1]))} failed:\n{done.stderr}")


def prepare(folder: Path, raw: Path) -> None:
    python("data_preprocess.gsm8k", "--data_source", raw, "--local_dir", folder / "gsm8k")
    python("data_preprocess.arithmetic", "--local_dir", folder / "words")
    python("examples.quickstart.build_model", "--data", folder / "words", "--out", folder / "model")


def train(folder: Path, name: str, *, steps: int) -> list[dict]:
    run = folder / name.replace(" ", "_")
    python(
        "hybridrl.main_ppo",
        *ALGORITHMS[name],
        f"data.train_files={folder}/gsm8k/train.parquet",
        f"data.val_files={folder}/gsm8k/test.parquet",
        "data.train_batch_size=16",
        "data.max_prompt_length=512",
        "data.filter_overlong_prompts=True",
        "data.max_response_length=64",
        "data.val_max_samples=32",
        f"actor_rollout_ref.model.path={folder}/model",
        "actor_rollout_ref.actor.ppo_mini_batch_size=8",
        "actor_rollout_ref.actor.use_dynamic_bsz=True",
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=4096",
        "actor_rollout_ref.rollout.name=hf",
        "trainer.n_gpus_per_node=2",
        "trainer.num_threads=1",
        f"trainer.total_training_steps={steps}",
        "trainer.save_freq=1",
        "trainer.logger=[jsonl]",
        f"trainer.default_local_dir={run}",
    )
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--raw", type=Path, default=DEFAULT_RAW)
    raw = parser.parse_args().raw
    if not (raw / "gsm8k_train.jsonl").exists():
        sys.exit(f"--raw {raw}: there is no gsm8k_train.jsonl; give a directory with GSM8K's two files")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepare(folder, raw)
        for algorithm in ALGORITHMS:
            train(folder, algorithm, steps=3)
            rows = train(folder, algorithm, steps=5)
            print(f"{algorithm}, 2 ranks, steps 1-3, then resumed for 4-5")
            for row in rows:
                if "perf/throughput" in row:
                    print(f"  step {row['step']}  " + "  ".join(f"{key} {row[key]:.4g}" for key in SHOWN if key in row))


if __name__ == "__main__":
    main()
