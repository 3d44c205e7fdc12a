"""Retry a training step after a worker process was lost.

After each step (every `trainer.snapshot_freq` steps) all trained ranks store a snapshot of their state in Ray's object
store: parameters, optimizer, schedule, random generators. The driver stores its own (`StepSnapshot`). The object store
is a process of its own, so a snapshot survives the rank that made it. When a call raises `WorkerLost`, `StepRetry`

  1. kills and restarts all processes of the lost role,
  2. loads the snapshot into every trained role, also the healthy ones (they may have applied the update already),
  3. pushes the snapshot's weights to the rollout, and
  4. runs the step again with the same prompts and random numbers.

So every completed step was applied exactly once. `failure_policy.py` limits the losses and the call timeouts
(`trainer.call_timeout_s`) without a completed step; then the error is raised. Exceptions in user code are never
retried, because they would only repeat. A lost node takes the snapshots in its object store with it; then, and beyond
the limits, a new job resumes from the newest checkpoint.

Called by `Trainer`; runs in the driver. Every recovery is one line of `failures.jsonl` in the run directory.
"""

import json
import logging
import os
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from hybridrl import master
from hybridrl.driver.run_context import RunContext
from hybridrl.errors import CallTimeout, WorkerLost
from hybridrl.failure_policy import Budgets, Decision, Failure, FailureKind, Refill
from hybridrl.single_controller.monitoring.process import PartTimes, report_decision
from hybridrl.trainer.recovery.step_snapshot import ResumeState, StepSnapshot
from hybridrl.trainer.run.state import Parts, load_from_memory, parts_in_memory

logger = logging.getLogger(__name__)
FILE = "failures.jsonl"


class Recoverable(Protocol):
    """What the retry of steps requires of a trainer.

    Attributes:
        global_steps: The step in progress, or the last completed one.
        groups: Role -> worker group.
        context: The run's; its supervisor is informed of completed steps.
    """

    context: RunContext
    global_steps: int
    groups: dict[str, Any]

    @property
    def parts(self) -> Parts:
        """The driver's own state."""

    @property
    def weight_channel(self) -> Any:
        """Channel that weights are pushed over, for the next driver; None without one."""

    def trained_groups(self) -> Mapping[str, Any]:
        """Return the groups whose state is in a snapshot, by name."""

    def init_role(self, role: str) -> None:
        """Load this role's model into its newly started processes."""

    def disconnect(self, reason: str) -> None:
        """Stop what depends on processes that are about to be replaced. Safe to call twice."""

    def reconnect(self) -> None:
        """Bring roles without a snapshot to the restored step; raises WorkerLost if another worker is lost."""


