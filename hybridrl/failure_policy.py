"""Reactions to failures: one table, and the budgets that limit it.

Who can act on a failure asks `Budgets.spend`: the router, the trainer, the supervisor of the driver, the supervisor of
a submitted job. Each decides by itself, so it also decides while the master is down, and reports the decision to the
master. `hybridrl job states` prints the table.

Pure: nothing here waits, restarts, sends or logs.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

REFILL_STEPS = 10
STATUS_HINT = "`hybridrl job status` shows how each process ended"


class FailureKind(StrEnum):
    """What failed. The value appears in the table and in the journal."""

    REQUEST_LOST = "request on a lost replica"
    AGENT_LOOP_FAILED = "agent loop failed"
    REPLICA_LOST = "replica lost"
    WORKER_LOST = "worker lost"
    RANKS_MISSING = "no node for all ranks"
    CALL_TIMEOUT = "call past its deadline"
    UPDATE_SKIPPED = "no finite update in a step"
    UPDATE_REJECTED = "update not finite (rollback)"
    DRIVER_LOST = "driver lost"
    JOB_UNREPAIRABLE = "job beyond a driver's repair"
    PROCESS_LOST = "submitted job: process lost"
    TRAINER_FAILED = "submitted job: trainer failed"
    EXCEPTION_REPEATED = "submitted job: same exception"
    JOB_SUPERVISOR_LOST = "submitted job: supervisor lost"


class Scope(StrEnum):
    """What is restarted."""

    NOTHING = "nothing"
    CALL = "call"
    REPLICA = "replica"
    ROLE = "role"
    DRIVER = "driver"
    JOB = "job"


class Source(StrEnum):
    """State from which training continues."""

    NOTHING = "nothing"
    SNAPSHOT = "newest snapshot"
    CHECKPOINT = "newest checkpoint"


class Refill(StrEnum):
    """What makes a spent budget full again."""

    NEVER = "nothing"
    ANSWER = "an answer"
    COMPLETED_STEP = "a completed step"
    APPLIED_UPDATE = "an applied update"
    OTHER_CHECKPOINT = "another checkpoint"
    HEALTHY_STEPS = f"{REFILL_STEPS} healthy steps"  # in a row, without a failure of any role


class Executor(StrEnum):
    """Who decides, and carries the decision out."""

    ROUTER = "router"
    AGENT_BATCH = "agent batch"
    TRAINER = "trainer"
    SUPERVISOR = "supervisor"
    JOB_SUPERVISOR = "job supervisor"
    RAY = "Ray"


@dataclass(frozen=True)
class Rule:
    """One row of the table.

    Attributes:
        limit: Failures that are answered between two refills. None: the job sets it (`max_restart`).
        counted: What the budget counts, in the plural.
        action: What the executor does. `{target}` is what it does it to.
        hint: What the reader of the log may do while the budget lasts.
        consequence: What follows when the budget is spent.
        then: The failure that a spent budget becomes. None: it ends what ran.
        starts_full: False: there is no budget before the first refill.
    """

    kind: FailureKind
    scope: Scope
    source: Source
    executor: Executor
    limit: int | None
    counted: str
    refill: Refill
    action: str
    hint: str
    consequence: str
    then: FailureKind | None = None
    starts_full: bool = True


# fmt: off
RULES: Mapping[FailureKind, Rule] = {rule.kind: rule for rule in (
    Rule(FailureKind.REQUEST_LOST, Scope.CALL, Source.NOTHING, Executor.ROUTER,
         2, "losses", Refill.NEVER,  # a request that kills every process it runs on is sent three times
         action="sends {target} to another replica with the same seed", hint="its tokens stay the same",
         consequence="its caller gets the loss", then=FailureKind.WORKER_LOST),
    Rule(FailureKind.AGENT_LOOP_FAILED, Scope.CALL, Source.NOTHING, Executor.AGENT_BATCH,
         2, "failures", Refill.NEVER,  # what fails three times in some seconds is not back soon
         action="runs {target} again with a new loop object", hint="its requests have the same seeds",
         consequence="the sample is left out"),
    Rule(FailureKind.REPLICA_LOST, Scope.REPLICA, Source.NOTHING, Executor.ROUTER,
         3, "losses", Refill.ANSWER,
         action="restarts {target} with the current weights", hint=STATUS_HINT,
         consequence="the other replicas serve without it", then=FailureKind.WORKER_LOST),
    Rule(FailureKind.WORKER_LOST, Scope.ROLE, Source.SNAPSHOT, Executor.TRAINER,
         3, "losses", Refill.COMPLETED_STEP,
         action="rebuilds {target}", hint=STATUS_HINT,
         consequence="the driver ends, and its supervisor starts a new job",
         then=FailureKind.JOB_UNREPAIRABLE),
    Rule(FailureKind.RANKS_MISSING, Scope.ROLE, Source.CHECKPOINT, Executor.TRAINER,
         3, "losses", Refill.COMPLETED_STEP,  # only with trainer.min_ranks
         action="restarts {target} with the ranks that the nodes can hold",
         hint="add nodes to the Ray cluster, and it takes the missing ranks back",
         consequence="the driver ends, and its supervisor starts a new job",
         then=FailureKind.JOB_UNREPAIRABLE),
    Rule(FailureKind.CALL_TIMEOUT, Scope.ROLE, Source.SNAPSHOT, Executor.TRAINER,
         1, "timeouts", Refill.COMPLETED_STEP,
         action="kills the processes of {target} and counts them as lost",
         hint="raise trainer.call_timeout_s if the call is slow and not stuck",
         consequence="the run ends"),
    Rule(FailureKind.UPDATE_SKIPPED, Scope.NOTHING, Source.NOTHING, Executor.TRAINER,
         9, "steps in a row", Refill.APPLIED_UPDATE,  # the tenth ends the run: it learns nothing
         action="continues without {target}", hint="trainer.nonfinite chooses another reaction",
         consequence="the run ends"),
    Rule(FailureKind.UPDATE_REJECTED, Scope.NOTHING, Source.CHECKPOINT, Executor.TRAINER,
         3, "rollbacks to it", Refill.OTHER_CHECKPOINT,  # runs repeat exactly, so only a hardware fault goes away
         action="rolls back to {target}", hint="trainer.nonfinite chooses another reaction",
         consequence="the run ends"),
    Rule(FailureKind.DRIVER_LOST, Scope.DRIVER, Source.SNAPSHOT, Executor.SUPERVISOR,
         3, "losses", Refill.COMPLETED_STEP,
         action="restarts {target}", hint="`hybridrl job status` shows its workers, which keep running",
         consequence="the program ends; resume with trainer.resume_mode=auto"),
    Rule(FailureKind.JOB_UNREPAIRABLE, Scope.JOB, Source.CHECKPOINT, Executor.SUPERVISOR,
         1, "new jobs", Refill.COMPLETED_STEP,
         action="starts {target}", hint="the steps after that checkpoint run again",
         consequence="the program ends; resume with trainer.resume_mode=auto", starts_full=False),
    Rule(FailureKind.PROCESS_LOST, Scope.ROLE, Source.NOTHING, Executor.JOB_SUPERVISOR,
         None, "losses", Refill.HEALTHY_STEPS,
         action="restarts {target}", hint=STATUS_HINT,
         consequence="the job ends with a report of all losses"),
    Rule(FailureKind.TRAINER_FAILED, Scope.DRIVER, Source.CHECKPOINT, Executor.JOB_SUPERVISOR,
         None, "failures", Refill.HEALTHY_STEPS,
         action="restarts {target}", hint="`hybridrl job status` shows its workers, which keep running",
         consequence="the job ends with a report of all failures"),
    Rule(FailureKind.EXCEPTION_REPEATED, Scope.NOTHING, Source.NOTHING, Executor.JOB_SUPERVISOR,
         0, "repetitions", Refill.NEVER,
         action="restarts nothing", hint="correct the code",
         consequence="the job ends, because a restart would raise it again"),
    Rule(FailureKind.JOB_SUPERVISOR_LOST, Scope.JOB, Source.CHECKPOINT, Executor.RAY,
         3, "losses", Refill.NEVER,
         action="restarts {target}, which starts the job again",
         hint="`hybridrl job logs` shows what the job had reported",
         consequence="the job ends"),
)}
# fmt: on


@dataclass(frozen=True)
class Failure:
    """A failure, as the executor that noticed it describes it.

    Attributes:
        subject: Whose budget it spends: a role, a replica, a request, a checkpoint. "": the kind has one budget.
        what: What happened, as a clause without a full stop.
        target: What the executor restarts, see `Rule.action`.
        origin: The state that it continues from, with its step. "": none, or the target names it.
        source: What kind of state that is. None: the rule's.
        exception: Type and message, if the program raised one. Twice at one step it is `EXCEPTION_REPEATED`.
    """

    kind: FailureKind
    what: str
    subject: str = ""
    target: str = ""
    origin: str = ""
    source: Source | None = None
    exception: str = ""


@dataclass(frozen=True)
class Decision:
    """What the executor does about a failure. Its text is a line for the log.

    Attributes:
        is_granted: Whether the budget covers this failure. If not, `Rule.consequence` follows.
        used: Failures since the last refill, with this one.
        limit: Failures that the budget covers.
    """

    failure: Failure
    rule: Rule
    is_granted: bool
    used: int
    limit: int

    @property
    def scope(self) -> Scope:
        """What is restarted now."""
        return self.rule.scope if self.is_granted else Scope.NOTHING

    @property
    def source(self) -> Source:
        """State from which training continues now."""
        return (self.failure.source or self.rule.source) if self.is_granted else Source.NOTHING

    def __str__(self) -> str:
        rule, failure = self.rule, self.failure
        if not self.is_granted:
            return f"{failure.what}; {self._limit_clause()}{rule.consequence}"
        action = rule.action.format(target=failure.target or f"the {rule.scope}")
        origin = f" from {failure.origin}" if failure.origin else ""
        share = f"{self.used} of {self.limit} {rule.counted}"
        return f"{failure.what}; the {rule.executor} {action}{origin} ({share}); {rule.hint}"

    def _limit_clause(self) -> str:
        if not self.limit:
            return ""
        without = "" if self.rule.refill == Refill.NEVER else f" without {self.rule.refill}"
        return f"the limit is {_count(self.limit, self.rule.counted)}{without}, so "

    def to_json(self) -> dict[str, Any]:
        """Return the fields of the journal's `RecoveryDecided`."""
        return {
            "kind": str(self.rule.kind),
            "subject": self.failure.subject,
            "scope": str(self.scope),
            "source": str(self.source),
            "executor": str(self.rule.executor),
            "used": self.used,
            "limit": self.limit,
            "text": str(self),
        }


