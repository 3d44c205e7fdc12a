"""`JobKeeper`: keeps a submitted job going. It starts the job's processes, runs its trainer, and starts again whom the
job loses.

It is a process of its own, which runs nobody else's code in its loop: a trainer that dies finds its workers as they
were. A process that is lost is started again with those that cannot go on without it (`RoleSpec.restart`), as often as
its role says (`max_restart`); so is a trainer that lost it and did not say `job.recover`. An exception is a mistake,
and a mistake is made again: the same one twice at the same step ends the job, and so does any exception of a program or
function that runs by itself.

A keeper that is lost takes the job's processes with it. Ray starts it again, on another machine if need be, and it
begins the job anew: its trainer finds in its standing what the master had been told.
"""

import logging
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from hybridrl.errors import ConfigError, WorkerLost
from hybridrl.master.jobs.entry_worker import recipes_of, with_trainer
from hybridrl.master.jobs.job_handle import Roster, Standing
from hybridrl.master.jobs.packing import pack_plan
from hybridrl.master.jobs.planner import plan_job
from hybridrl.master.jobs.restart_policy import Budgets, started_with
from hybridrl.master.jobs.spec import TRAINER, JobSpec
from hybridrl.master.service.client import JobWatch
from hybridrl.master.state.events import Level, Noticed, label_of
from hybridrl.single_controller.awaiting import gather
from hybridrl.single_controller.cluster import KEEPER, master_name
from hybridrl.single_controller.launch import launch, pools_of
from hybridrl.single_controller.placement.feasibility import Machine
from hybridrl.single_controller.placement.placement_groups import NODE_LABEL, machines_of_cluster
from hybridrl.single_controller.processes.termination import end_run, kill_processes
from hybridrl.single_controller.ray_worker_group import RayClassWithInitArgs, RayWorkerGroup

logger = logging.getLogger(__name__)
STOPPED = 143  # exit code of what SIGTERM has ended, as a shell has it
GRACE_S = 30.0  # from SIGTERM to the end of who does not leave
LOOK_S = 0.25
DEAD_WITHIN_S = 0.5  # Ray has noticed a death by then
NAMES_FREE_WITHIN_S = 30.0  # those of a keeper that was lost
ARRIVES_WITHIN_S = 60.0  # an answer that is ready
LEVELS = (
    Level.CALL,
    Level.REPLICA,
    Level.ROLE,
    Level.TRAINER,
)  # the last is Ray's to carry out: it starts the keeper again


