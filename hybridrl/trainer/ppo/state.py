"""Save and load the state of a `RayPPOTrainer` in a checkpoint directory.

Covers the driver's state (step, data cursor, KL controller, pending batches, replay buffer, step ledger) and asks the
workers for the engines' state. Runs in the driver. `checkpoint/saver.py` calls it and publishes the directory.
"""

import os
from typing import Any

from hybridrl.config import to_yaml
from hybridrl.trainer.checkpoint.compatibility import FINGERPRINT_KEY
from hybridrl.trainer.checkpoint.step_ledger import LEDGER
from hybridrl.trainer.checkpoint.store import check_engine_state, read_trainer_state, write_run_state
from hybridrl.trainer.ppo.rollout_pipeline import make_pipeline


def save_trainer(trainer: Any, directory: str) -> None:
    """Write the whole state of a `RayPPOTrainer` between two steps into `directory`.

    Raises:
        StorageError: The state cannot be written.
    """
    num_updates = {}
    for role, group in trainer.trained_groups().items():
        num_updates[role] = group.save_checkpoint(os.path.join(directory, role))
        check_engine_state(os.path.join(directory, role), num_ranks=group.world_size)
    state = {
        "global_steps": trainer.global_steps,
        "data": trainer.train_loader.state_dict(),
        "kl_ctrl": trainer.kl_ctrl.state_dict(),
        FINGERPRINT_KEY: trainer.identity,
        "ahead": trainer.pipeline.save(os.path.join(directory, "ahead")),
        "replay": trainer.replay_buffer.save(os.path.join(directory, "replay")),
        LEDGER: trainer.ledger.commit(num_updates),
    }
    write_run_state(directory, state, config_yaml=to_yaml(trainer.config))


def load_trainer(trainer: Any, path: str) -> None:
    """Set a trainer to the state of the checkpoint at `path`, whatever it has done since."""
    state = read_trainer_state(path)
    trainer.pipeline = make_pipeline(trainer.policy, trainer.config)
    num_updates = {
        role: group.load_checkpoint(os.path.join(path, role)) for role, group in trainer.trained_groups().items()
    }
    trainer.global_steps = state["global_steps"]
    trainer.train_loader.load_state_dict(state["data"])
    trainer.kl_ctrl.load_state_dict(state["kl_ctrl"])
    trainer.pipeline.load(os.path.join(path, "ahead"), state.get("ahead", []))
    trainer.replay_buffer.load(os.path.join(path, "replay"), state.get("replay", []))
    trainer.ledger.resume_from(state.get(LEDGER), path=path, step=trainer.global_steps, num_updates=num_updates)
    trainer.saver.committed = path
