"""Step snapshots that outlive their driver, for the next one.

A supervised driver (`driver/lifecycle.py`) has its snapshots held in Ray's object store by a snapshot store, an actor
that outlives it. The next attempt loads the newest snapshot there, reattaches to the worker processes, and resumes at
the end of that step. Without a snapshot only the newest checkpoint is left: the job is then a new run on the cluster,
and the processes of the old one are killed. Used in the driver.
"""

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import cloudpickle

from hybridrl.driver.lifecycle import DriverLifecycle
from hybridrl.errors import CallTimeout, ObjectLost
from hybridrl.single_controller.cluster import snapshot_store_name
from hybridrl.single_controller.monitoring.snapshot_store import (
    find_snapshot_store,
    load_snapshot,
    start_snapshot_store,
    store_snapshot,
    watch_process,
)
from hybridrl.single_controller.processes.termination import kill_actors, kill_named, kill_process, kill_run
from hybridrl.system.process_stat import FreezeWatch
from hybridrl.trainer.recovery.step_snapshot import ResumeState, StepSnapshot, wait_for_parts

logger = logging.getLogger(__name__)
STORE_ATTEMPTS = 3  # to take one snapshot
STORE_KILL_TIMEOUT_S = 20.0


class SupervisedState(ResumeState):
    """What a supervised driver resumes from, and the store for its own snapshots.

    Args:
        run_name: Name of the run on the cluster.
        snapshot: Snapshot of the previous driver; None in a first attempt.
        store: Snapshot store of the run, None while there is none.
    """

    is_supervised = True

    def __init__(self, run_name: str, *, snapshot: StepSnapshot | None = None, store: Any = None):
        super().__init__(run_name, snapshot=snapshot)
        self._store = store
        self._watch: FreezeWatch | None = None

    def call_surviving(self, groups: Mapping[str, Any], method: str) -> dict[str, Any]:
        """Call a method on all ranks of the groups, and wait for all; the results outlive the driver.

        Raises:
            ObjectLost: The snapshot store was lost `STORE_ATTEMPTS` times in a row.
        """
        import ray

        why: Exception | None = None
        for _ in range(STORE_ATTEMPTS):
            self._start_store()
            try:
                return wait_for_parts(
                    {role: group.call_through_actor(self._store, method) for role, group in groups.items()}
                )
            except (ray.exceptions.RayActorError, ObjectLost) as error:
                why = error
            except CallTimeout as error:
                if error.role:  # a worker's, not the store's
                    raise
                why = error
            logger.warning("snapshot store of %s was lost (%s); starting a new one", self.run_name, _first_line(why))
            self._kill_store()
        raise ObjectLost(
            f"the snapshot store of {self.run_name} was lost {STORE_ATTEMPTS} times in a row ({_first_line(why)}); "
            "restart the run, it resumes from its newest checkpoint"
        )

    def _start_store(self) -> None:
        """Start the snapshot store if there is none, and watch it."""
        if self._store is None:
            self._store = start_snapshot_store(self.run_name)
        if self._watch is None:
            consequence = "the next step starts a new one"
            self._watch = FreezeWatch("the snapshot store", consequence=consequence, kill=kill_process)
            watch_process(self._store, self._watch.set_process)

    def _kill_store(self) -> None:
        """Kill a snapshot store that is lost or does not answer, and wait until its name is free."""
        self._end_watch()
        self._store = None
        kill_named([snapshot_store_name(self.run_name)], timeout_s=STORE_KILL_TIMEOUT_S)

    def _end_watch(self) -> None:
        if self._watch is not None:
            self._watch.stop()
            self._watch = None

    def store(self, snapshot: StepSnapshot) -> None:
        """Store this snapshot for the next driver."""
        description = replace(snapshot, engine_refs={})
        parts = {role: list(references) for role, references in snapshot.engine_refs.items()}
        if not store_snapshot(self._store, cloudpickle.dumps(description), parts):
            logger.warning("snapshot store of %s was lost; the next step starts a new one", self.run_name)
            self._kill_store()

    def drop(self) -> None:
        """End the snapshot store, and with it all snapshots."""
        self._end_watch()
        if self._store is not None:
            kill_actors([self._store])
            self._store = None


def _first_line(error: Exception | None) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0]}" if str(error).strip() else repr(error)


def load_supervised_state(run_name: str, lifecycle: DriverLifecycle) -> SupervisedState:
    """Return what earlier attempts of this driver have left on the cluster."""
    if lifecycle.attempt == 1:
        return SupervisedState(run_name)
    store = find_snapshot_store(run_name)
    found = load_snapshot(store)
    if found is None:
        logger.warning("driver attempt %d: the previous driver left no snapshot; starting a new job", lifecycle.attempt)
        kill_run(run_name)
        return SupervisedState(f"{run_name}.{lifecycle.attempt}")
    description, parts = found
    snapshot = replace(cloudpickle.loads(description), engine_refs=parts)
    if snapshot.channel is not None:
        # The previous driver may have died between send and receive: release the actor that still waits for a receiver.
        snapshot.channel.cancel("the driver was lost")
    return SupervisedState(run_name, snapshot=snapshot, store=store)
