"""`RoleProcesses`: the processes of a submitted job's roles, the trainer's included.

It starts them, finds lost ones, restarts them, and keeps the roster of each role. It decides nothing: `JobSupervisor`
(`job_supervisor.py`) decides by `failure_policy.py`, in the same process.
"""

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from hybridrl.errors import ConnectionLost, WorkerLost
from hybridrl.master.jobs.entry_worker import INTERRUPT, LIST, RUN
from hybridrl.master.jobs.job_handle import GroupHandle
from hybridrl.master.jobs.recipes import EntryRecipe
from hybridrl.master.jobs.roster import Roster, RosterAnswer, RosterState
from hybridrl.master.plan.packing import pack_plan
from hybridrl.master.plan.restart_policy import restart_set
from hybridrl.master.plan.spec import TRAINER, JobSpec
from hybridrl.master.service.client import MasterClient
from hybridrl.master.state.events import WarningRaised, WorkerReplaced, slot_matches
from hybridrl.single_controller.awaiting import wait_all
from hybridrl.single_controller.invocation import CONTROL, USER_CODE, Dispatch, Invocation
from hybridrl.single_controller.launch import launch, make_pools
from hybridrl.single_controller.monitoring.process import PROCESS
from hybridrl.single_controller.placement.feasibility import NodeCapacity
from hybridrl.single_controller.placement.placement_groups import NODE_LABEL, cluster_nodes
from hybridrl.single_controller.placement.plan import Plan, PoolPlan, ProcessPlan
from hybridrl.single_controller.ray_worker_group import RayWorkerGroup

logger = logging.getLogger(__name__)
DEATH_CHECK_TIMEOUT_S = 0.5  # Ray reports a death within this time
ROSTER_CHECK_TIMEOUT_S = 0.05  # the caller of a lost process and the supervisor learn of its death at the same time
RESULT_TIMEOUT_S = 60.0  # to fetch a result that is ready
LIST_TIMEOUT_S = 30.0  # of a process that was just constructed, to list its endpoints
JOIN_TIMEOUT_S = 5.0  # for the master to learn of new processes
LEAVE_TIMEOUT_S = 1.0  # for the master to learn that a process is killed on purpose

Position = tuple[str, int]  # role and rank


