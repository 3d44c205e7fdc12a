"""`JobSupervisor`: runs a submitted job, and decides what is restarted when a process is lost.

It runs in the Ray actor `JobSupervisorActor` (`submit.py`), which executes no user code in its loop, so a trainer that
dies finds its workers unchanged. What it restarts:

  - A lost worker, together with the processes that cannot continue without it (`RoleSpec.restart`), up to
    `max_restart` times per role. It learns of a loss from the master, from a process that looks up a role, or from the
    trainer (`job.recover`).
  - The trainer, if it died, or if it did not call `job.recover` after losing a worker.

A trainer's exception counts as a restart, too; the same one twice at the same step ends the job. So does any exception
of what a role runs by itself.

If the supervisor dies, the job's processes end too. Ray restarts the supervisor, if necessary on another machine. It
then starts the job again: the trainer's resume point has the last progress that the master recorded.
"""

import logging
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from hybridrl.errors import ConfigError, HybridRLError, WorkerLost
from hybridrl.failure_policy import Budgets, Decision, Failure, FailureKind
from hybridrl.master.jobs import NOT_STARTED
from hybridrl.master.jobs.job_context import JobContext, set_context
from hybridrl.master.jobs.job_handle import GroupHandle, ResumePoint
from hybridrl.master.jobs.recipes import worker_recipes
from hybridrl.master.jobs.role_processes import RESULT_TIMEOUT_S, Position, RoleProcesses
from hybridrl.master.jobs.roster import RosterAnswer
from hybridrl.master.plan.plan_table import plan_table
from hybridrl.master.plan.planner import plan_job
from hybridrl.master.plan.restart_policy import downstream, restart_report
from hybridrl.master.plan.spec import TRAINER, JobSpec
from hybridrl.master.service.client import MasterClient
from hybridrl.master.state.events import SUPERVISOR, WarningRaised, role_of_slot
from hybridrl.single_controller.awaiting import wait_all
from hybridrl.single_controller.cluster import JOB_SUPERVISOR, master_name
from hybridrl.single_controller.monitoring.process import report_decision
from hybridrl.single_controller.processes.termination import kill_processes, kill_run
from hybridrl.single_controller.ray_worker_group import RayWorkerGroup

logger = logging.getLogger(__name__)
STOPPED_EXIT_CODE = 143  # 128 + SIGTERM, as in a shell
GRACE_S = 30.0  # from SIGTERM to killing the remaining processes
POLL_PERIOD_S = 0.25
OLD_PROCESSES_TIMEOUT_S = 30.0  # for the end of the processes of a lost supervisor
WAY_OUT = "correct its cause, and start the same command again"  # of an error of hybridrl's own


