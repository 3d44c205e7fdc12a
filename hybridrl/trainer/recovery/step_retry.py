"""Retry a training step after a worker process was lost.

After each step (every `trainer.snapshot_freq` steps) all trained ranks store a snapshot of their state in Ray's object
store: parameters, optimizer, schedule, random generators. The driver stores its own (`StepSnapshot`). The object store
is a process of its own, so a snapshot survives the rank that made it.

The next step does not wait for it. It begins while ranks store, and a stage that changes an engine waits until they
have (`StepRetry` wraps the stages). A snapshot counts from then on; after a loss before, the one before it counts.
When a call raises `WorkerLost`, `StepRetry`

  1. kills and restarts all processes of the lost role,
  2. loads the snapshot into every trained role, also the healthy ones (they may have applied the update already),
  3. pushes the snapshot's weights to the rollout, and
  4. runs the step again with the same prompts and random numbers.

So every completed step was applied exactly once. `failure_policy.py` limits the losses and the call timeouts
(`trainer.call_timeout_s`) without a completed step; then the error is raised. Exceptions in user code are never
retried, because they would only repeat. A lost node takes the snapshots in its object store with it; then, and beyond
the limits, a new job resumes from the newest checkpoint.

Called by `Trainer`; runs in the driver. Every recovery is an event of the master's journal (`RecoveryCompleted`); in a
run without a master, a line of `failures.jsonl` in the run directory, with the same fields.
"""

import functools
import json
import logging
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from typing import Any, Protocol

from hybridrl.driver.run_context import RunContext
from hybridrl.errors import CallTimeout, WorkerLost
from hybridrl.failure_policy import Budgets, Decision, Failure, FailureKind, Refill
from hybridrl.framework.stage import StageFn, declared_spec
from hybridrl.master.state.events import TRAINER, RecoveryCompleted
from hybridrl.single_controller.monitoring.process import PartTimes, ask_master, report_decision, report_event
from hybridrl.trainer.recovery.policies import ResumeState, RetryPolicy, StepSnapshot, are_stored
from hybridrl.trainer.run.state import StatefulObjects, load_from_memory, states_in_memory

logger = logging.getLogger(__name__)
FILE = "failures.jsonl"
SETTLE_TIMEOUT_S = 10.0  # for healthy ranks that still store their part of a snapshot when another one is lost
BLOCKING_TIMEOUT_S = 5.0  # for the master, which collects stacks for 2 s


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
    def stateful(self) -> StatefulObjects:
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