class RestartBudget:
    """Counts the failures of one subject since its last refill.

    Args:
        limit: Failures that it covers.
        is_full: False: it covers none before its first refill.
    """

    def __init__(self, limit: int, *, is_full: bool = True):
        self.limit, self.failures = limit, list[str]()
        self._is_filled = is_full

    @property
    def covers_another(self) -> bool:
        """Whether the next failure is within the limit."""
        return self._is_filled and len(self.failures) < self.limit

    def record(self, failure: str) -> None:
        """Add a failure. Those beyond the first uncovered one are not kept."""
        if len(self.failures) <= self.limit:
            self.failures.append(failure)

    def refill(self) -> None:
        """Make it full again."""
        self.failures.clear()
        self._is_filled = True


class Budgets:
    """The budgets of one executor, made when a failure first asks for them.

    Args:
        limits: Subject -> limit, for rules whose limit the job sets.
        step: The newest completed or started step.
    """

    def __init__(self, limits: Mapping[str, int] | None = None, *, step: int = 0):
        self.step = step
        self._limits = dict(limits or {})
        self._budgets: dict[tuple[FailureKind, str], RestartBudget] = {}
        self._refilled: set[Refill] = set()
        self._healthy_steps = 0
        self._last_exception = ("", -1)  # type and message, step

    def of(self, kind: FailureKind, subject: str = "") -> RestartBudget:
        """Return the budget of a subject. Raises KeyError if the job has to set its limit and did not."""
        rule = RULES[kind]
        limit = self._limits[subject] if rule.limit is None else rule.limit
        is_full = rule.starts_full or rule.refill in self._refilled
        return self._budgets.get((kind, subject)) or RestartBudget(limit, is_full=is_full)

    def spend(self, failure: Failure) -> Decision:
        """Decide about a failure, and count it. The same exception at the same step has a rule of its own."""
        if failure.exception:
            before, self._last_exception = self._last_exception, (failure.exception, self.step)
            if before == self._last_exception:
                what = f"{failure.what} at step {self.step}, as it did before"
                failure = Failure(FailureKind.EXCEPTION_REPEATED, what)
        decision = decide(failure, self)
        budget = self._budgets.setdefault((failure.kind, failure.subject), self.of(failure.kind, failure.subject))
        budget.record(f"{failure.what} (step {self.step})")
        self._healthy_steps = 0
        return decision

    def refill(self, event: Refill) -> None:
        """Make every budget full that this event refills."""
        self._refilled.add(event)
        for (kind, _), budget in list(self._budgets.items()):  # another thread may spend
            if RULES[kind].refill == event:
                budget.refill()

    def reset(self, kind: FailureKind, subject: str) -> None:
        """Drop the budget of one subject: it recovered, or it is gone."""
        self._budgets.pop((kind, subject), None)

    def on_step(self, step: int) -> None:
        """Count a step. The same step counts once."""
        if step <= self.step:
            return
        self.step = step
        self._healthy_steps += 1
        self.refill(Refill.COMPLETED_STEP)
        if self._healthy_steps >= REFILL_STEPS:
            self.refill(Refill.HEALTHY_STEPS)


def decide(failure: Failure, budgets: Budgets) -> Decision:
    """Return what follows a failure, without counting it."""
    budget = budgets.of(failure.kind, failure.subject)
    used = min(len(budget.failures), budget.limit) + 1
    return Decision(failure, RULES[failure.kind], budget.covers_another, used, budget.limit)


def to_text() -> str:
    """Return the table for a terminal: a line per failure."""
    head = "failure", "restarted", "continues from", "limit", "refilled by", "by", "when the budget is spent", "becomes"
    rows = [[*head]]
    for rule in RULES.values():
        limit = _count("max_restart" if rule.limit is None else rule.limit, rule.counted)
        columns = [rule.kind, rule.scope, rule.source, limit, rule.refill, rule.executor, rule.consequence]
        rows.append([*columns, rule.then or "-"])
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    rows.insert(1, ["-" * width for width in widths])
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
    return "".join(f"{line.rstrip()}\n" for line in lines)


def _count(number: int | str, plural: str) -> str:
    return f"{number} {plural.removesuffix('s') if number == 1 else plural}"
