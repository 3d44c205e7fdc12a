"""Step snapshots: the state at the end of a step, in memory, for retries and for the next driver.

`StepRetry` makes a `StepSnapshot` after a step. Its parts are in Ray's object store, and Ray deletes an object when its
owner, the caller that created it, dies. So a driver that its supervisor restarts has the calls made by a
`SnapshotStore`, a detached actor that owns the results: `SurvivingState`. The next attempt loads the newest snapshot
there, reattaches to the worker processes, and resumes at the end of that step. Without a snapshot only the newest
checkpoint is left: the job is then a new run on the cluster, and the processes of the old one are killed.

The driver uses this module; `SnapshotStore` runs in a process of its own.
"""

import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import cloudpickle

from hybridrl.driver.run_context import DriverLifecycle
from hybridrl.errors import CallTimeout, ObjectLost
from hybridrl.single_controller.cluster import find_actor, get_value, process_here, process_of, snapshot_store_name
from hybridrl.single_controller.processes.on_node import start_detached
from hybridrl.single_controller.processes.termination import end_actor, kill_named, kill_process, kill_run
from hybridrl.system.process_stat import FreezeWatch
from hybridrl.trainer.recovery.policies import ResumeState, StepSnapshot, wait_for_parts

logger = logging.getLogger(__name__)
STORE_TIMEOUT_S = 60.0  # for one call of the actor, which takes milliseconds; its first call waits for its start
STORE_ATTEMPTS = 3  # to take one snapshot
STORE_KILL_TIMEOUT_S = 20.0
PARTS_TIMEOUT_S = 20.0  # for ranks that still store their parts when the next driver asks
Stored = tuple[bytes, Mapping[str, Sequence[Any]]]  # the driver's own state, and role -> references


