"""`hybridrl export`: the policy of a checkpoint as Hugging Face files. Other commands read checkpoints by it, too."""

import argparse
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

from hybridrl.config import model_folder
from hybridrl.driver.terminal import show
from hybridrl.errors import CheckpointError
from hybridrl.single_controller.local_worker_group import LocalWorkerGroup
from hybridrl.single_controller.worker_group import ClassWithInitArgs
from hybridrl.trainer.checkpoint.export_settings import settings_for_export
from hybridrl.trainer.checkpoint.reading import verify_manifest
from hybridrl.trainer.checkpoint.store import MANIFEST, CheckpointStore
from hybridrl.workers.actor_rollout_ref import ActorRolloutRefWorker
from hybridrl.workers.engine.export import check_new_directory


def export(arguments: argparse.Namespace) -> None:
    """Run `hybridrl export`."""
    export_checkpoint(
        arguments.checkpoint,
        arguments.directory,
        adapter=arguments.adapter,
        trust_remote_code=arguments.trust_remote_code,
    )


def export_checkpoint(
    checkpoint: str, directory: str, *, adapter: bool = False, trust_remote_code: bool = False
) -> None:
    """Write the policy of a PPO checkpoint of any world size as a Hugging Face model.

    Args:
        checkpoint: A `global_step_N` directory.
        directory: Where the model goes.
        adapter: Write its LoRA adapters alone, in peft's format.
        trust_remote_code: Run Python code that comes with the model or that the checkpoint's settings name.

    Raises:
        CheckpointError: There is no complete PPO checkpoint.
        ConfigError: `directory` cannot be written, or is not new or empty; or there is code that is not trusted.
    """
    check_new_directory(directory)
    _check_is_ppo_checkpoint(checkpoint)
    verify_manifest(checkpoint)
    settings = settings_for_export(checkpoint, trust_remote_code=trust_remote_code)
    group = LocalWorkerGroup(None, ClassWithInitArgs(ActorRolloutRefWorker, settings, "actor"), role="actor")
    group.calls.init_model(1)
    group.calls.load_checkpoint(os.path.join(checkpoint, "actor"))
    (group.calls.export_adapter if adapter else group.calls.export_hf)(directory)
    show(f"exported {checkpoint} to {directory}\n")


def _check_is_ppo_checkpoint(path: str) -> None:
    """Raise CheckpointError that names the nearest checkpoint unless `path` is one of PPO."""
    if not os.path.isfile(os.path.join(path, MANIFEST)):
        raise CheckpointError(f"{path} is not a checkpoint; {_nearest_checkpoint(path)}")
    if os.path.isdir(os.path.join(path, "huggingface")):
        raise CheckpointError(
            f"{path} is of supervised fine-tuning, which exports with every checkpoint: use {path}/huggingface"
        )
    if not os.path.isdir(os.path.join(path, "actor")):
        raise CheckpointError(f"{path} has no actor/, the policy of a PPO run; give another global_step_N")


def _nearest_checkpoint(path: str) -> str:
    for run in (path, os.path.dirname(os.path.abspath(path))):
        if newest := CheckpointStore(run).latest():
            return f"the newest in {run} is {newest}"
    return "give the global_step_N directory of a run with trainer.save_freq above 0"


@contextmanager
def model_directory(path: str, *, trust_remote_code: bool) -> Iterator[str]:
    """Yield a model's directory or name.

    For a GGUF file that is its conversion, and for a checkpoint its policy as Hugging Face files while the block runs.
    """
    if os.path.isfile(os.path.join(path, MANIFEST)) and os.path.isdir(os.path.join(path, "huggingface")):
        yield os.path.join(path, "huggingface")
    elif os.path.isfile(os.path.join(path, MANIFEST)):
        with tempfile.TemporaryDirectory(prefix="hybridrl-serve-") as folder:
            export_checkpoint(path, os.path.join(folder, "policy"), trust_remote_code=trust_remote_code)
            yield os.path.join(folder, "policy")
    else:
        yield model_folder(path, key="MODEL")
