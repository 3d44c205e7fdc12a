"""The `hybridrl` command: what is done to a job's files from outside it.

hybridrl export CHECKPOINT DIRECTORY      a checkpoint's policy as Hugging Face safetensors, verified
"""

import argparse
import os
import sys
from collections.abc import Sequence

import yaml

from hybridrl.config import PPOConfig, from_dict
from hybridrl.errors import CheckpointError
from hybridrl.front_end import run_front_end, set_up_logging
from hybridrl.single_controller.local_worker_group import LocalWorkerGroup
from hybridrl.single_controller.worker_group import ClassWithInitArgs
from hybridrl.trainer.checkpoint import CONFIG, verify
from hybridrl.workers.actor_rollout_ref import ActorRolloutRefWorker
from hybridrl.workers.export import check_new_directory


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command with these arguments (the command line's by default) and return its exit code."""
    parser = argparse.ArgumentParser(prog="hybridrl", description="Tools around hybridrl jobs.")
    commands = parser.add_subparsers(dest="command", required=True)
    export = commands.add_parser("export", help="write a checkpoint's policy as Hugging Face safetensors")
    export.add_argument("checkpoint", help="a global_step_N directory")
    export.add_argument("directory", help="where the model goes; it appears complete or not at all")
    arguments = parser.parse_args(argv)
    set_up_logging()
    return run_front_end(lambda: export_checkpoint(arguments.checkpoint, arguments.directory), log_directory=lambda: None)


def export_checkpoint(checkpoint: str, directory: str) -> None:
    """Write the policy of a PPO checkpoint, whatever world size it was trained with, as a Hugging Face model."""
    check_new_directory(directory)
    verify(checkpoint)
    if not os.path.isdir(os.path.join(checkpoint, "actor")):
        raise CheckpointError(f"{checkpoint} has no actor/ to export; SFT checkpoints hold their export in huggingface/ already")
    with open(os.path.join(checkpoint, CONFIG), encoding="utf-8") as f:
        config = from_dict(PPOConfig, yaml.safe_load(f))
    group = LocalWorkerGroup(None, ClassWithInitArgs(ActorRolloutRefWorker, config, "actor"), role="actor")
    group.init_model(1)
    group.load_checkpoint(os.path.join(checkpoint, "actor"))
    group.export_hf(directory)
    sys.stdout.write(f"exported {checkpoint} to {directory}\n")


if __name__ == "__main__":
    sys.exit(main())
