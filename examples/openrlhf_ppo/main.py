"""PPO with six roles, in the manner of DLRover's OpenRLHF example: this file describes the job and submits it.

    python -m examples.openrlhf_ppo.main               # learns to repeat digits: score 0.1 to over 0.8 in 60 steps
    python -m examples.openrlhf_ppo.main --dry-run     # prints the job and where its processes would run
    python -m examples.openrlhf_ppo.main               # the same command again resumes from the last commit

Run it from the root of the repository. It needs two cores and about 5 GB of memory, no GPU, no data and no weights.
"""

import argparse
import sys
from pathlib import Path

from hybridrl.driver.program import run_program
from hybridrl.master.jobs.builder import Job
from hybridrl.sdk import RLJobBuilder, RLRoleType

P = "examples.openrlhf_ppo"
ROOT = str(Path(__file__).resolve().parents[2])


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--job_name", default="openrlhf-ppo")
    add("--dry-run", action="store_true", help="print the job and its plan, and start nothing")
    add("--save_path", default="outputs/openrlhf_ppo", help="directory of the checkpoints (default: %(default)s)")
    add("--journal", help="directory of the master's journal")
    add("--num_steps", type=int, default=60)
    add("--rollout_batch_size", type=int, default=256, help="responses per step (default: %(default)s)")
    add("--train_batch_size", type=int, default=32, help="rows per optimizer step (default: %(default)s)")
    add("--max_epochs", type=int, default=2, help="passes over the rows of a step (default: %(default)s)")
    add("--prompt_len", type=int, default=4, help="digits of a prompt, and of its answer (default: %(default)s)")
    add("--hidden_size", type=int, default=64)
    add("--actor_learning_rate", type=float, default=2e-3)
    add("--critic_learning_rate", type=float, default=2e-3)
    add("--init_kl_coef", type=float, default=1e-3, help="0: a job without the role reference")
    add("--gamma", type=float, default=1.0)
    add("--lambd", type=float, default=0.5)
    add("--eps_clip_low", type=float, default=0.2)
    add("--eps_clip_high", type=float, default=0.28)
    add("--value_clip", type=float, default=0.5)
    add("--seed", type=int, default=1)
    add("--actor_num_nodes", type=int, default=1)
    add("--actor_num_procs_per_node", type=int, default=2)
    add("--rollout", default="hf", help="generation engine: hf or vllm (default: %(default)s)")
    add("--vllm_num_engines", type=int, default=1)
    add("--vllm_enable_sleep", action=argparse.BooleanOptionalAction, default=True)
    add("--weight_transport", default="object_store", help="object_store, shared_memory, broadcast or auto")
    args = parser.parse_args(argv)
    args.save_path = str(Path(args.save_path).resolve())
    return args


def build(args: argparse.Namespace | None = None) -> Job:
    """Return the job. `hybridrl job submit` calls it without arguments."""
    args = args or parse_args([])
    builder = RLJobBuilder().device_type("CPU").config(vars(args)).global_env({"OMP_NUM_THREADS": "1"})
    builder.trainer(f"{P}.ppo_trainer.PPOTrainerActor").resource(cpu=0.25)
    (
        builder.actor(f"{P}.ppo_actor.PolicyModelActor")
        .resource(cpu=0.25)
        .nnodes(args.actor_num_nodes)
        .nproc_per_node(args.actor_num_procs_per_node)
    )
    builder.critic(f"{P}.ppo_critic.CriticModelRayActor").resource(cpu=0.25)
    builder.rollout(f"{P}.ppo_rollout.VLLMActor").resource(cpu=0.25).total(args.vllm_num_engines)
    if args.init_kl_coef != 0:
        builder.role(RLRoleType.REFERENCE.name).train(f"{P}.ppo_reference.PPOReferenceActor").resource(cpu=0.25)
    builder.role(RLRoleType.REWARD.name).train(f"{P}.ppo_reward.RewardModelRayActor").resource(cpu=0.25)
    builder.feeds("rollout", "actor").weights("actor", "rollout")
    return builder.build()


def submit(args: argparse.Namespace) -> int:
    """Print the job, and run it unless it is a dry run; return the exit code."""
    job = build(args)
    print(job.model_dump_json(indent=2))
    return job.submit(args.job_name, dry_run=args.dry_run, journal=args.journal)


if __name__ == "__main__":
    sys.path.insert(0, ROOT)
    sys.exit(run_program(lambda: submit(parse_args())))
