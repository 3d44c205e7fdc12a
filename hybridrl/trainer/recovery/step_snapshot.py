"""Step snapshots: the state at the end of a step, in memory, for retries.

A supervised driver can be restarted. Its snapshots outlive it, see `supervised_state.py`. Used by the trainers and by
`StepRetry`, in the driver.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from hybridrl.config import PPOConfig
from hybridrl.config.schema.trainer import TrainerConfig
from hybridrl.driver.lifecycle import DriverLifecycle
from hybridrl.trainer import recovery
from hybridrl.trainer.checkpoint.store import CheckpointStore
from hybridrl.trainer.run.setup import run_directory


@dataclass(frozen=True)
class StepSnapshot:
    """State at the end of a step.

    Attributes:
        step: The completed step.
        engine_refs: Role -> one reference per rank to what `take_snapshot` returned.
        parts: State of the driver's own parts, see `run/state.py`.
        channel: Channel that weights were pushed over, see `RolloutPipeline.weight_channel`.
    """

    step: int
    engine_refs: Mapping[str, list]
    parts: Mapping[str, Any]
    channel: Any = None


class ResumeState:
    """What a driver resumes from. Without a supervisor nothing outlives it.

    Args:
        run_name: Name of the run on the cluster.
        snapshot: Snapshot of the previous driver; None in a first attempt.
    """

    is_supervised = False  # whether a supervisor restarts this driver, so that snapshots must outlive it

    def __init__(self, run_name: str, *, snapshot: StepSnapshot | None = None):
        self.run_name, self.snapshot = run_name, snapshot

    def pop_snapshot(self) -> StepSnapshot | None:
        """Return the snapshot to resume from and clear it.

        Later rollbacks use the newest checkpoint.
        """
        snapshot, self.snapshot = self.snapshot, None
        return snapshot

    def call_surviving(self, groups: Mapping[str, Any], method: str) -> dict[str, Any]:
        """Call a method on all ranks of the groups, and wait for all.

        The results outlive a supervised driver.
        """
        return wait_for_parts({role: getattr(group, method).submit() for role, group in groups.items()})

    def store(self, snapshot: StepSnapshot) -> None:
        """Store this snapshot for the next driver, if there is a supervisor."""

    def drop(self) -> None:
        """Drop all stored snapshots."""


def wait_for_parts(results: dict[str, Any]) -> dict[str, Any]:
    """Wait until every rank has stored its part.

    The sizes are small, the parts stay in the object store.
    """
    for parts in results.values():
        parts.fetch(parts.sizes or [])
    return results


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
    """Return what earlier attempts of this driver have left.

    Needs a connection to Ray if the backend is Ray.
    """
    run_name = f"{config.experiment_name}-{lifecycle.run_id}"
    if not (lifecycle.is_supervised and config.backend == "ray"):
        return ResumeState(run_name)
    return recovery.load_supervised_state(run_name, lifecycle)
