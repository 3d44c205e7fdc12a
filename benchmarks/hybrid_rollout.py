"""Gain of `trainer.hybrid_rollout` where generation is the bottleneck: `python benchmarks/hybrid_rollout.py`.

A GRPO run with lag 1, one trainer process and one rollout process, one thread each: two cores. Responses are long and
have lengths of their own, and a step trains on a quarter of its samples (`algorithm.select_samples.k`). So the trainer
waits for responses. Runs without and with the setting alternate. All begin with the same weights and train on the same
tokens.

Printed per run, as median and quartiles over its steps: seconds of a step, CPU seconds of the rollout's process,
seconds of the trainer's wait, and the share of tokens that the trainer's process generated. The rollout's process works
all the time, so its CPU seconds are those of a step on two idle cores; other programs change them less than seconds.
At the end: medians over all steps, and whether the policies are equal, bit for bit.
"""

import argparse
import contextlib
import os
import shutil
import statistics
import sys
import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file
from step_time import prepare
from transformers import Qwen2Config, Qwen2ForCausalLM

from hybridrl import main_ppo
from hybridrl.cli import export_checkpoint
from hybridrl.system.process_stat import read_process_stat
from hybridrl.trainer.ppo.trainer import RayPPOTrainer
from hybridrl.trainer.run.middleware import BatchContext
from hybridrl.trainer.run.report import merge_steps
from hybridrl.trainer.run.tracking import read_metrics

SKIPPED_STEPS = 2  # the pipeline fills, and first calls allocate
PROMPTS, SAMPLES = 16, 8
SHAPE = {
    "hidden_size": 128,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "layer_types": ["full_attention"] * 4,
}
REWARD = """def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return sum(c.isdigit() for c in solution_str) / max(1, len(solution_str))
"""  # a random model has answers with more and with fewer digits, and none that is right
NAMES = {False: "without", True: "with"}


def build_model(quickstart: Path, out: Path) -> Path:
    """Write a Qwen2 of 1M parameters with random weights and the quick start's tokenizer."""
    shutil.copytree(quickstart, out)
    config = Qwen2Config.from_pretrained(quickstart)
    for key, value in SHAPE.items():
        setattr(config, key, value)
    torch.manual_seed(0)
    Qwen2ForCausalLM(config).save_pretrained(out)
    return out


class MeasuringTrainer(RayPPOTrainer):
    """Adds the CPU seconds of the rollout's process to the metrics of each step."""

    def next_batch(self, ctx: BatchContext) -> None:
        super().next_batch(ctx)
        ctx.metrics["cpu_s/rollout"] = -self._cpu_s()

    def log(self, ctx: BatchContext) -> None:
        ctx.metrics["cpu_s/rollout"] += self._cpu_s()
        super().log(ctx)

    def _cpu_s(self) -> float:
        [pid] = self.groups["rollout"].process_ids
        return read_process_stat(pid).cpu_s


def run(model: Path, folder: Path, *, hybrid: bool, steps: int, response: int) -> list[dict]:
    """Run it without output; return the metrics of its steps."""
    values = {
        "algorithm.adv_estimator": "grpo",
        "algorithm.select_samples.k": SAMPLES // 4,
        "data.train_files": folder.parent / "data/train.parquet",
        "custom_reward_function.path": folder.parent / "reward.py",
        "data.train_batch_size": PROMPTS,
        "data.max_prompt_length": 64,
        "data.max_response_length": response,
        "actor_rollout_ref.model.path": model,
        "actor_rollout_ref.actor.ppo_mini_batch_size": PROMPTS,
        "actor_rollout_ref.actor.optim.lr": 1e-4,
        "actor_rollout_ref.rollout.name": "hf",
        "actor_rollout_ref.rollout.n": SAMPLES,
        "actor_rollout_ref.rollout.mode": "async",
        "actor_rollout_ref.rollout.n_gpus_per_node": 1,
        "trainer.lag": 1,
        "trainer.hybrid_rollout": hybrid,
        "trainer.device": "cpu",
        "trainer.master": False,
        "trainer.num_threads": 1,
        "trainer.snapshot_freq": 0,  # a snapshot of every step would wait for responses outside the timed step
        "trainer.total_training_steps": steps,
        "trainer.save_freq": steps,
        "trainer.val_before_train": False,
        "trainer.logger": "[jsonl]",
        "trainer.default_local_dir": folder,
    }
    with open(os.devnull, "w") as null, contextlib.redirect_stdout(null):
        code = main_ppo.main([f"{key}={value}" for key, value in values.items()], trainer_cls=MeasuringTrainer)
    if code:
        sys.exit("the run failed")
    return merge_steps(read_metrics(folder / "metrics.jsonl"))


def policy(folder: Path, steps: int) -> dict[str, torch.Tensor]:
    with open(os.devnull, "w") as null, contextlib.redirect_stdout(null):
        export_checkpoint(str(folder / f"global_step_{steps}"), str(folder / "hf"))
    return load_file(folder / "hf/model.safetensors")


def spread(values: list[float]) -> str:
    low, middle, high = statistics.quantiles(values, n=4)
    return f"{middle:7.2f} ({low:.2f} to {high:.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--response", type=int, default=384, help="most tokens of a response")
    options = parser.parse_args()
    seconds: dict[bool, list[float]] = {False: [], True: []}
    cpu_s: dict[bool, list[float]] = {False: [], True: []}
    last: dict[bool, dict[str, torch.Tensor]] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepare(folder)
        model = build_model(folder / "model", folder / "own")
        (folder / "reward.py").write_text(REWARD)
        print(f"{'':<9}{'s/step':>24}{'rollout, CPU s':>24}{'wait, s':>24}{'share':>24}  load")
        for number in range(options.pairs):
            for hybrid in (False, True):
                out = folder / f"{number}_{hybrid}"
                rows = run(model, out, hybrid=hybrid, steps=options.steps, response=options.response)[SKIPPED_STEPS:]
                steps, cpu = [row["timing_s/step"] for row in rows], [row["cpu_s/rollout"] for row in rows]
                seconds[hybrid], cpu_s[hybrid] = seconds[hybrid] + steps, cpu_s[hybrid] + cpu
                waits = [row.get("async/wait_s", row["timing_s/gen"]) for row in rows]
                shares = [row.get("async/hybrid_token_share", 0.0) for row in rows]
                cells = "".join(f"{spread(values):>24}" for values in (steps, cpu, waits, shares))
                print(f"{NAMES[hybrid]:<9}{cells}  {os.getloadavg()[0]:.0f}", flush=True)
                last[hybrid] = policy(out, options.steps)
    same = all(torch.equal(tensor, last[True][key]) for key, tensor in last[False].items())
    for what, values in {"seconds": seconds, "CPU seconds of the rollout": cpu_s}.items():
        without, lent = (statistics.median(values[hybrid]) for hybrid in (False, True))
        print(f"{what}, median of all steps: {without:.2f} without, {lent:.2f} with, factor {without / lent:.2f}")
    print(f"policies after the last step are {'equal' if same else 'DIFFERENT'}")


if __name__ == "__main__":
    main()