class StepRetry(RetryPolicy):
    """Snapshots of a run's steps, and the recovery of lost workers from them.

    Args:
        trainer: The trainer whose steps are run.
        resume_state: Stores snapshots for the next driver.
        snapshot_freq: Steps between two snapshots.
        directory: Run directory, for `failures.jsonl`.
    """

    def __init__(self, trainer: Recoverable, resume_state: ResumeState, *, snapshot_freq: int, directory: str):
        self._trainer, self._resume_state = trainer, resume_state
        self._snapshot_freq, self._path = snapshot_freq, os.path.join(directory, FILE)
        self._times = PartTimes()
        self._budgets = Budgets()  # full again with every snapshot
        self._newest = -1  # completed step
        self._recoveries, self._seconds, self._snapshot_s = 0, 0.0, 0.0

    def __call__(self, fn: StageFn) -> StageFn:
        """Return `fn` as a stage that waits for the snapshot if it may change an engine.

        An undeclared stage may. A declared one does if it is not pure and belongs to a trained role.
        """
        spec = declared_spec(fn)
        trained = {group.role for group in self._trainer.trained_groups().values()}
        if spec is not None and (spec.pure or spec.role not in trained):
            return fn

        @functools.wraps(fn)
        def after_snapshot(ctx: Any) -> Any:
            self._complete()
            return fn(ctx)

        return after_snapshot

    def run_with_retry(self, work: Callable[[], None]) -> None:
        """Run `work` from the trainer's current step on; after a loss restore the snapshot and run it again.

        Consumes: WorkerLost and CallTimeout of the calls in `work`.
        Waits for: the calls of `work`, which wait for workers.
        Unblocked by: a call's answer, the loss of its process, or its deadline (`trainer.call_timeout_s`).

        Raises:
            WorkerLost, CallTimeout: There is no snapshot, or the limits are used up.
        """
        while True:
            try:
                return work()
            except (WorkerLost, CallTimeout) as error:
                self._settle()
                if self.snapshot is None:
                    raise
                self._recover(self._as_lost(error), self.snapshot)

    def take_snapshot(self, *, force: bool = False) -> None:
        """Begin a snapshot of this step if one is due.

        Args:
            force: Take one at any step, and return when every rank has stored its part.
        """
        trainer = self._trainer
        if trainer.global_steps % self._snapshot_freq and not force:
            return
        self._complete()
        start = time.perf_counter()
        engine_refs = self._resume_state.submit_surviving(trainer.trained_groups(), "take_snapshot")
        state = states_in_memory(trainer.stateful)
        self.pending = StepSnapshot(trainer.global_steps, engine_refs, state, trainer.weight_channel)
        self._resume_state.store(self.pending)
        self._snapshot_s = time.perf_counter() - start
        if force:
            self._complete()

    def _complete(self) -> None:
        """Wait until every rank has stored its part of the pending snapshot, which counts then.

        Raises:
            WorkerLost, CallTimeout: A rank did not; the snapshot before it counts.
        """
        if (pending := self.pending) is None:
            return
        start, groups = time.perf_counter(), self._trainer.trained_groups()
        stored = self._resume_state.call_surviving(groups, "take_snapshot", started=dict(pending.engine_refs))
        if any(stored[role] is not parts for role, parts in pending.engine_refs.items()):  # by another store
            pending = replace(pending, engine_refs=stored)
            self._resume_state.store(pending)
        self._count(pending)
        self._snapshot_s += time.perf_counter() - start

    def _count(self, snapshot: StepSnapshot) -> None:
        self.snapshot, self.pending = snapshot, None
        self._resume_state.drop_older()
        self._trainer.context.lifecycle.report_step(snapshot.step)
        self._budgets.refill(Refill.COMPLETED_STEP)

    def _settle(self) -> None:
        """After a loss: count the pending snapshot if it is complete, or else drop it."""
        if (pending := self.pending) is None:
            return
        if are_stored(pending.engine_refs, timeout_s=SETTLE_TIMEOUT_S):
            return self._count(pending)
        self.pending = None
        logger.warning("the snapshot of step %d is not complete; the one before it counts", pending.step)

    def resume(self, snapshot: StepSnapshot) -> None:
        """Bring all roles to the step of a previous driver's snapshot."""
        self._newest = self._trainer.global_steps = snapshot.step
        back = replace(self._rewind([], snapshot), step=snapshot.step + 1, lost=(TRAINER,))
        attempt = self._trainer.context.lifecycle.attempt
        logger.warning(
            "driver attempt %d resumed at the end of step %d after %.1f s", attempt, snapshot.step, back.seconds
        )
        self._record(back)

    def is_first_completion(self, step: int) -> bool:
        """Return whether this step completes for the first time."""
        is_first, self._newest = step > self._newest, max(step, self._newest)
        return is_first

    def metrics(self) -> dict[str, float]:
        """Return the seconds that steps waited for the last snapshot, and what recoveries took."""
        found = {"timing_s/snapshot": self._snapshot_s} if self.snapshot is not None else {}
        if self._recoveries:
            found |= {"failover/recoveries": float(self._recoveries), "failover/seconds": self._seconds}
        return found

    def _recover(self, losses: list[WorkerLost], snapshot: StepSnapshot) -> None:
        """Rebuild lost roles, including any lost during recovery; raises WorkerLost beyond the limits."""
        back = self._rewind(losses, snapshot)
        self._recoveries, self._seconds = self._recoveries + 1, self._seconds + back.seconds
        logger.warning("%s", back)
        self._record(back)

    def _rewind(self, losses: list[WorkerLost], snapshot: StepSnapshot) -> RecoveryCompleted:
        """Rebuild the roles of `losses` and of losses that happen meanwhile, and restore the snapshot."""
        detected_at, start, step = time.time(), time.monotonic(), self._trainer.global_steps
        while True:
            if losses:
                self._check_budget(losses[-1], step, snapshot)
            try:
                with self._times.part("disconnect"):
                    self._trainer.disconnect(str(losses[-1]) if losses else "its driver was lost")
                self._rebuild({role for one in losses for role in one.role.split("+")})
                self._restore(snapshot)
                break
            except (WorkerLost, CallTimeout) as another:
                losses += self._as_lost(another)
        return RecoveryCompleted(
            step=step,
            lost=tuple(f"{one.role}-{one.rank}" for one in losses),
            detected_at=detected_at,
            seconds=time.monotonic() - start,
            back_at_step=snapshot.step,
            method=losses[0].method if losses else "",
            parts=self._times.drain(),
        )

    def _as_lost(self, error: WorkerLost | CallTimeout) -> list[WorkerLost]:
        """Return the processes to replace; raises a timeout without a worker, or one beyond the limit.

        After a timeout these are one per role that has not answered. The last one names the process that blocks the
        others, if the master knows it.
        """
        if isinstance(error, WorkerLost):
            return [error]
        if not error.role:
            raise error
        silent = {role: ranks for role, ranks in {error.role: error.ranks, **error.others}.items() if ranks}
        blocking = ask_master("find_blocking", f"{error.role}.{error.method}", timeout_s=BLOCKING_TIMEOUT_S)
        label, rank, evidence = blocking or ("", 0, "")
        why = f"{error}; {label}-{rank} blocks it: {evidence}" if label else str(error)
        failure = Failure(FailureKind.CALL_TIMEOUT, why, target=f"role {', '.join(silent)}")
        carry_out(self._budgets.spend(failure), error)
        cause = f"{why}; its processes are killed"
        culprit = {label: [rank]} if label else {}
        others = {role: ranks for role, ranks in silent.items() if not {*role.split("+")} & {*label.split("+")}}
        return [WorkerLost(role, ranks[0], error.method, cause) for role, ranks in (others | culprit).items()]

    def _check_budget(self, lost: WorkerLost, step: int, snapshot: StepSnapshot) -> None:
        count = sum(self._trainer.groups[role].world_size for role in lost.role.split("+")[:1])
        what = f"{lost.role}-{lost.rank} was lost in {lost.method} of step {step} ({lost.cause})"
        target = f"role {lost.role} ({count} process{'es' if count != 1 else ''})"
        origin = f"the snapshot of step {snapshot.step}"
        failure = Failure(FailureKind.WORKER_LOST, what, target=target, origin=origin)
        carry_out(self._budgets.spend(failure), lost)

    def _record(self, back: RecoveryCompleted) -> None:
        """Write a recovery once: the master into its journal, or without one this process into a file."""
        fields = asdict(back)
        if report_event(RecoveryCompleted.__name__, **fields):
            return
        try:
            with open(self._path, "a", encoding="utf-8") as file:
                file.write(json.dumps(fields) + "\n")
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
            load_from_memory(trainer.stateful, snapshot.states)
        with self._times.part("push"):
            trainer.reconnect()


def carry_out(decision: Decision, error: Exception) -> None:
    """Report a decision and log it; raises the error if the budget is spent."""
    report_decision(decision)
    if not decision.is_granted:
        error.add_note(str(decision))
        raise error
    logger.warning("%s", decision)
