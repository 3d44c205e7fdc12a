"""`JobSupervisor`: starts the processes and the trainer of a submitted job, and restarts lost ones.

It runs in the Ray actor `JobSupervisorActor` (`submit.py`), which executes no user code in its loop, so a trainer that
dies finds its workers unchanged. What it restarts:

  - A lost worker, together with the processes that cannot continue without it (`RoleSpec.restart`), up to
    `max_restart` times per role.
  - The trainer, if it died, or if it did not call `job.recover` after losing a worker.

A trainer's exception counts as a restart, too; the same one twice at the same step ends the job. So does any exception
of a program or function that runs standalone.

If the supervisor dies, the job's processes end too. Ray restarts the supervisor, if necessary on another machine. It
then starts the job again: the trainer's resume point has the last progress that the master recorded.
"""

import logging
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from hybridrl.errors import ConfigError, WorkerLost
from hybridrl.failure_policy import Budgets, Decision, Failure, FailureKind
from hybridrl.master.jobs.entry_worker import add_trainer_process, worker_recipes
from hybridrl.master.jobs.job_handle import GroupHandle, ResumePoint
from hybridrl.master.jobs.restart_policy import restart_report, restart_set
from hybridrl.master.plan.packing import pack_plan
from hybridrl.master.plan.planner import plan_job
from hybridrl.master.plan.spec import TRAINER, JobSpec
from hybridrl.master.service.client import MasterClient
from hybridrl.master.state.events import WarningRaised, role_of_slot
from hybridrl.single_controller.awaiting import wait_all
from hybridrl.single_controller.cluster import JOB_SUPERVISOR, master_name
from hybridrl.single_controller.launch import launch, make_pools
from hybridrl.single_controller.monitoring.heartbeat_client import report_decision
from hybridrl.single_controller.placement.feasibility import NodeCapacity
from hybridrl.single_controller.placement.placement_groups import NODE_LABEL, cluster_nodes
from hybridrl.single_controller.processes.termination import kill_processes, kill_run
from hybridrl.single_controller.ray_worker_group import RayClassWithInitArgs, RayWorkerGroup

logger = logging.getLogger(__name__)
STOPPED_EXIT_CODE = 143  # 128 + SIGTERM, as in a shell
GRACE_S = 30.0  # from SIGTERM to killing the remaining processes
POLL_PERIOD_S = 0.25
DEATH_CHECK_TIMEOUT_S = 0.5  # Ray warnings a death within this time
OLD_PROCESSES_TIMEOUT_S = 30.0  # for the end of the processes of a lost supervisor
RESULT_TIMEOUT_S = 60.0  # to fetch a result that is ready