class SnapshotStore:
    """The actor with references to two snapshots and later results; bytes are on other nodes.

    The newest snapshot counts once all ranks have stored their parts of it. Until then the one before counts.
    """

    def __init__(self) -> None:
        self._unstored: list[Any] = []
        self._snapshots: list[tuple[Stored, Sequence[Any]]] = []  # each with references to the sizes of its parts

    def call(self, hosts: Sequence[Any], header: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """Call a role's method in all processes; return references to the results and to their numbers of rows.

        Args:
            header: Of the calls, see `CallHeader`.
        """
        outputs = [host.call_with_num_rows.options(num_returns=2).remote(header) for host in hosts]
        values, sizes = ([pair[i] for pair in outputs] for i in range(2))
        self._unstored += values
        return values, sizes

    def store(self, description: bytes, parts: Mapping[str, Sequence[Any]], sizes: Sequence[Any]) -> None:
        """Keep a snapshot and the one before it.

        Args:
            description: The driver's own state.
            parts: Role -> references that `call` returned.
            sizes: References to the sizes of all parts; one is ready when its part is stored.
        """
        self._snapshots, self._unstored = [*self._snapshots[-1:], ((description, parts), sizes)], []

    def drop_older(self) -> None:
        """Drop the snapshot before the newest one, which is complete."""
        del self._snapshots[:-1]

    def load(self) -> Stored | None:
        """Return the newest complete snapshot."""
        return next((stored for stored, sizes in reversed(self._snapshots) if _is_complete(sizes)), None)


def _is_complete(sizes: Sequence[Any]) -> bool:
    """Return whether all parts of a snapshot are stored, or are within `PARTS_TIMEOUT_S`."""
    import ray

    try:
        get_value(list(sizes), what="the stored parts", timeout_s=PARTS_TIMEOUT_S)
    except (ray.exceptions.RayError, CallTimeout):
        return False
    return True


def start_snapshot_store(run: str) -> Any:
    """Start the snapshot store of a run, preferably on this node; return the actor without waiting for it."""
    return start_detached(snapshot_store_name(run), SnapshotStore, must_be_here=False)


class SurvivingState(ResumeState):
    """What a restarted driver resumes from, and the store for its own snapshots.

    Args:
        run_name: Name of the run on the cluster.
        snapshot: Snapshot of the previous driver; None in a first attempt.
        store: Snapshot store of the run, None while there is none.
    """

    outlives_driver = True

    def __init__(self, run_name: str, *, snapshot: StepSnapshot | None = None, store: Any = None):
        super().__init__(run_name, snapshot=snapshot)
        self._store = store
        self._watch: FreezeWatch | None = None

    def submit_surviving(self, groups: Mapping[str, Any], method: str) -> dict[str, Any]:
        """Have the store call a method on all ranks of the groups.

        Raises:
            ObjectLost: The snapshot store was lost `STORE_ATTEMPTS` times in a row.
        """
        return self._through_store(lambda: self._submit(groups, method))

    def call_surviving(
        self, groups: Mapping[str, Any], method: str, *, started: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Return the references of all ranks' results; call again if the store was lost meanwhile.

        Raises:
            ObjectLost: The snapshot store was lost `STORE_ATTEMPTS` times in a row.
        """
        parts = [] if started is None else [started]
        return self._through_store(lambda: wait_for_parts(parts.pop() if parts else self._submit(groups, method)))

    def _submit(self, groups: Mapping[str, Any], method: str) -> dict[str, Any]:
        return {
            role: group.call_through_actor(self._store, method, timeout_s=STORE_TIMEOUT_S)
            for role, group in groups.items()
        }

    def _through_store(self, call: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Return what `call` returns, with another store after each loss of one."""
        import ray

        why = ""
        for _ in range(STORE_ATTEMPTS):
            self._start_store()
            try:
                return call()
            except (ray.exceptions.RayActorError, ObjectLost, CallTimeout) as error:
                if isinstance(error, CallTimeout) and error.role:  # a worker's, not the store's
                    raise
                why = ": ".join([type(error).__name__, *str(error).strip().splitlines()[:1]])
            self._replace_store(f"{why}; starting a new one")
        raise ObjectLost(
            f"the snapshot store of {self.run_name} was lost {STORE_ATTEMPTS} times in a row ({why}); restart the run, "
            "it resumes from its newest checkpoint"
        )

    def _start_store(self) -> None:
        """Start the snapshot store if there is none, and watch it as soon as it runs."""
        if self._store is None:
            self._store = start_snapshot_store(self.run_name)
        if self._watch is None:
            self._watch = FreezeWatch(
                "the snapshot store",
                find=functools.partial(process_here, self._store),
                consequence="the next step starts a new one",
                kill=kill_process,
            )

    def _replace_store(self, why: str) -> None:
        """Kill a snapshot store that is lost or does not answer, and wait until its name is free."""
        logger.warning("snapshot store of %s was lost (%s)", self.run_name, why)
        self.drop()
        kill_named([snapshot_store_name(self.run_name)], timeout_s=STORE_KILL_TIMEOUT_S)

    def store(self, snapshot: StepSnapshot) -> None:
        """Keep this snapshot for the next driver. Its ranks may still store their parts."""
        import ray

        description = cloudpickle.dumps(replace(snapshot, engine_refs={}))
        parts = {role: list(references) for role, references in snapshot.engine_refs.items()}
        sizes = [size for references in snapshot.engine_refs.values() for size in references.sizes or ()]
        stored = self._store.store.remote(description, parts, sizes)
        try:
            get_value(stored, what="the snapshot store's answer", timeout_s=STORE_TIMEOUT_S)
        except (ray.exceptions.RayActorError, CallTimeout) as error:
            self._replace_store(f"{type(error).__name__}; the next step starts a new one")

    def drop_older(self) -> None:
        if self._store is not None:
            self._store.drop_older.remote()

    def drop(self) -> None:
        """End the snapshot store, also if it is frozen, and with it all snapshots."""
        if self._watch is not None:
            self._watch.stop()
            self._watch = None
        if self._store is not None:
            end_actor(self._store, process_of(self._store))
            self._store = None


def load_surviving_state(run_name: str, lifecycle: DriverLifecycle) -> SurvivingState:
    """Return what earlier attempts of this driver have left on the cluster.

    An attempt that found no snapshot began job `run_name`.ATTEMPT, which later ones resume.
    """
    if lifecycle.attempt == 1:
        return SurvivingState(run_name)
    jobs = [*(f"{run_name}.{number}" for number in range(lifecycle.attempt - 1, 1, -1)), run_name]  # the newest first
    for job in jobs:
        store = find_actor(snapshot_store_name(job))
        found = None if store is None else load_snapshot(store)
        if found is None:
            continue
        if found.channel is not None:
            # The previous driver may have died between send and receive: release the actor that waits for a receiver.
            found.channel.cancel("the driver was lost")
        return SurvivingState(job, snapshot=found, store=store)
    logger.warning("driver attempt %d: the previous driver left no snapshot; starting a new job", lifecycle.attempt)
    for job in jobs:
        kill_run(job)
    return SurvivingState(f"{run_name}.{lifecycle.attempt}")


def load_snapshot(store: Any) -> StepSnapshot | None:
    """Return the stored snapshot; None if there is none, or the store is lost or does not answer."""
    import ray

    try:
        found: Stored | None = get_value(store.load.remote(), what="the stored snapshot", timeout_s=STORE_TIMEOUT_S)
    except (ray.exceptions.RayError, CallTimeout):
        return None
    return None if found is None else replace(cloudpickle.loads(found[0]), engine_refs=found[1])