class JobSupervisor:
    """Runs one run of a job.

    Args:
        spec: What the job consists of.
        job: Name of the job.
        run: Unique name of this run.
        journal: Directory of the master's journal.
        own_handle: Handle of the Ray actor that this supervisor runs in. The trainer calls it.
        resume_point: Progress of an earlier run that this one continues.
    """

    def __init__(
        self,
        spec: JobSpec,
        *,
        job: str,
        run: str,
        journal: str,
        own_handle: Any,
        resume_point: ResumePoint | None = None,
    ):
        self._spec, self._job, self._run, self._journal, self._own_handle = spec, job, run, journal, own_handle
        self._plan = plan_job(spec, run)
        self._processes = RoleProcesses(spec, self._plan)
        self._runs: set[str] = set()  # roles that run something by themselves, without the trainer
        self._drivers: set[str] = set()  # whose end the job waits for: the trainer and the drivers of `_runs`, else all
        self._finished: set[Position] = set()  # (role, rank) whose `run` returned
        self._calls: dict[Any, Position] = {}  # pending `run` call -> (role, rank)
        max_restarts = {role.name: role.max_restart for role in spec.roles} | (
            {TRAINER: spec.trainer.max_restart} if spec.trainer else {}
        )
        self._budgets = Budgets(max_restarts)
        self._resume_point = resume_point or ResumePoint()
        self._budgets.step = self._resume_point.step
        self._commit, self._commit_step = self._resume_point.commit, self._resume_point.commit_step
        self._given: dict[str, list[str]] = {}  # role -> names of the processes that a trainer has had
        self._recovering = threading.RLock()
        self._stop_reason = ""
        self._stopped_at = 0.0

    @property
    def _groups(self) -> Mapping[str, RayWorkerGroup]:
        return self._processes.groups

    def run(self, *, is_restart: bool = False) -> int:
        """Run the job to its end. Raises the error that the job fails with.

        Args:
            is_restart: The previous supervisor of this run was lost.

        Returns:
            0 on success, 143 if the job was stopped.
        """
        set_context(JobContext(self._job, self._run, JOB_SUPERVISOR, self._spec.config))
        recipes = worker_recipes(self._spec, self._plan, job=self._job)
        self._runs = {role.name for role in self._spec.roles if recipes[role.name].has_run}
        drivers = {role for role in self._runs if self._spec.role(role).is_driver} | ({TRAINER} & recipes.keys())
        self._drivers = drivers or self._runs
        try:
            with self._start_master(is_restart=is_restart) as self._master:
                if is_restart:
                    self._restart_job()
                else:
                    self._report_resume_point()
                try:
                    self._processes.launch(recipes)
                except WorkerLost as error:
                    raise _add_note(error, NOT_STARTED) from None
                self._master.report_step(self._budgets.step)  # the job runs, also if nobody reports steps
                self._run_all()
                if self._stop_reason:
                    self._master.finish_job(succeeded=False, reason=self._stop_reason)
                return STOPPED_EXIT_CODE if self._stop_reason else 0
        finally:
            self._processes.shutdown()

    def _report_resume_point(self) -> None:
        """Write the progress of the run that this one continues into the journal, which a further run may continue."""
        if self._resume_point.step:
            self._master.report_step(self._resume_point.step)
        if self._commit:
            self._master.report_commit(self._commit_step, self._commit)

    def _start_master(self, *, is_restart: bool) -> MasterClient:
        replicas = [role.name for role in self._spec.roles if role.restart == "process"]
        return MasterClient(
            job=self._job,
            run=self._run,
            journal=self._journal,
            restarts_driver=True,  # Ray does: the supervisor is this job's driver
            replicas=(*replicas, TRAINER),
            on_stop=self._stop,
            is_restart=is_restart,
            driver=SUPERVISOR,
            spec=self._spec.model_dump_json(),
            plan=plan_table(self._plan, self._spec.edges),
        )

    # -- calls of other processes, in other threads

    def record_progress(self, step: int, commit: str | None, metrics: Mapping[str, float] | None = None) -> None:
        """Record the start of a step (commit None) with metrics, or a commit of this step."""
        if commit is not None:
            self._commit, self._commit_step = commit, step
            self._master.report_commit(step, commit)
        else:
            self._budgets.on_step(step)
            self._master.report_step(step, metrics)

    def recover(self, lost: WorkerLost, names: Mapping[str, Sequence[str]]) -> dict[str, GroupHandle]:
        """Restart lost processes and return the handles of the roles that changed.

        Args:
            lost: The error that the trainer got.
            names: Role -> process names that the trainer has.
        """
        with self._recovering:
            self._recover_all(self._find_dead(lost))
            changed = [role for role, old in names.items() if self._groups[role].worker_names != list(old)]
            self._given |= {role: list(self._groups[role].worker_names) for role in changed}
            return {role: GroupHandle.from_group(self._groups[role]) for role in changed}

    def roster(self, role: str) -> RosterAnswer:
        """Return the current processes of a role, for `lookup_roster`."""
        return self._processes.roster(role)

    # -- starting

    def _restart_job(self) -> None:
        """Kill the processes of the previous supervisor, and restore the progress that the master recorded."""
        description = self._master.describe()
        self._budgets.step = description["step"]
        self._commit, self._commit_step = description["commit"], description["commit_step"]
        for role in self._processes.restarts:
            incarnations = [
                worker["incarnation"]
                for slot, worker in description["workers"].items()
                if slot != SUPERVISOR and role_of_slot(slot) == role
            ]
            self._processes.restarts[role] = max(incarnations, default=0)
        start = self._commit or "its first step"
        self._master.send(WarningRaised(SUPERVISOR, f"it was lost; the job starts again from {start}"))
        kill_run(self._run, exclude=master_name(self._run), timeout_s=OLD_PROCESSES_TIMEOUT_S)

    # -- running

    def _run_all(self) -> None:
        """Run the trainer and the roles that run by themselves, until all that the job waits for have finished."""
        import ray

        for role in sorted(self._runs):
            self._start(role, list(range(self._groups[role].world_size)))
        if TRAINER in self._groups:
            self._start(TRAINER, [0])
        while any(role in self._drivers for role, _ in self._calls.values()):
            if self._stop_reason and time.monotonic() > self._stopped_at + GRACE_S:
                return
            done, _ = ray.wait(list(self._calls), num_returns=1, timeout=POLL_PERIOD_S)
            for call in done:
                self._collect(call)
            if not done and not self._stop_reason and self._processes.has_reports():
                with self._recovering:
                    self._recover_all(self._find_dead(None))

    def _start(self, role: str, ranks: Sequence[int]) -> None:
        """Call `run` of these ranks. Results of their previous calls are dropped."""
        calls = {
            call: (its_role, rank)
            for call, (its_role, rank) in self._calls.items()
            if its_role != role or rank not in ranks
        }
        self._finished -= {(role, rank) for rank in ranks}
        if not self._stop_reason:
            arguments = self._give_groups() if role == TRAINER else (self._processes.restarts[role],)
            calls |= {self._processes.start_run(role, rank, *arguments): (role, rank) for rank in ranks}
        self._calls = calls  # in one assignment: another thread reads it

    def _give_groups(self) -> tuple:
        """Return the arguments of a trainer's `run`."""
        groups = {role: group for role, group in self._groups.items() if self._processes.recipes[role].has_group}
        names = {role: list(group.worker_names) for role, group in groups.items()}
        new_ranks = {
            role: [rank for rank, name in enumerate(now) if name not in self._given.get(role, ())]
            for role, now in names.items()
        }
        self._given = names
        resume_point = ResumePoint(
            self._processes.restarts[TRAINER], self._budgets.step, self._commit, new_ranks, self._commit_step
        )
        return {role: GroupHandle.from_group(group) for role, group in groups.items()}, resume_point, self._own_handle

    def _collect(self, call: Any) -> None:
        """Process the result of a `run` call."""
        with self._recovering:
            if call not in self._calls:  # the process was restarted meanwhile
                return
            role, rank = self._calls[call]
            try:
                wait_all([call], [rank], role=role, method="run", timeout_s=RESULT_TIMEOUT_S)
                self._finished.add((role, rank))
            except Exception as error:
                if not self._stop_reason:
                    self._handle_failure(error, role, rank)
            self._calls.pop(call, None)

    def _handle_failure(self, error: Exception, role: str, rank: int) -> None:
        """Restart what is necessary after a process died or raised.

        Raises errors that the job does not survive.
        """
        before = self._calls
        dead = self._find_dead(error)
        if not dead and role == TRAINER and not self._is_replaced(error):
            self._count_trainer_exception(error)
        self._recover_all(dead)
        if (role, rank) in (position for call, position in self._calls.items() if call not in before):
            return
        if role == TRAINER:
            self._restart(TRAINER, [0], f"it ended with {type(error).__name__}: {error}")
        elif role not in (its_role for its_role, _ in dead):
            if not isinstance(error, WorkerLost):
                raise _explained(error)  # no process died that could have caused it
            what = f"run() of {role}-{rank} ended with {error}"  # it has lost a process of another role
            if not self._decide(_role_failure(role, what, [rank])).is_granted:
                raise _add_note(error, self._report(role))
        self._start(role, [rank])

    def _is_replaced(self, error: Exception) -> bool:
        """Return whether this is the loss of a process that the trainer has, and that is restarted already."""
        if not isinstance(error, WorkerLost) or error.rank >= len(self._given.get(error.role, ())):
            return False
        return self._given[error.role][error.rank] != self._groups[error.role].worker_names[error.rank]

    def _count_trainer_exception(self, error: Exception) -> None:
        """Count an exception of the trainer.

        Raises it if it repeats at the same step, or exceeds the budget.
        """
        exception = f"{type(error).__name__}: {error}"
        failure = replace(_role_failure(TRAINER, f"the trainer raised {exception}", [0]), exception=exception)
        if isinstance(error, ConfigError):  # a restart would read the same settings
            failure = Failure(FailureKind.EXCEPTION_REPEATED, failure.what)
        decision = self._decide(failure)
        if decision.is_granted:
            return
        if decision.rule.kind == FailureKind.TRAINER_FAILED:
            _add_note(error, self._report(TRAINER))
        raise _explained(error)

    def _decide(self, failure: Failure) -> Decision:
        """Return what follows a failure; log it and report it to the master."""
        decision = self._budgets.spend(failure)
        logger.warning("step %d: %s", self._budgets.step, decision)
        report_decision(decision)
        return decision

    def _report(self, role: str) -> str:
        """Return why this role is not restarted, as a sentence."""
        kind = FailureKind.TRAINER_FAILED if role == TRAINER else FailureKind.PROCESS_LOST
        return restart_report(role, self._budgets.of(kind, role))

    # -- recovering

    def _find_dead(self, raised: Exception | None) -> dict[Position, WorkerLost]:
        # Nobody calls a process whose program has finished.
        unneeded = [(role, rank) for role, rank in self._finished if not self._processes.recipes[role].has_group]
        return self._processes.find_dead(raised, except_for=unneeded)

    def _recover_all(self, dead: Mapping[Position, WorkerLost]) -> None:
        names = {role: list(self._groups[role].worker_names) for role, _ in dead}
        for role in names:
            losses = [lost for (its_role, _), lost in dead.items() if its_role == role]
            now = self._groups[role].worker_names  # another role's recovery may have restarted these
            losses = [lost for lost in losses if now[lost.rank] == names[role][lost.rank]]
            if losses:
                self._recover_role(role, losses)

    def _recover_role(self, role: str, losses: Sequence[WorkerLost]) -> None:
        """Restart lost processes and those that depend on them; what they run by themselves starts again.

        Raises the loss that exceeds the budget.
        """
        while True:
            for lost in losses:
                self._master.add_exit_reason(lost)
            reason = ", ".join(f"{role}-{lost.rank} was lost: {lost.cause}" for lost in losses)
            ranks = self._processes.restart_set([lost.rank for lost in losses], role)
            failure = _role_failure(role, reason, ranks, also=self._downstream(role))
            if not self._decide(failure).is_granted:
                raise _add_note(losses[0], self._report(role))
            try:
                self._restart(role, ranks, reason)
                break
            except WorkerLost as another:  # during the restart
                losses = [another]
        self._start_runs(role, ranks)
        for other in self._downstream(role):
            ranks = list(range(self._groups[other].world_size))
            try:
                self._restart(other, ranks, f"it is downstream of {role}, which was restarted")
            except WorkerLost as another:
                self._recover_role(other, [another])
            else:
                self._start_runs(other, ranks)

    def _downstream(self, role: str) -> list[str]:
        """Return the other roles that are restarted with a role."""
        if role == TRAINER or self._spec.role(role).restart != "downstream":
            return []
        return downstream(self._spec.edges, role)

    def _start_runs(self, role: str, ranks: Sequence[int]) -> None:
        if role in self._runs or role == TRAINER:
            self._start(role, ranks)

    def _restart(self, role: str, ranks: Sequence[int], why: str) -> None:
        self._processes.restart(role, ranks, why, self._master, step=self._budgets.step)

    # -- stopping

    def _stop(self, reason: str) -> None:
        """End what runs: by SystemExit, or a program by SIGTERM. After `GRACE_S` the loop kills what remains."""
        self._stopped_at, self._stop_reason = time.monotonic(), reason
        logger.warning(
            "stopping job %s: %s; sending SIGTERM, and SIGKILL to what remains after %g s", self._run, reason, GRACE_S
        )
        roles = {role for role, _ in self._calls.values()}
        running = [self._groups[role].processes for role in roles if not self._processes.interrupt(role)]
        pids = [pid for one in running for pid in zip(one.nodes, one.process_ids, strict=True)]
        # In a thread: this one has to keep sending heartbeats.
        threading.Thread(target=kill_processes, args=(pids,), kwargs={"graceful": True}, daemon=True).start()


def _role_failure(role: str, what: str, ranks: Sequence[int], *, also: Sequence[str] = ()) -> Failure:
    """Return the failure of a role's processes, or of the trainer. also: further roles that are restarted."""
    if role == TRAINER:
        return Failure(FailureKind.TRAINER_FAILED, what, subject=TRAINER, target="the trainer")
    target = ", ".join((f"{role}-{','.join(map(str, ranks))}", *also))
    return Failure(FailureKind.PROCESS_LOST, what, subject=role, target=target)


def _explained(error: Exception) -> Exception:
    """Add the way out to an error of hybridrl's own; to a user's, the tracebacks of the processes that it passed."""
    if isinstance(error, HybridRLError):
        return error if isinstance(error, ConfigError) else _add_note(error, WAY_OUT)  # a ConfigError names its fix
    where = getattr(error, "remote_traceback", None)
    return error if where is None else _add_note(error, f"traceback of the process:\n{where}")


def _add_note(error: Exception, note: str) -> Exception:
    """Add the note once: an exception passes here twice if its trainer re-raises it."""
    if note not in getattr(error, "__notes__", ()):
        error.add_note(note)
    return error
