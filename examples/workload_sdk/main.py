"""GRPO in the style of DLRover's first generation: BaseTrainer, BaseWorkload, trainer_invocation and RG_<ROLE>.

    python -m examples.workload_sdk.main       # learns to sort digits: score 0.1 to over 0.9 in 60 steps

Run it from the root of the repository. It needs two cores and no GPU.
"""

import argparse
import sys
from pathlib import Path

from hybridrl.driver.program import run_program
from hybridrl.master.jobs.builder import Job
from hybridrl.sdk import RLJobBuilder

P = "examples.workload_sdk"
ROOT = str(Path(__file__).resolve().parents[2])


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--dry-run", action="store_true", help="print the job's plan, and start nothing")
    add("--num_steps", type=int, default=60)
    add("--num_prompts", type=int, default=64, help="prompts per step (default: %(default)s)")
    add("--samples_per_prompt", type=int, default=16)
    add("--prompt_len", type=int, default=3, help="digits of a prompt, and of its answer (default: %(default)s)")
    add("--num_epochs", type=int, default=4, help="optimizer steps per step (default: %(default)s)")
    add("--learning_rate", type=float, default=5e-3)
    add("--seed", type=int, default=1)
    return parser.parse_args(argv)


def build(args: argparse.Namespace | None = None) -> Job:
    """Return the job. `hybridrl job submit` calls it without arguments."""
    args = args or parse_args([])
    return (
        RLJobBuilder()
        .device_type("CPU")
        .config(vars(args))
        .global_env({"OMP_NUM_THREADS": "1"})
        .trainer(f"{P}.trainer.GRPOTrainer")
        .resource(cpu=0.25)
        .actor(f"{P}.workloads.Actor")
        .total(2)
        .resource(cpu=0.25)
        .rollout(f"{P}.workloads.Rollout")
        .total(2)
        .resource(cpu=0.25)
        .reward(f"{P}.workloads.Reward")
        .resource(cpu=0.25)
        .build()
    )


if __name__ == "__main__":
    sys.path.insert(0, ROOT)
    args = parse_args()
    sys.exit(run_program(lambda: build(args).submit("workload-sdk", dry_run=args.dry_run)))