class StepRetry:
    """Snapshots of a run's steps, and the recovery of lost workers from them.

    Args:
        trainer: The trainer whose steps are run.
        resume_state: Stores snapshots for the next driver.
        snapshot_freq: Steps between two snapshots. 0: no snapshots, and a lost worker ends the run.
        directory: Run directory, for `failures.jsonl`.
    """

    def __init__(self, trainer: Recoverable, resume_state: ResumeState, *, snapshot_freq: int, directory: str):
        self._trainer, self._resume_state = trainer, resume_state
        self._snapshot_freq, self._path = snapshot_freq, os.path.join(directory, FILE)
        self._snapshot: StepSnapshot | None = None
        self._times = PartTimes()
        self._budgets = Budgets()  # full again with every snapshot
        self._newest = -1  # completed step
        self._recoveries, self._seconds, self._snapshot_s = 0, 0.0, 0.0

    def run_with_retry(self, work: Callable[[], None]) -> None:
        """Run `work`; after a loss restore the snapshot and run it again.

        It starts at the trainer's current step.

        Raises:
            WorkerLost, CallTimeout: There is no snapshot, or the limits are used up.
        """
        while True:
            try:
                return work()
            except (WorkerLost, CallTimeout) as error:
                if self._snapshot is None:
                    raise
                self._recover(self._loss(error), self._snapshot)

    def take_snapshot(self, *, force: bool = False) -> None:
        """Store a snapshot of this step if one is due.

        Returns when every rank has stored its part.

        Args:
            force: Take one at any step (never with `snapshot_freq` 0).
        """
        trainer = self._trainer
        if not self._snapshot_freq or (trainer.global_steps % self._snapshot_freq and not force):
            return
        start = time.perf_counter()
        engine_refs = self._resume_state.call_surviving(trainer.trained_groups(), "take_snapshot")
        state = parts_in_memory(trainer.parts)
        self._snapshot = StepSnapshot(trainer.global_steps, engine_refs, state, trainer.weight_channel)
        self._resume_state.store(self._snapshot)
        trainer.context.lifecycle.report_step(trainer.global_steps)
        self._budgets.refill(Refill.COMPLETED_STEP)
        self._snapshot_s = time.perf_counter() - start

    def resume(self, snapshot: StepSnapshot) -> None:
        """Bring all roles to the step of a previous driver's snapshot."""
        detected_at, start = time.time(), time.monotonic()
        self._newest = self._trainer.global_steps = snapshot.step
        self._rewind([], snapshot)
        seconds, attempt = time.monotonic() - start, self._trainer.context.lifecycle.attempt
        logger.warning("driver attempt %d resumed at the end of step %d after %.1f s", attempt, snapshot.step, seconds)
        self._record(
            {
                "step": snapshot.step + 1,
                "lost": [master.TRAINER],
                "detected_at": detected_at,
                "seconds": seconds,
                "back_at_step": snapshot.step,
            }
        )

    def is_first_completion(self, step: int) -> bool:
        """Return whether this step completes for the first time."""
        is_first, self._newest = step > self._newest, max(step, self._newest)
        return is_first

    def metrics(self) -> dict[str, float]:
        """Return the seconds of the last snapshot and, after a loss, number and seconds of all recoveries."""
        recoveries = (
            {"failover/recoveries": float(self._recoveries), "failover/seconds": self._seconds}
            if self._recoveries
            else {}
        )
        return recoveries | ({"timing_s/snapshot": self._snapshot_s} if self._snapshot is not None else {})

    def _recover(self, lost: WorkerLost, snapshot: StepSnapshot) -> None:
        """Rebuild lost roles, including any lost during recovery; raises WorkerLost beyond the limits."""
        detected_at, start = time.time(), time.monotonic()
        step, losses = self._trainer.global_steps, [lost]
        self._rewind(losses, snapshot)
        seconds, parts = time.monotonic() - start, self._times.drain()
        self._recoveries, self._seconds = self._recoveries + 1, self._seconds + seconds
        logger.warning(
            "recovered: all roles are at the end of step %d (%.1f s: %s); retrying step %d",
            snapshot.step,
            seconds,
            ", ".join(f"{name} {part_s:.1f}" for name, part_s in parts.items()),
            snapshot.step + 1,
        )
        names = [f"{one.role}-{one.rank}" for one in losses]
        self._record(
            {
                "step": step,
                "lost": names,
                "method": losses[0].method,
                "detected_at": detected_at,
                "seconds": seconds,
                "parts": parts,
                "back_at_step": snapshot.step,
            }
        )

    def _rewind(self, losses: list[WorkerLost], snapshot: StepSnapshot) -> None:
        """Rebuild the roles of `losses`, append losses that happen meanwhile, and restore the snapshot."""
        step = self._trainer.global_steps
        while True:
            if losses:
                self._check_budget(losses[-1], step, snapshot)
            try:
                with self._times.part("disconnect"):
                    self._trainer.disconnect(str(losses[-1]) if losses else "its driver was lost")
                self._rebuild({role for one in losses for role in one.role.split("+")})
                return self._restore(snapshot)
            except (WorkerLost, CallTimeout) as another:
                losses.append(self._loss(another))

    def _loss(self, error: WorkerLost | CallTimeout) -> WorkerLost:
        """Return the error as a loss; raises a timeout without a worker, or one beyond the limit."""
        if isinstance(error, WorkerLost):
            return error
        if not error.role:
            raise error
        failure = Failure(FailureKind.CALL_TIMEOUT, str(error), target=f"role {error.role}")
        self._carry_out(self._budgets.spend(failure), error)
        return WorkerLost(error.role, error.ranks[0], error.method, f"{error}; its processes are killed")

    def _check_budget(self, lost: WorkerLost, step: int, snapshot: StepSnapshot) -> None:
        count = sum(self._trainer.groups[role].world_size for role in lost.role.split("+")[:1])
        what = f"{lost.role}-{lost.rank} was lost in {lost.method} of step {step} ({lost.cause})"
        target = f"role {lost.role} ({count} process{'es' if count != 1 else ''})"
        origin = f"the snapshot of step {snapshot.step}"
        failure = Failure(FailureKind.WORKER_LOST, what, target=target, origin=origin)
        self._carry_out(self._budgets.spend(failure), lost)

    def _carry_out(self, decision: Decision, error: WorkerLost | CallTimeout) -> None:
        """Report a decision and log it; raises the error if the budget is spent."""
        report_decision(decision)
        if not decision.is_granted:
            error.add_note(str(decision))
            raise error
        logger.warning("%s", decision)

    def _record(self, entry: dict[str, Any]) -> None:
        try:
            with open(self._path, "a", encoding="utf-8") as file:
                file.write(json.dumps(entry) + "\n")
        except OSError as error:  # a full disk must not end a run that survived a loss
            logger.warning("%s: cannot be written (%s)", self._path, error.strerror)

    def _rebuild(self, roles: set[str]) -> None:
        """Restart the processes of these roles, and initialize all roles that share them."""
        groups = self._trainer.groups
        done: list[Any] = []
        for role in sorted(roles):
            processes = groups[role].processes
            if any(processes is other for other in done):
                continue
            done.append(processes)
            processes.times = self._times
            groups[role].rebuild()
            with self._times.part("model"):
                for colocated in processes.classes:
                    self._trainer.init_role(colocated)
            processes.split_model_time()

    def _restore(self, snapshot: StepSnapshot) -> None:
        trainer = self._trainer
        with self._times.part("snapshot"):
            for role, group in trainer.trained_groups().items():
                group.load_snapshot(snapshot.engine_refs[role])
            trainer.global_steps = snapshot.step
            load_from_memory(trainer.parts, snapshot.parts)
        with self._times.part("push"):
            trainer.reconnect()
