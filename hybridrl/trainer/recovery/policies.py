"""Reactions of a run to lost workers, by default none. A run without Ray has these defaults.

    RetryPolicy   runs a step once; `StepRetry` (`step_retry.py`) again after a lost worker
    RankPolicy    the number of ranks never changes; with `ElasticRanks` (`elastic.py`, `trainer.min_ranks`) it does
    ResumeState   nothing outlives the driver; with `SurvivingState` (`snapshots.py`) snapshots and workers do

Used by the trainers and by `main_ppo`, in the driver.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from hybridrl.config import PPOConfig
from hybridrl.config.schema.trainer import TrainerConfig
from hybridrl.driver.run_context import DriverLifecycle
from hybridrl.errors import HybridRLError
from hybridrl.framework.stage import StageFn
from hybridrl.trainer.checkpoint.store import CheckpointStore
from hybridrl.trainer.run.setup import run_directory

if TYPE_CHECKING:
    from hybridrl.single_controller.placement.plan import Plan


@dataclass(frozen=True)
class StepSnapshot:
    """State at the end of a step.

    Attributes:
        step: The completed step.
        engine_refs: Role -> one reference per rank to what `take_snapshot` returned.
        states: Those of the driver's own objects, see `run/state.py`.
        channel: Channel that weights were pushed over, see `RolloutPipeline.weight_channel`.
    """

    step: int
    engine_refs: Mapping[str, Any]
    states: Mapping[str, Any]
    channel: Any = None


class RetryPolicy:
    """Runs a step once: a lost worker ends the run.

    Attributes:
        snapshot: The newest complete one, None if there is none.
        pending: A newer one, which ranks still store.
    """

    snapshot: StepSnapshot | None = None
    pending: StepSnapshot | None = None

    def __call__(self, fn: StageFn) -> StageFn:
        """Return `fn` as a stage that changes no engine before its snapshot is complete."""
        return fn

    def run_with_retry(self, work: Callable[[], None]) -> None:
        """Run `work`, from the trainer's current step on."""
        work()

    def take_snapshot(self, *, force: bool = False) -> None:
        """Begin a snapshot if one is due. force: take one, and return when it is complete."""

    def resume(self, snapshot: StepSnapshot) -> None:
        """Bring all roles to the step of a previous driver's snapshot."""
        raise NotImplementedError

    def is_first_completion(self, step: int) -> bool:
        """Return whether this step completes for the first time."""
        return True

    def metrics(self) -> dict[str, float]:
        """Return what snapshots and recoveries took."""
        return {}


class RankPolicy:
    """The number of ranks of a run: it never changes.

    Attributes:
        grows: Whether training returns because missing ranks are taken back.
    """

    grows = False

    def plan(self, make_plan: "Callable[[], Plan]", *, job: str, reattach: bool) -> "Plan":
        """Return the placement to start.

        Args:
            make_plan: Makes a plan for the present sizes of the pools.
            job: Prefix of the names of reservations.
            reattach: Whether the processes of a previous driver are adopted, as many as it had.
        """
        return make_plan()

    def request_missing(self) -> None:
        """Request what the placement leaves out. Called when all processes run."""

    def run(self, train: Callable[[], None]) -> None:
        """Train, with another number of ranks again if that changes."""
        train()

    def can_grow(self) -> bool:
        """Return whether there are nodes for missing ranks now."""
        return False

    def on_step(self) -> None:
        """Note that a step is complete."""

    def metrics(self) -> dict[str, float]:
        """Return the number of ranks of each role, if it can change."""
        return {}

    def stop(self) -> None:
        """Withdraw the request for missing ranks. Safe to call twice."""


class ResumeState:
    """What a driver resumes from: nothing outlives it.

    Args:
        run_name: Name of the run on the cluster.
        snapshot: Snapshot of the previous driver; None in a first attempt.
    """

    outlives_driver = False  # whether a supervisor restarts this driver, so that snapshots and workers must

    def __init__(self, run_name: str, *, snapshot: StepSnapshot | None = None):
        self.run_name, self.snapshot = run_name, snapshot

    def pop_snapshot(self) -> StepSnapshot | None:
        """Return the snapshot to resume from and clear it.

        Later rollbacks use the newest checkpoint.
        """
        snapshot, self.snapshot = self.snapshot, None
        return snapshot

    def submit_surviving(self, groups: Mapping[str, Any], method: str) -> dict[str, Any]:
        """Call a method on all ranks of the groups, and return references to the results.

        Every rank stores its result in the object store. The results outlive the driver if it is restarted.
        """
        return {role: getattr(group, method).submit() for role, group in groups.items()}

    def call_surviving(
        self, groups: Mapping[str, Any], method: str, *, started: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Return such references when every rank has stored its result.

        Args:
            started: What `submit_surviving` returned. None: call the method now.
        """
        return wait_for_parts(self.submit_surviving(groups, method) if started is None else started)

    def store(self, snapshot: StepSnapshot) -> None:
        """Keep this snapshot for a next driver; its ranks may still store their parts."""

    def drop_older(self) -> None:
        """Drop the snapshot before the newest one for the next driver: the newest is complete."""

    def drop(self) -> None:
        """Drop all stored snapshots."""


def wait_for_parts(results: dict[str, Any]) -> dict[str, Any]:
    """Wait for the sizes of all results, which are small; the results stay in the object store."""
    for parts in results.values():
        parts.fetch(parts.sizes or [])
    return results


def are_stored(results: Mapping[str, Any], *, timeout_s: float) -> bool:
    """Return whether all results are in the object store, or are within this time."""
    import ray

    try:
        for parts in results.values():
            replace(parts.fetch, timeout_s=timeout_s)(parts.sizes or [])
    except (HybridRLError, ray.exceptions.RayError):
        return False
    return True


def is_supervisable(config: TrainerConfig) -> bool:
    """Return whether a driver with these settings can be restarted: it needs a master, and snapshots on Ray."""
    return config.backend == "ray" and config.master and config.snapshot_freq > 0


def with_resume_overrides(config: PPOConfig, lifecycle: DriverLifecycle) -> PPOConfig:
    """Return the settings for this attempt: after a restart, resume from the run's own checkpoints."""
    trainer = config.trainer
    if lifecycle.attempt > 1 and CheckpointStore(run_directory(trainer)).latest() is not None:
        return replace(config, trainer=replace(trainer, resume_mode="auto", resume_from_path=None))
    return config