class JobSupervisor:
    """Runs one run of a job.

    Args:
        spec: What the job consists of.
        job: Name of the job.
        run: Unique name of this run.
        journal: Directory of the master's journal.
        own_handle: Handle of the Ray actor that this supervisor runs in. The trainer calls it.
    """

    def __init__(self, spec: JobSpec, *, job: str, run: str, journal: str, own_handle: Any):
        self._spec, self._job, self._run, self._journal, self._own_handle = spec, job, run, journal, own_handle
        self._plan = plan_job(spec, run)
        self._pools: dict[str, Any] = {}
        self._groups: dict[str, RayWorkerGroup] = {}  # role -> group, including the trainer's
        self._standalone: set[str] = set()  # roles that run by themselves, without a caller
        self._finished: set[tuple[str, int]] = set()  # (role, rank) whose `run` returned
        self._calls: dict[Any, tuple[str, int]] = {}  # pending `run` call -> (role, rank)
        max_restarts = {role.name: role.max_restart for role in spec.roles} | (
            {TRAINER: spec.trainer.max_restart} if spec.trainer else {}
        )
        self._budgets, self._restarts = Budgets(max_restarts), dict.fromkeys(max_restarts, 0)
        self._commit, self._last_exception = "", ("", -1)
        self._labels: dict[str, Mapping[str, str]] = {}  # node -> labels, of all machines seen so far
        self._given: dict[str, list[str]] = {}  # role -> names of the processes that a trainer has had
        self._recovering = threading.RLock()
        self._stop_reason = ""
        self._stopped_at = 0.0

    def run(self, *, is_restart: bool = False) -> int:
        """Run the job to its end. Raises the error that the job fails with.

        Args:
            is_restart: The previous supervisor of this run was lost.

        Returns:
            0 on success, 143 if the job was stopped.
        """
        recipes, self._standalone = worker_recipes(self._spec, self._plan)
        replicas = [role.name for role in self._spec.roles if role.restart != "role"]
        try:
            with MasterClient(
                job=self._job,
                run=self._run,
                journal=self._journal,
                restarts_driver=True,  # Ray does: the supervisor is this job's driver
                replicas=[*replicas, TRAINER],
                on_stop=self._stop,
                is_restart=is_restart,
            ) as self._master:
                if is_restart:
                    self._restart_job()
                self._launch(recipes)
                self._run_all()
                if self._stop_reason:
                    self._master.finish_job(succeeded=False, reason=self._stop_reason)
                return STOPPED_EXIT_CODE if self._stop_reason else 0
        finally:
            for group in self._groups.values():
                group.shutdown()
            for pool in self._pools.values():
                pool.release()

    # -- calls of the trainer, in other threads

    def record_progress(self, step: int, commit: str | None) -> None:
        """Record the start of a step (commit None), or a commit of this step."""
        if commit is not None:
            self._commit = commit
            self._master.report_commit(step, commit)
        else:
            self._budgets.on_step(step)
            self._master.report_step(step)

    def recover(self, lost: WorkerLost, names: Mapping[str, Sequence[str]]) -> dict[str, GroupHandle]:
        """Restart lost processes and return the handles of the roles that changed.

        Args:
            lost: The error that the trainer got.
            names: Role -> process names that the trainer has.
        """
        with self._recovering:
            self._recover_all(self._dead_processes(lost))
            changed = [role for role, old in names.items() if self._groups[role].worker_names != list(old)]
            self._given |= {role: list(self._groups[role].worker_names) for role in changed}
            return {role: GroupHandle.from_group(self._groups[role]) for role in changed}

    # -- starting

    def _restart_job(self) -> None:
        """Kill the processes of the previous supervisor, and restore the progress that the master recorded."""
        description = self._master.describe()
        self._budgets.step, self._commit = description["step"], description["commit"]
        for role in self._restarts:
            incarnations = [
                worker["incarnation"]
                for slot, worker in description["workers"].items()
                if slot != TRAINER and role_of_slot(slot) == role
            ]
            self._restarts[role] = max(incarnations, default=0)
        start = self._commit or "its first step"
        self._master.send(WarningRaised(JOB_SUPERVISOR, f"it was lost; the job starts again from {start}"))
        kill_run(self._run, exclude=master_name(self._run), timeout_s=OLD_PROCESSES_TIMEOUT_S)

    def _launch(self, recipes: Mapping[str, RayClassWithInitArgs]) -> None:
        plan = add_trainer_process(pack_plan(self._plan, self._spec, self._poll_nodes()))
        self._pools = make_pools(plan)
        self._groups = launch(plan, recipes, self._pools)

    # -- running

    def _run_all(self) -> None:
        """Run the trainer and the standalone roles until all of them have finished."""
        import ray

        for role in sorted(self._standalone):
            self._start(role, list(range(self._groups[role].world_size)))
        if TRAINER in self._groups:
            self._start(TRAINER, [0])
        while self._calls:
            if self._stop_reason and time.monotonic() > self._stopped_at + GRACE_S:
                return
            done, _ = ray.wait(list(self._calls), num_returns=1, timeout=POLL_PERIOD_S)
            for call in done:
                self._collect(call)

    def _start(self, role: str, ranks: Sequence[int]) -> None:
        """Call `run` of these ranks. Results of their previous calls are dropped."""
        calls = {
            call: (its_role, rank)
            for call, (its_role, rank) in self._calls.items()
            if its_role != role or rank not in ranks
        }
        self._finished -= {(role, rank) for rank in ranks}
        if not self._stop_reason:
            group = self._groups[role]
            arguments = self._give_groups() if role == TRAINER else (self._restarts[role],)
            calls |= {group.execute_rank_async(rank, "run", *arguments): (role, rank) for rank in ranks}
        self._calls = calls  # in one assignment: another thread reads it

    def _give_groups(self) -> tuple:
        """Return the arguments of a trainer's `run`."""
        groups = {role: group for role, group in self._groups.items() if role not in (*self._standalone, TRAINER)}
        names = {role: list(group.worker_names) for role, group in groups.items()}
        new_ranks = {
            role: [rank for rank, name in enumerate(now) if name not in self._given.get(role, ())]
            for role, now in names.items()
        }
        self._given = names
        resume_point = ResumePoint(self._restarts[TRAINER], self._budgets.step, self._commit, new_ranks)
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
        """Restart what is necessary after a process died or raised. Raises errors that the job does not survive."""
        before = self._calls
        dead = self._dead_processes(error)
        if not dead and role == TRAINER:
            self._count_trainer_exception(error)
        self._recover_all(dead)
        if (role, rank) in (position for call, position in self._calls.items() if call not in before):
            return
        if role == TRAINER:
            self._restart(TRAINER, [0], f"it ended with {type(error).__name__}: {error}")
        elif role not in (its_role for its_role, _ in dead):
            raise _add_traceback(error)  # no process died that could have caused it
        self._start(role, [rank])

    def _count_trainer_exception(self, error: Exception) -> None:
        """Count an exception of the trainer. Raises it if it repeats at the same step, or exceeds the budget."""
        exception = (f"{type(error).__name__}: {error}", self._budgets.step)
        if isinstance(error, ConfigError) or exception == self._last_exception:
            what = f"the trainer raised {exception[0]} at step {exception[1]}"
            self._decide(Failure(FailureKind.EXCEPTION_REPEATED, what))
            raise _add_traceback(error)
        self._last_exception = exception
        if not self._decide(_role_failure(TRAINER, exception[0], [0])).is_granted:
            raise _add_traceback(_add_note(error, self._report(TRAINER)))

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

    def _dead_processes(self, raised: Exception) -> dict[tuple[str, int], WorkerLost]:
        """Return the dead processes: (role, rank) -> error. Finished and busy processes are not dead.

        Args:
            raised: The exception that a call raised. If it is one of the losses, it is returned for its process.
        """
        import ray

        unfinished = [
            (role, rank)
            for role, group in self._groups.items()
            for rank in range(group.world_size)
            if (role, rank) not in self._finished
        ]
        asked = {self._groups[role].workers[rank].ping.remote(): (role, rank) for role, rank in unfinished}
        done, _ = ray.wait(list(asked), num_returns=len(asked), timeout=DEATH_CHECK_TIMEOUT_S, fetch_local=False)
        known = {(raised.role, raised.rank): raised} if isinstance(raised, WorkerLost) else {}
        dead: dict[tuple[str, int], WorkerLost] = {}
        for call in done:
            role, rank = asked[call]
            try:
                wait_all([call], [rank], role=role, method="ping", timeout_s=RESULT_TIMEOUT_S)
            except WorkerLost as lost:
                dead[role, rank] = known.get((role, rank), lost)
        return dead

    def _recover_all(self, dead: Mapping[tuple[str, int], WorkerLost]) -> None:
        for role in dict.fromkeys(role for role, _ in dead):
            self._recover_role(role, [lost for (its_role, _), lost in dead.items() if its_role == role])

    def _recover_role(self, role: str, losses: Sequence[WorkerLost]) -> None:
        """Restart lost processes and those that depend on them; standalone roles run again.

        Raises the loss that exceeds the budget.
        """
        while True:
            for lost in losses:
                self._master.add_exit_reason(lost)
            reason = ", ".join(f"{role}-{lost.rank} was lost: {lost.cause}" for lost in losses)
            ranks = self._restart_set([lost.rank for lost in losses], role)
            if not self._decide(_role_failure(role, reason, ranks)).is_granted:
                raise _add_note(losses[0], self._report(role))
            try:
                self._restart(role, ranks, reason)
                break
            except WorkerLost as another:  # during the restart
                losses = [another]
        if role in self._standalone or role == TRAINER:
            self._start(role, ranks)

    def _restart_set(self, lost: Sequence[int], role: str) -> list[int]:
        if role == TRAINER:
            return [0]
        [process] = [one for one in self._plan.processes if role in one.roles]
        self._poll_nodes()
        nodes, positions = self._groups[role].processes.nodes, [node for node, _ in process.slots]
        return restart_set(self._spec.role(role), lost, nodes=nodes, labels=self._labels, positions=positions)

    def _poll_nodes(self) -> Sequence[NodeCapacity]:
        """Return the machines of the cluster. Stores their labels, which a lost machine no longer reports."""
        machines = cluster_nodes()
        self._labels |= {machine.labels[NODE_LABEL]: machine.labels for machine in machines}
        return machines

    def _restart(self, role: str, ranks: Sequence[int], why: str) -> None:
        """Restart these processes of a role. Their workers are constructed, but hold no state yet."""
        group, timeout_s = self._groups[role], None if role == TRAINER else self._spec.role(role).restart_timeout_s
        self._restarts[role] += 1
        slots = f"{role}-{','.join(map(str, ranks))}"
        self._master.send(WarningRaised(slots, f"restart number {self._restarts[role]}: {why}"))
        start = time.monotonic()
        deadline = {} if timeout_s is None else {"timeout_s": timeout_s}
        if len(ranks) == group.world_size:
            group.processes.rebuild(**deadline)
        else:
            group.processes.respawn(*ranks, **deadline)
        logger.warning(
            "%s was restarted in %.1f s at step %d because %s", slots, time.monotonic() - start, self._budgets.step, why
        )

    # -- stopping

    def _stop(self, reason: str) -> None:
        """Send SIGTERM to the running processes. After `GRACE_S` the loop kills the remaining ones."""
        self._stopped_at, self._stop_reason = time.monotonic(), reason
        logger.warning(
            "stopping job %s: %s; sending SIGTERM, and SIGKILL to what remains after %g s", self._run, reason, GRACE_S
        )
        running = [self._groups[role].processes for role in {role for role, _ in self._calls.values()}]
        pids = [pid for one in running for pid in zip(one.nodes, one.process_ids, strict=True)]
        # In a thread: this one has to keep sending heartbeats.
        threading.Thread(target=kill_processes, args=(pids,), kwargs={"graceful": True}, daemon=True).start()


def _role_failure(role: str, what: str, ranks: Sequence[int]) -> Failure:
    """Return the failure of a role's processes, or of the trainer."""
    if role == TRAINER:
        return Failure(FailureKind.TRAINER_FAILED, what, subject=TRAINER, target="the trainer")
    target = f"{role}-{','.join(map(str, ranks))}"
    return Failure(FailureKind.PROCESS_LOST, what, subject=role, target=target)


def _add_traceback(error: Exception) -> Exception:
    """Add the traceback of the process that raised the exception."""
    where = getattr(error, "remote_traceback", None)
    return error if where is None else _add_note(error, f"traceback of the process:\n{where}")


def _add_note(error: Exception, note: str) -> Exception:
    """Add the note once: an exception passes here twice if its trainer re-raises it."""
    if note not in getattr(error, "__notes__", ()):
        error.add_note(note)
    return error
