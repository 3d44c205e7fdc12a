"""Train with fewer ranks while machines are missing, and with all again when they return (`trainer.min_ranks`).

The rows of an optimizer step do not depend on the number of ranks (`workers/mini_batch.py`), and a checkpoint loads
into any number of them. So a change of the number is a new start of all roles inside the running driver:

    lost        a role found no node within `trainer.placement_timeout_s`, or a snapshot was lost with its node
    chosen      the largest number of ranks, not below `trainer.min_ranks`, that the nodes which answer can hold
    restarted   all processes end; those of the new number load the newest checkpoint
    returned    a waiting reservation of the missing slots was granted: commit at the end of that step, restart with all

Ray keeps the waiting reservation, so a node that joins is noticed without polling, and an autoscaler sees the demand.
Only the pool of the trained roles changes its size. Called by `Trainer`; runs in the driver.
"""

import logging
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

from hybridrl.config import PPOConfig
from hybridrl.config.engines import rank_unit
from hybridrl.errors import CallTimeout, ObjectLost, PlacementError, WorkerLost
from hybridrl.failure_policy import Budgets, Failure, FailureKind, Refill
from hybridrl.single_controller.cluster import master_name
from hybridrl.single_controller.monitoring.process import report_ranks
from hybridrl.single_controller.placement import placement_groups
from hybridrl.single_controller.placement.feasibility import check_feasible, largest_fitting, slots_on_node
from hybridrl.single_controller.placement.node_loss import alive_capacities
from hybridrl.single_controller.processes.termination import kill_run
from hybridrl.trainer.checkpoint.saver import CheckpointSaver
from hybridrl.trainer.recovery.policies import RankPolicy
from hybridrl.trainer.recovery.step_retry import carry_out
from hybridrl.trainer.roles import ResourcePoolManager, Role
from hybridrl.trainer.run.state import StatefulObjects, load_from_memory, states_in_memory

if TYPE_CHECKING:
    from ray.util.placement_group import PlacementGroup

    from hybridrl.single_controller.placement.plan import Plan

logger = logging.getLogger(__name__)
POLL_PERIOD_S = 0.5
END_TIMEOUT_S = 60.0  # for Ray to forget the names of ended processes
TRAINED = (Role.ActorRolloutRef, Role.ActorRollout, Role.Actor)


class Restartable(Protocol):
    """What a change of the number of ranks requires of a trainer.

    Attributes:
        job: Name of the run on the cluster.
        global_steps: The last completed step, or the one in progress.
        groups: Role -> worker group.
        saver: Knows the newest checkpoint.
    """

    job: str
    global_steps: int
    groups: dict[str, Any]
    saver: CheckpointSaver

    @property
    def stateful(self) -> StatefulObjects:
        """The driver's own state."""

    def init_workers(self) -> None:
        """Start the worker processes on the pools' present sizes and load their models."""

    def disconnect(self, reason: str) -> None:
        """Stop what depends on processes that are about to be replaced. Safe to call twice."""

    def shutdown(self) -> None:
        """Stop the worker processes and release their devices. Safe to call twice."""

    def load_checkpoint(self, path: str) -> None:
        """Set all roles and the driver's own state to the checkpoint at `path`."""


