"""Classical control with processes for the environment: PPO learns to balance CartPole. No text, no language model.

    pip install "hybridrl[control]"            # gymnasium
    python -m examples.control_task.main       # the mean return rises from about 20 to 500, the limit

Run it from the root of the repository. It needs two cores and no GPU. The trainer is a plain class, and the role
environment one with a name of its own: `RoleGroup` calls it from anywhere in the job.
"""

import argparse
import sys
from pathlib import Path

from hybridrl.driver.program import run_program
from hybridrl.master.jobs.builder import Job
from hybridrl.sdk import DLJobBuilder

P = "examples.control_task"
ROOT = str(Path(__file__).resolve().parents[2])


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--dry-run", action="store_true", help="print the job's plan, and start nothing")
    add("--num_steps", type=int, default=40)
    add("--num_episodes", type=int, default=16, help="episodes per step (default: %(default)s)")
    add("--num_epochs", type=int, default=10, help="optimizer steps per step (default: %(default)s)")
    add("--num_environments", type=int, default=2, help="processes that play (default: %(default)s)")
    add("--learning_rate", type=float, default=1e-2)
    add("--value_coef", type=float, default=0.01)
    add("--seed", type=int, default=1)
    return parser.parse_args(argv)


def build(args: argparse.Namespace | None = None) -> Job:
    """Return the job. `hybridrl job submit` calls it without arguments."""
    args = args or parse_args([])
    builder = DLJobBuilder().device_type("CPU").config(vars(args)).global_env({"OMP_NUM_THREADS": "1"})
    builder.trainer(f"{P}.trainer.Trainer").resource(cpu=0.5)
    environment = builder.role("environment").run(f"{P}.environment.EnvironmentWorker").resource(cpu=0.5)
    environment.total(args.num_environments).restart("process")  # they do not communicate with each other
    return builder.build()


if __name__ == "__main__":
    sys.path.insert(0, ROOT)
    args = parse_args()
    sys.exit(run_program(lambda: build(args).submit("control-task", dry_run=args.dry_run)))