class JobKeeper:
    """One run of a job.

    job: its name. run: this run of it. journal: where its master keeps what happens. me: the Ray actor it is in.
    """

    def __init__(self, spec: JobSpec, *, job: str, run: str, journal: str, me: Any):
        self._spec, self._job, self._run, self._journal, self._me = spec, job, run, journal, me
        self._plan = plan_job(spec, run)
        self._pools: dict[str, Any] = {}
        self._groups: dict[str, RayWorkerGroup] = {}  # the trainer's, too
        self._by_itself: set[str] = set()  # roles that nobody calls
        self._through: set[tuple[str, int]] = set()  # of those: role, rank
        self._calls: dict[Any, tuple[str, int]] = {}  # of those that run: answer -> role, rank
        most = {role.name: role.max_restart for role in spec.roles} | (
            {TRAINER: spec.trainer.max_restart} if spec.trainer else {}
        )
        self._budgets, self._restarts = Budgets(most), dict.fromkeys(most, 0)
        self._commit, self._last_mistake = "", ("", -1)
        self._labels: dict[str, Mapping[str, str]] = {}  # of all machines that there were, by node
        self._handed: dict[str, list[str]] = {}  # names of the processes that a trainer has had, by role
        self._recovering = threading.RLock()
        self._stop_asked = ""
        self._stopped_at = 0.0

    def run(self, *, again: bool = False) -> int:
        """Run the job to its end and return 0, or 143 when somebody stopped it. What it fails of is raised.

        again: the keeper of this run was lost, and this is the next one.
        """
        recipes, self._by_itself = recipes_of(self._spec, self._plan)
        replicas = [role.name for role in self._spec.roles if role.restart != "role"]
        try:
            with JobWatch(
                job=self._job,
                run=self._run,
                journal=self._journal,
                levels=LEVELS,
                replicas=[*replicas, TRAINER],
                on_stop=self._stop,
                limits_itself=True,
                again=again,
            ) as self._watch:
                if again:
                    self._begin_anew()
                self._launch(recipes)
                self._run_all()
                if self._stop_asked:
                    self._watch.end(succeeded=False, reason=self._stop_asked)
                return STOPPED if self._stop_asked else 0
        finally:
            for group in self._groups.values():
                group.shutdown()
            for pool in self._pools.values():
                pool.release()

    # -- what the trainer says, from other threads

    def note(self, step: int, commit: str | None) -> None:
        """Take in that a step begins, or what was committed at it."""
        if commit is not None:
            self._commit = commit
            self._watch.committed(step, commit)
        else:
            self._budgets.stepped(step)
            self._watch.begin_step(step)

    def recover(self, lost: WorkerLost, names: Mapping[str, Sequence[str]]) -> dict[str, Roster]:
        """Start again who is lost, and return the rosters of the roles whose processes are no longer called as the
        trainer knows them.
        """
        with self._recovering:
            self._recover_all(self._dead(lost))
            changed = [role for role, known in names.items() if self._groups[role].worker_names != list(known)]
            self._handed |= {role: list(self._groups[role].worker_names) for role in changed}
            return {role: Roster.of(self._groups[role]) for role in changed}

    # -- starting

    def _begin_anew(self) -> None:
        """End what the keeper before this one has left, and take in what the master knows of the job."""
        seen = self._watch.describe()
        self._budgets.step, self._commit = seen["step"], seen["commit"]
        for role in self._restarts:
            lives = [
                worker["life"] for slot, worker in seen["workers"].items() if slot != TRAINER and label_of(slot) == role
            ]
            self._restarts[role] = max(lives, default=0)
        self._watch.tell(Noticed(KEEPER, f"it was lost; the job begins anew, from {self._commit or 'its beginning'}"))
        end_run(self._run, but=master_name(self._run), within_s=NAMES_FREE_WITHIN_S)

    def _launch(self, recipes: Mapping[str, RayClassWithInitArgs]) -> None:
        plan = with_trainer(pack_plan(self._plan, self._spec, self._look_at_machines()))
        self._pools = pools_of(plan)
        self._groups = launch(plan, recipes, self._pools)

    # -- running

    def _run_all(self) -> None:
        """Run the trainer and the roles that run by themselves until all of them are through."""
        import ray

        for role in sorted(self._by_itself):
            self._start(role, list(range(self._groups[role].world_size)))
        if TRAINER in self._groups:
            self._start(TRAINER, [0])
        while self._calls:
            if self._stop_asked and time.monotonic() > self._stopped_at + GRACE_S:
                return
            done, _ = ray.wait(list(self._calls), num_returns=1, timeout=LOOK_S)
            for answer in done:
                self._take(answer)

    def _start(self, role: str, ranks: Sequence[int]) -> None:
        """Have these ranks run, from the beginning; what they were called for before is forgotten."""
        calls = {
            answer: (its_role, rank)
            for answer, (its_role, rank) in self._calls.items()
            if its_role != role or rank not in ranks
        }
        self._through -= {(role, rank) for rank in ranks}
        if not self._stop_asked:
            group = self._groups[role]
            arguments = self._hand_over() if role == TRAINER else (self._restarts[role],)
            calls |= {group.execute_rank_async(rank, "run", *arguments): (role, rank) for rank in ranks}
        self._calls = calls  # at once: another thread looks whether somebody still runs

    def _hand_over(self) -> tuple:
        """What a trainer is given when it starts."""
        groups = {role: group for role, group in self._groups.items() if role not in (*self._by_itself, TRAINER)}
        names = {role: list(group.worker_names) for role, group in groups.items()}
        fresh = {
            role: [rank for rank, name in enumerate(now) if name not in self._handed.get(role, ())]
            for role, now in names.items()
        }
        self._handed = names
        standing = Standing(self._restarts[TRAINER], self._budgets.step, self._commit, fresh)
        return {role: Roster.of(group) for role, group in groups.items()}, standing, self._me

    def _take(self, answer: Any) -> None:
        """Take in that a process is through, or what became of it."""
        with self._recovering:
            if answer not in self._calls:  # it was started again meanwhile
                return
            role, rank = self._calls[answer]
            try:
                gather([answer], [rank], role=role, method="run", timeout_s=ARRIVES_WITHIN_S)
                self._through.add((role, rank))
            except Exception as error:
                if not self._stop_asked:
                    self._go_on_after(error, role, rank)
            self._calls.pop(answer, None)

    def _go_on_after(self, error: Exception, role: str, rank: int) -> None:
        """Start again what is needed after a process has died or raised something.

        Raises what the job does not survive.
        """
        before = self._calls
        dead = self._dead(error)
        if not dead and role == TRAINER:
            self._forgive(error)
        self._recover_all(dead)
        if (role, rank) in (place for answer, place in self._calls.items() if answer not in before):
            return
        if role == TRAINER:
            self._restart(TRAINER, [0], f"it ended with {type(error).__name__}: {error}")
        elif role not in (its_role for its_role, _ in dead):
            raise _with_traceback(error)  # nobody is dead who could have made it fail
        self._start(role, [rank])

    def _forgive(self, error: Exception) -> None:
        """Note a trainer's mistake. Raises it when it is the same again at the same step, or one too many."""
        mistake = (f"{type(error).__name__}: {error}", self._budgets.step)
        if isinstance(error, ConfigError) or mistake == self._last_mistake:
            raise _with_traceback(error)
        self._last_mistake = mistake
        if not self._budgets.take(TRAINER, mistake[0]):
            raise _with_traceback(_with_note(error, self._budgets.report(TRAINER)))

    # -- recovering

    def _dead(self, known: Exception) -> dict[tuple[str, int], WorkerLost]:
        """Return whose process is dead: (role, rank) -> its loss. Who is through is not missed, and who is busy is not
        dead.

        known: what was raised, which may be one of the losses.
        """
        import ray

        places = [(role, rank) for role, group in self._groups.items() for rank in range(group.world_size)]
        asked = {
            self._groups[role].workers[rank].ping.remote(): (role, rank)
            for role, rank in places
            if (role, rank) not in self._through
        }
        done, _ = ray.wait(list(asked), num_returns=len(asked), timeout=DEAD_WITHIN_S, fetch_local=False)
        dead = {}
        for answer in done:
            role, rank = asked[answer]
            try:
                gather([answer], [rank], role=role, method="ping", timeout_s=ARRIVES_WITHIN_S)
            except WorkerLost as lost:
                is_known = isinstance(known, WorkerLost) and (known.role, known.rank) == (role, rank)
                dead[role, rank] = known if is_known else lost
        return dead

    def _recover_all(self, dead: Mapping[tuple[str, int], WorkerLost]) -> None:
        for role in dict.fromkeys(role for role, _ in dead):
            self._recover_role(role, [lost for (its_role, _), lost in dead.items() if its_role == role])

    def _recover_role(self, role: str, losses: Sequence[WorkerLost]) -> None:
        """Start again who goes with those that are lost; roles that run by themselves run again.

        Raises a loss that is one too many.
        """
        while True:
            for lost in losses:
                self._watch.explain(lost)
            account = ", ".join(f"{role}-{lost.rank} was lost: {lost.cause}" for lost in losses)
            if not self._budgets.take(role, account):
                raise _with_note(losses[0], self._budgets.report(role))
            try:
                ranks = self._restart(role, self._who_goes_with([lost.rank for lost in losses], role), account)
                break
            except WorkerLost as another:  # while it was starting
                losses = [another]
        if role in self._by_itself or role == TRAINER:
            self._start(role, ranks)

    def _who_goes_with(self, lost: Sequence[int], role: str) -> list[int]:
        if role == TRAINER:
            return [0]
        [process] = [one for one in self._plan.processes if role in one.roles]
        self._look_at_machines()
        nodes, places = self._groups[role].processes.nodes, [place for place, _ in process.slots]
        return started_with(self._spec.role(role), lost, nodes=nodes, labels=self._labels, places=places)

    def _look_at_machines(self) -> Sequence[Machine]:
        """Return the machines of the cluster, and remember their labels: one that is gone does not
        tell them any more.
        """
        machines = machines_of_cluster()
        self._labels |= {machine.labels[NODE_LABEL]: machine.labels for machine in machines}
        return machines

    def _restart(self, role: str, ranks: Sequence[int], why: str) -> Sequence[int]:
        """Start these processes of a role again; their workers are constructed and have done nothing yet."""
        group, timeout_s = self._groups[role], None if role == TRAINER else self._spec.role(role).restart_timeout_s
        self._restarts[role] += 1
        whom = f"{role}-{','.join(map(str, ranks))}"
        self._watch.tell(Noticed(whom, f"started again, number {self._restarts[role]}: {why}"))
        start = time.monotonic()
        deadline = {} if timeout_s is None else {"timeout_s": timeout_s}
        if len(ranks) == group.world_size:
            group.processes.rebuild(**deadline)
        else:
            group.processes.respawn(*ranks, **deadline)
        logger.warning("%s is back after %.1f s; it was started again because %s", whom, time.monotonic() - start, why)
        return ranks

    # -- stopping

    def _stop(self, reason: str) -> None:
        """Have those that run leave, as SIGTERM does; the loop sees to it that all end."""
        self._stopped_at, self._stop_asked = time.monotonic(), reason
        logger.warning("the job %s is to stop: %s", self._run, reason)
        running = [self._groups[role].processes for role in {role for role, _ in self._calls.values()}]
        places = [place for one in running for place in zip(one.nodes, one.process_ids, strict=True)]
        threading.Thread(
            target=kill_processes, args=(places,), kwargs={"gently": True}, daemon=True
        ).start()  # heartbeats go on meanwhile


def _with_traceback(error: Exception) -> Exception:
    """Note where an exception was raised, for whoever sees it on another machine."""
    where = getattr(error, "remote_traceback", None)
    return error if where is None else _with_note(error, f"there:\n{where}")


def _with_note(error: Exception, note: str) -> Exception:
    """Note it, once: an exception comes by here twice when its trainer hands it on."""
    if note not in getattr(error, "__notes__", ()):
        error.add_note(note)
    return error