class ElasticRanks(RankPolicy):
    """The number of ranks of a run.

    Args:
        trainer: Whose workers are started again.
        config: Settings of the job.
        manager: Has the pools.
    """

    def __init__(self, trainer: Restartable, config: PPOConfig, manager: ResourcePoolManager):
        self._trainer, self._manager = trainer, manager
        self._min, self._timeout_s = config.trainer.min_ranks, config.trainer.placement_timeout_s
        self._unit = rank_unit(config)
        pools = [manager.mapping[role] for role in TRAINED if role in manager.mapping]
        self._pool = [*pools, *manager.resource_pool_spec][0]
        self._full = list(manager.resource_pool_spec[self._pool])
        self._budgets = Budgets()
        self._make_plan: Callable[[], Plan] | None = None
        self._max: float = math.inf  # ranks that have not been refused yet
        self._missing: list[PlacementGroup] = []
        self.grows = False

    @property
    def num_ranks(self) -> int:
        """Slots of the trained roles' pool at present."""
        return sum(self._manager.resource_pool_spec[self._pool])

    def can_grow(self) -> bool:
        """Return whether there are nodes for missing ranks now."""
        return placement_groups.num_created(self._missing) > 0 and sum(self._fitting(sum(self._full))) > self.num_ranks

    def metrics(self) -> dict[str, float]:
        """Return the number of ranks of each role, if it can change."""
        return {f"training/ranks/{role}": float(group.world_size) for role, group in self._trainer.groups.items()}

    def on_step(self) -> None:
        """Note that a step is complete."""
        self._budgets.refill(Refill.COMPLETED_STEP)

    def plan(self, make_plan: "Callable[[], Plan]", *, job: str, reattach: bool) -> "Plan":
        """Return the placement of all ranks, or of those for which there are nodes."""
        is_first, self._make_plan = self._make_plan is None, make_plan
        if is_first:  # a cluster that has lost all its GPUs must not make this a run on CPUs
            self._manager.use_gpu = "GPU" in self._bundle()
        if reattach:
            sizes = [group.bundle_count for group in placement_groups.groups_of_nodes(f"{job}/{self._pool}")]
            self._manager.resize(self._pool, sizes or self._full)
        elif is_first:
            self._choose(wait_s=self._timeout_s)
        return make_plan()

    def run(self, train: Callable[[], None]) -> None:
        """Train, and start all roles again with another number of ranks when that has to or can change.

        Raises:
            PlacementError: The cluster holds fewer than `trainer.min_ranks`.
            WorkerLost, ObjectLost, CallTimeout: Another number of ranks would not help, or the limit is used up.
        """
        is_ready, start = True, states_in_memory(self._trainer.stateful)
        while True:
            try:
                if not is_ready:
                    self._restart(start)
                    is_ready = True
                train()
                if not self.grows:
                    return
                self._max, self.grows, why = math.inf, False, "machines for missing ranks are there again"
            except (PlacementError, ObjectLost, WorkerLost, CallTimeout) as error:
                self._spend(error, was_ready=is_ready)
                why = "snapshots were lost" if isinstance(error, ObjectLost) else "processes could not be placed again"
                if not is_ready and isinstance(error, CallTimeout):  # other programs use what the nodes have
                    self._max = self.num_ranks - 1
            is_ready = False
            self._choose(wait_s=0.0)
            self._announce(why)

    def _restart(self, start: Mapping[str, Any]) -> None:
        """End all processes and start those of the pools' present sizes, with the newest checkpoint.

        Args:
            start: The driver's own state at step 0, for a run without a checkpoint.
        """
        trainer, begin = self._trainer, time.monotonic()
        trainer.disconnect("all roles start again with another number of ranks")
        trainer.shutdown()
        kill_run(trainer.job, exclude=master_name(trainer.job), timeout_s=END_TIMEOUT_S)
        trainer.init_workers()
        if trainer.saver.committed is not None:
            trainer.load_checkpoint(trainer.saver.committed)
        else:
            trainer.global_steps = 0
            load_from_memory(trainer.stateful, start)
        logger.warning(
            "recovered: all roles are at the end of step %d (%.1f s)", trainer.global_steps, time.monotonic() - begin
        )

    def stop(self) -> None:
        """Withdraw the reservation of the missing slots. Safe to call twice."""
        placement_groups.remove(self._missing)
        self._missing = []

    def _spend(self, error: Exception, *, was_ready: bool) -> None:
        """Count a failure; raises it if this class does not handle it."""
        is_placement = isinstance(error, (PlacementError, ObjectLost))
        if was_ready and not is_placement:
            raise error
        failure = Failure(FailureKind.RANKS_MISSING, str(error), target="all roles")
        carry_out(self._budgets.spend(failure), error)

    def _choose(self, *, wait_s: float) -> None:
        """Set the pool to the largest size that fits, after at most `wait_s` seconds for that of all ranks.

        Raises:
            PlacementError: Fewer than `trainer.min_ranks` fit.
        """
        self.stop()
        until, max_slots = time.monotonic() + wait_s, int(min(self._max, sum(self._full)))
        sizes = self._fitting(max_slots)
        if wait_s and sum(sizes) < sum(self._full):
            logger.warning("nodes for %d of %d ranks; waiting up to %g s", sum(sizes), sum(self._full), wait_s)
        while sum(sizes) < sum(self._full) and time.monotonic() < until:
            time.sleep(POLL_PERIOD_S)
            sizes = self._fitting(max_slots)
        if sum(sizes) < self._min:
            raise PlacementError(
                f"the machines that answer hold {sum(sizes)} of {sum(self._full)} ranks beside the rest of the job, "
                f"fewer than trainer.min_ranks={self._min}; add nodes to the Ray cluster or lower trainer.min_ranks, "
                "and start the same command again: it resumes from its newest checkpoint"
            )
        self._manager.resize(self._pool, sizes)

    def _fitting(self, max_slots: int) -> list[int]:
        """Return the slots per node of the largest pool that the nodes which answer can hold."""
        nodes = alive_capacities()
        bundle = self._bundle()
        capacities = [slots_on_node(bundle, node, limit=max(self._full)) for node in nodes]

        def fits(sizes: Any) -> bool:
            try:
                check_feasible(self._plan_of(sizes).reservations(), nodes)
            except PlacementError:
                return False
            return True

        return largest_fitting(self._full, capacities, max_slots=max_slots, fits=fits, unit=self._unit)

    def _bundle(self) -> Mapping[str, float]:
        """Return the resources of one slot."""
        return self._plan_of(self._full).pool(self._pool).reservations[0].bundles[0]

    def _plan_of(self, sizes: Any) -> "Plan":
        assert self._make_plan is not None
        present = self._manager.resource_pool_spec[self._pool]
        self._manager.resize(self._pool, sizes)
        try:
            return self._make_plan()
        finally:
            self._manager.resize(self._pool, present)

    def request_missing(self) -> None:
        """Request the slots that are missing; Ray reserves them when there is a node.

        Called when all processes have their slots: the request would otherwise compete with theirs.
        """
        if self.num_ranks == sum(self._full) or self._missing:
            return
        present = [*self._manager.resource_pool_spec[self._pool], *[0] * len(self._full)]
        whole = self._plan_of(self._full).pool(self._pool).reservations
        lacking = [
            replace(one, name=f"{one.name}-missing", bundles=one.bundles[present[node] :])
            for node, one in enumerate(whole)
        ]
        self._missing = placement_groups.request([one for one in lacking if one.bundles])
        logger.warning(
            "training with %d of %d ranks; the others are taken back at the end of a step when machines for them join "
            "the Ray cluster",
            self.num_ranks,
            sum(self._full),
        )

    def _announce(self, why: str) -> None:
        """Tell the log, and the master's journal, with how many ranks the run goes on."""
        plan = self._plan_of(self._manager.resource_pool_spec[self._pool])
        sizes = {process.label: len(process.slots) for process in plan.processes}
        text = (
            f"{why}; all roles start again from the newest checkpoint, the trained ones with {self.num_ranks} of "
            f"{sum(self._full)} ranks"
        )
        logger.warning("%s; updates are the same with any number of ranks", text)
        report_ranks(sizes, text)