class RoleProcesses:
    """The processes of one run of a job.

    Attributes:
        groups: Role -> worker group, including the trainer's.
        restarts: Role -> number of its restarts.
    """

    def __init__(self, spec: JobSpec, plan: Plan) -> None:
        self._spec, self._plan = spec, plan
        self.groups: dict[str, RayWorkerGroup] = {}
        self.recipes: Mapping[str, EntryRecipe] = {}
        roles = [role.name for role in spec.roles] + ([TRAINER] if spec.trainer is not None else [])
        self.restarts = dict.fromkeys(roles, 0)
        self._pools: dict[str, Any] = {}
        self._labels: dict[str, Mapping[str, str]] = {}  # node -> labels, of all machines seen so far
        self._rosters: dict[str, Roster] = {}  # of the roles that are not being restarted
        self._ready_at: dict[str, list[float]] = {}  # by role and rank, of the monotonic clock
        self._suspects: set[str] = set()  # roles of which a lookup has found a dead process

    def launch(self, recipes: Mapping[str, EntryRecipe]) -> None:
        """Start all processes and construct their workers."""
        self.recipes = recipes
        plan = add_trainer_process(pack_plan(self._plan, self._spec, self._poll_nodes()))
        self._pools = make_pools(plan)
        self.groups = launch(plan, recipes, self._pools)
        now = time.monotonic()
        for role, group in self.groups.items():
            self._declare_endpoints(role, group)
            self._publish(role, [now] * group.world_size)

    def shutdown(self) -> None:
        """Kill all processes and release their reservations."""
        self._rosters.clear()
        for group in self.groups.values():
            group.shutdown()
        for pool in self._pools.values():
            pool.release()

    # -- calls

    def _declare_endpoints(self, role: str, group: RayWorkerGroup) -> None:
        """Give the group the records of the job's own endpoints, for `execute_rank_async`."""
        if self.recipes[role].is_callable:
            run = Invocation(Dispatch.ONE_TO_ALL, timeout_s=None, concurrency_group=USER_CODE)
            interrupt = Invocation(Dispatch.ONE_TO_ALL, concurrency_group=CONTROL)
            group.invocations |= {RUN: run, INTERRUPT: interrupt}

    def start_run(self, role: str, rank: int, *arguments: Any) -> Any:
        """Run what the role runs by itself. Returns the reference of the call."""
        return self.groups[role].execute_rank_async(rank, RUN, *arguments)

    def interrupt(self, role: str) -> bool:
        """Raise SystemExit in the `run` of all ranks.

        Returns False if only a signal can end it.
        """
        if self.recipes[role].is_callable:
            for rank in range(self.groups[role].world_size):
                self.groups[role].execute_rank_async(rank, INTERRUPT)
        return self.recipes[role].is_callable

    # -- rosters

    def roster(self, role: str) -> RosterAnswer:
        """Return the current roster of a role, or why there is none.

        Called in other threads.
        """
        if role not in self.restarts:
            return RosterAnswer(RosterState.UNKNOWN, hint=f"the job's roles are {', '.join(self.restarts)}")
        if not self.groups:
            return RosterAnswer(RosterState.STARTING)
        if not self.recipes[role].is_callable:
            program = "it runs a program; write what others call as a function or class, and name that in run()"
            trainer = "neither its class nor its module has a registered method or function; add one"
            return RosterAnswer(RosterState.NOT_CALLABLE, hint=trainer if role == TRAINER else program)
        roster = self._rosters.get(role)
        if roster is None or role in self._suspects:
            return RosterAnswer(RosterState.RESTARTING)
        if self._pinged(((role, rank) for rank in range(len(roster.ready_for_s))), ROSTER_CHECK_TIMEOUT_S):
            self._suspects.add(role)  # the supervisor's loop restarts it
            return RosterAnswer(RosterState.RESTARTING)
        now = time.monotonic()
        return RosterAnswer(RosterState.READY, replace(roster, ready_for_s=[now - at for at in self._ready_at[role]]))

    def _publish(self, role: str, ready_at: list[float]) -> None:
        group, recipe = self.groups[role], self.recipes[role]
        endpoints = dict(recipe.endpoints)
        if recipe.is_callable and role != TRAINER:  # a trainer is constructed later
            try:
                call = group.execute_rank_async(0, LIST)
                [exported] = wait_all([call], role=role, method=LIST, timeout_s=LIST_TIMEOUT_S)
                endpoints |= exported
            except WorkerLost:  # the supervisor's loop finds it
                logger.warning("%s-0 was lost before it listed its endpoints", role)
        self._suspects.discard(role)
        self._ready_at[role] = ready_at
        handle, ready_for_s = GroupHandle.from_group(group), [0.0] * group.world_size
        self._rosters[role] = Roster(self.restarts[role], handle, ready_for_s, endpoints)

    # -- losses

    def has_reports(self) -> bool:
        """Return whether the master or a lookup has reported the loss of a process that is not replaced yet."""
        return bool(self._suspects or self._reported())

    def _reported(self) -> dict[Position, WorkerLost]:
        found = {}
        for role, group in self.groups.items():
            for rank, host in enumerate(list(group.workers)):
                if reason := PROCESS.lost_reasons.get(host._actor_id.hex()):
                    found[role, rank] = WorkerLost(role, rank, self._method(role), reason)
        return found

    def find_dead(self, raised: Exception | None, *, except_for: Iterable[Position]) -> dict[Position, WorkerLost]:
        """Return the dead processes, and those that are cut off: (role, rank) -> error.

        Busy processes are not dead.

        Args:
            raised: The exception that a call raised. If it is one of the losses, it is returned for its process.
            except_for: Processes that nobody needs any more.
        """
        ignored = set(except_for)
        positions = [
            (role, rank)
            for role, group in self.groups.items()
            for rank in range(group.world_size)
            if (role, rank) not in ignored
        ]
        self._suspects.clear()
        reported = {position: lost for position, lost in self._reported().items() if position not in ignored}
        dead = reported | self._pinged(positions, DEATH_CHECK_TIMEOUT_S)
        if isinstance(raised, WorkerLost):
            position = raised.role, raised.rank
            if position in dead or (isinstance(raised, ConnectionLost) and position in positions):
                dead[position] = raised
        return dead

    def _pinged(self, positions: Iterable[Position], timeout_s: float) -> dict[Position, WorkerLost]:
        import ray

        asked = {self._ping(role, rank): (role, rank) for role, rank in positions}
        done, _ = ray.wait(list(asked), num_returns=len(asked), timeout=timeout_s, fetch_local=False)
        dead: dict[Position, WorkerLost] = {}
        for call in done:
            role, rank = asked[call]
            try:
                wait_all([call], [rank], role=role, method=self._method(role), timeout_s=RESULT_TIMEOUT_S)
            except WorkerLost as lost:
                dead[role, rank] = lost
        return dead

    def _method(self, role: str) -> str:
        """Return what a lost process of a role was in, for the error."""
        return RUN if self.recipes[role].has_run else "ping"

    def _ping(self, role: str, rank: int) -> Any:
        ping = self.groups[role].workers[rank].ping
        return (ping.options(concurrency_group=CONTROL) if self.recipes[role].is_callable else ping).remote()

    # -- restarts

    def restart_set(self, lost: Sequence[int], role: str) -> list[int]:
        """Return the ranks of a role to restart when these are lost."""
        if role == TRAINER:
            return [0]
        [process] = [one for one in self._plan.processes if role in one.roles]
        self._poll_nodes()
        nodes, positions = self.groups[role].processes.nodes, [node for node, _ in process.slots]
        return restart_set(self._spec.role(role), lost, nodes=nodes, labels=self._labels, positions=positions)

    def _poll_nodes(self) -> Sequence[NodeCapacity]:
        """Return the machines of the cluster.

        Stores their labels, which a lost machine no longer reports.
        """
        machines = cluster_nodes()
        self._labels |= {machine.labels[NODE_LABEL]: machine.labels for machine in machines}
        return machines

    def restart(self, role: str, ranks: Sequence[int], why: str, master: MasterClient, *, step: int) -> None:
        """Restart these processes of a role. Their workers are constructed, but hold no state yet.

        Returns when the master knows the new processes.
        """
        group, timeout_s = self.groups[role], None if role == TRAINER else self._spec.role(role).restart_timeout_s
        self._rosters.pop(role, None)
        ready_at = self._ready_at.get(role, [0.0] * group.world_size)
        self.restarts[role] += 1
        slots = f"{role}-{','.join(map(str, ranks))}"
        master.send(WarningRaised(slots, f"restart number {self.restarts[role]}: {why}"))
        for rank in ranks:
            master.send(WorkerReplaced(f"{role}-{rank}", group.process_ids[rank]))
        master.drain(LEAVE_TIMEOUT_S)
        start = time.monotonic()
        deadline = {} if timeout_s is None else {"timeout_s": timeout_s}
        if len(ranks) == group.world_size:
            group.processes.rebuild(**deadline)
        else:
            group.processes.respawn(*ranks, **deadline)
        now = time.monotonic()
        self._publish(role, [now if rank in ranks else its for rank, its in enumerate(ready_at)])
        logger.warning("%s was restarted in %.1f s at step %d because %s", slots, time.monotonic() - start, step, why)
        wait_until(lambda: _knows(master, role, {rank: group.process_ids[rank] for rank in ranks}), JOIN_TIMEOUT_S)


def add_trainer_process(plan: Plan) -> Plan:
    """Return the plan with its trainer as one more process, so that it is started and restarted like the others."""
    driver = plan.driver
    if driver is None:
        return plan
    [bundle] = driver.reservation.bundles
    process = ProcessPlan(TRAINER, (TRAINER,), ((0, 0),), bundle, environment=driver.environment)
    pool = PoolPlan(TRAINER, (driver.reservation,))
    return replace(plan, processes=(*plan.processes, process), pools=(*plan.pools, pool), driver=None)


def _knows(master: MasterClient, role: str, process_ids: Mapping[int, int]) -> bool:
    """Return whether the master has these processes of a role, or cannot be asked."""
    import ray

    try:
        workers = master.describe()["workers"]
    except (ray.exceptions.RayError, TimeoutError):
        return True
    return all(
        any(slot_matches(slot, role, rank) and worker["pid"] == process_id for slot, worker in workers.items())
        for rank, process_id in process_ids.items()
    )


def wait_until(condition: Callable[[], bool], timeout_s: float) -> None:
    """Return when the condition holds, or after `timeout_s`."""
    until = time.monotonic() + timeout_s
    while not condition() and time.monotonic() < until:
        time.sleep(0.02)
