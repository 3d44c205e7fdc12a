"""What of a PPO run is in a checkpoint, besides the engines' own state: the driver's part, and the way back from it."""

import os
from typing import Any

from hybridrl.config import to_yaml
from hybridrl.trainer.checkpoint.compatibility import IDENTITY
from hybridrl.trainer.checkpoint.step_ledger import LEDGER
from hybridrl.trainer.checkpoint.store import check_engine_state, read_trainer_state, write_run_state
from hybridrl.trainer.ppo.rollout_pipeline import make_pipeline


def write_checkpoint(trainer: Any, directory: str) -> None:
    """Write the whole state of a `RayPPOTrainer` between two steps into `directory`.

    Raises StorageError where that is not possible.
    """
    taken = {}
    for role, group in trainer.trained_groups().items():
        taken[role] = group.save_checkpoint(os.path.join(directory, role))
        check_engine_state(os.path.join(directory, role), num_ranks=group.world_size)
    state = {
        "global_steps": trainer.global_steps,
        "data": trainer.train_loader.state_dict(),
        "kl_ctrl": trainer.kl_ctrl.state_dict(),
        IDENTITY: trainer.identity,
        "ahead": trainer.pipeline.save(os.path.join(directory, "ahead")),
        "replay": trainer.replay_buffer.save(os.path.join(directory, "replay")),
        LEDGER: trainer.ledger.commit(taken),
    }
    write_run_state(directory, state, config_yaml=to_yaml(trainer.config))


def restore(trainer: Any, path: str) -> None:
    """Take a trainer, whatever it has done since, to where the one was that wrote the checkpoint at `path`."""
    state = read_trainer_state(path)
    trainer.pipeline = make_pipeline(trainer.policy, trainer.config)
    taken = {role: group.load_checkpoint(os.path.join(path, role)) for role, group in trainer.trained_groups().items()}
    trainer.global_steps = state["global_steps"]
    trainer.train_loader.load_state_dict(state["data"])
    trainer.kl_ctrl.load_state_dict(state["kl_ctrl"])
    trainer.pipeline.restore(os.path.join(path, "ahead"), state.get("ahead", []))
    trainer.replay_buffer.restore(os.path.join(path, "replay"), state.get("replay", []))
    trainer.ledger.go_on_from(state.get(LEDGER), path=path, step=trainer.global_steps, taken=taken)
    trainer.saver.committed = path
