"""Step snapshots: the state at the end of a step, held in memory for a restarted driver.

A supervised driver (`driver/lifecycle.py`) has its snapshots held in Ray's object store by a snapshot store, an actor
that outlives it. The next attempt loads the newest snapshot there, reattaches to the worker processes, and resumes at
the end of that step. Without a snapshot only the newest checkpoint is left: the job is then a new run on the cluster,
and the processes of the old one are killed.

Used by the trainers and by `StepRetry`, in the driver.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import cloudpickle

from hybridrl.config import PPOConfig
from hybridrl.config.schema.trainer import TrainerConfig
from hybridrl.driver.lifecycle import DriverLifecycle
from hybridrl.single_controller.monitoring.snapshot_store import (
    find_snapshot_store,
    load_snapshot,
    start_snapshot_store,
    store_snapshot,
)
from hybridrl.single_controller.processes.termination import kill_run
from hybridrl.trainer.checkpoint.store import CheckpointStore
from hybridrl.trainer.run.setup import run_directory

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class StepSnapshot:
    """State at the end of a step.

    Attributes:
        step: The completed step.
        engine_refs: Role -> one reference per rank to what `take_snapshot` returned.
        parts: State of the driver's own parts, see `run/state.py`.
        channel: Channel that weights were pushed over, see `PolicyGroups.weight_channel`.
    """

    step: int
    engine_refs: Mapping[str, list]
    parts: Mapping[str, Any]
    channel: Any = None


class ResumeState:
    """What a driver resumes from, and the store for its own snapshots.

    Args:
        run_name: Name of the run on the cluster.
        snapshot: Snapshot of the previous driver; None in a first attempt.
        store: Snapshot store of the run, None while there is none.
        is_supervised: Whether a supervisor restarts this driver, so that snapshots must outlive it.
    """

    def __init__(
        self, run_name: str, *, snapshot: StepSnapshot | None = None, store: Any = None, is_supervised: bool = False
    ):
        self.run_name, self.snapshot, self.is_supervised = run_name, snapshot, is_supervised
        self._store = store

    def pop_snapshot(self) -> StepSnapshot | None:
        """Return the snapshot to resume from and clear it. Later rollbacks use the newest checkpoint."""
        snapshot, self.snapshot = self.snapshot, None
        return snapshot

    def call_surviving(self, group: Any, method: str) -> Any:
        """Call a method on all ranks of a group; the results outlive a supervised driver."""
        if not self.is_supervised:
            return getattr(group, method).submit()
        import ray

        for _ in range(2):
            self._store = self._store or start_snapshot_store(self.run_name)
            try:
                return group.call_through_actor(self._store, method)
            except ray.exceptions.RayActorError:
                logger.warning(
                    "snapshot store of %s was lost; started a new one (no snapshot until the next step)", self.run_name
                )
                self._store = None
        raise RuntimeError(f"the snapshot store of {self.run_name} was lost twice in a row; resume from a checkpoint")

    def store(self, snapshot: StepSnapshot) -> None:
        """Store this snapshot for the next driver, if there is a supervisor."""
        if not self.is_supervised:
            return
        description = replace(snapshot, engine_refs={})
        parts = {role: list(references) for role, references in snapshot.engine_refs.items()}
        if not store_snapshot(self._store, cloudpickle.dumps(description), parts):
            logger.warning("snapshot store of %s was lost; the next step starts a new one", self.run_name)
            self._store = None

    def drop(self) -> None:
        """End the snapshot store, and with it all snapshots."""
        if self._store is None:
            return
        import ray

        ray.kill(self._store, no_restart=True)
        self._store = None


def is_supervisable(config: TrainerConfig) -> bool:
    """Return whether a driver with these settings can be restarted.

    It needs a master, and snapshots on Ray.
    """
    return config.backend == "ray" and config.master and config.snapshot_freq > 0


def with_resume_overrides(config: PPOConfig, lifecycle: DriverLifecycle) -> PPOConfig:
    """Return the settings for this attempt: after a restart, resume from the run's own checkpoints."""
    trainer = config.trainer
    if lifecycle.attempt > 1 and CheckpointStore(run_directory(trainer)).latest() is not None:
        return replace(config, trainer=replace(trainer, resume_mode="auto", resume_from_path=None))
    return config


def load_resume_state(config: TrainerConfig, lifecycle: DriverLifecycle) -> ResumeState:
    """Return what earlier attempts of this driver have left. Needs a connection to Ray if the backend is Ray."""
    run_name = f"{config.experiment_name}-{lifecycle.run_id}"
    if not (lifecycle.is_supervised and config.backend == "ray"):
        return ResumeState(run_name)
    if lifecycle.attempt == 1:
        return ResumeState(run_name, is_supervised=True)
    store = find_snapshot_store(run_name)
    found = load_snapshot(store)
    if found is None:
        logger.warning("driver attempt %d: the previous driver left no snapshot; starting a new job", lifecycle.attempt)
        kill_run(run_name)
        return ResumeState(f"{run_name}.{lifecycle.attempt}", is_supervised=True)
    description, parts = found
    snapshot = replace(cloudpickle.loads(description), engine_refs=parts)
    if snapshot.channel is not None:
        # The previous driver may have died between send and receive: release the actor that still waits for a receiver.
        snapshot.channel.cancel("the driver was lost")
    return ResumeState(run_name, snapshot=snapshot, store=store, is_supervised=True)
