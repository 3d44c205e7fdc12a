"""`JobWatch`: the driver's side of the master. Starts it, tells it what happens, asks it what it knows, and has it end.

    with JobWatch(job="gsm8k", run="gsm8k-1a2b3c", journal="checkpoints/.../master/gsm8k-1a2b3c") as watch:
        watch.begin_step(1)
        ...
        watch.committed(1, "global_step_1")

Telling costs microseconds and waits for nobody: a thread carries the words, keeps them while the master is away, and
says them again.
"""

import logging
import os
import signal
import time
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Any, Self

from hybridrl.errors import PlacementError, WorkerLost
from hybridrl.master.service.job_master import JobMaster, Watchfulness
from hybridrl.master.state.events import (
    TRAINER,
    Begun,
    Committed,
    Ended,
    Event,
    Failed,
    Kind,
    Level,
    Stepped,
    encode,
    holds,
)
from hybridrl.master.state.tables import JOB_ENDS
from hybridrl.single_controller.cluster import MASTER, NAMESPACE, find_actor, master_name, names_in_use
from hybridrl.single_controller.monitoring.heartbeat_client import Heartbeats, identity
from hybridrl.single_controller.processes.termination import end_named

logger = logging.getLogger(__name__)
TOLD_WITHIN_S = 5.0  # the last words, at the end of a job
ACCOUNT_WITHIN_S = 3.0
RETURNS_WITHIN_S = 20.0  # a master that Ray starts again
CALLS_AT_ONCE = 16  # of the master's methods
# What a trainer that meets a lost worker does about it itself; the master counts and limits it.
TRAINER_LEVELS = (Level.CALL, Level.REPLICA, Level.ROLE, Level.SUBGRAPH)


class JobWatch:
    """Watches over a job from its beginning to its end. A `with` block that is left by an exception has the job fail.

    job: its name. run: this run of it, unlike every other. journal: a directory, on any fsspec path. levels: failures
    that this job survives, see `reducer.py`. again: the trainer was lost, and this is the next one: it takes up its
    master. on_stop: called, in a thread, when somebody asked for the end; by default the process gets SIGTERM.
    limits_itself: whoever makes this counts the failures; the master ends the job for none of them. program: see
    `Begun`. Raises PlacementError when this run has a master.
    """

    def __init__(
        self,
        *,
        job: str,
        run: str,
        journal: str,
        levels: Iterable[int] = TRAINER_LEVELS,
        replicas: Iterable[str] = (),
        again: bool = False,
        hang_s: float = Watchfulness.hang_s,
        on_stop: Callable[[str], None] | None = None,
        limits_itself: bool = False,
        program: int = 0,
    ) -> None:
        self.run, self.step, self.commit = run, 0, ""
        self._doing: tuple[str | None, float] = (None, time.perf_counter())
        self._calls = 0
        begun = Begun(
            job, run, replicas=tuple(replicas), levels=tuple(levels), limits_itself=limits_itself, program=program
        )
        self.master = (again and take_up_master(run)) or start_master(begun, journal, Watchfulness(hang_s))
        introduction = {"slot": TRAINER, "name": f"{run}/{TRAINER}"}
        self._on_stop, self._stop_heard = on_stop or _stop_process, False
        commands = {"stop": self._stop}
        self._heartbeats = Heartbeats(master_name(run), introduction, self._progress, commands)

    def _progress(self) -> dict[str, Any]:
        doing, since = self._doing
        return {"doing": doing, "for_s": round(time.perf_counter() - since, 3), "calls": self._calls, "step": self.step}

    def _stop(self, reason: str) -> None:
        """Stop once; a master that was started again says it again, and a second SIGTERM would be another one."""
        if not self._stop_heard:
            self._stop_heard = True
            self._on_stop(reason)

    # -- telling

    def tell(self, event: Event) -> None:
        """Tell the master; returns at once."""
        self._heartbeats.tell(encode(event))

    def begin_stage(self, name: str) -> None:
        """Note what the driver does from now on; the next heartbeat says it."""
        self._calls += 1
        self._doing = (name, time.perf_counter())

    def end_stage(self) -> None:
        self._doing = (None, time.perf_counter())

    def begin_step(self, step: int) -> None:
        """Tell that a step begins, and with it that the one before is done."""
        self.step = step
        self.tell(Stepped(step))

    def committed(self, step: int, path: str) -> None:
        """Tell of a commit; one that was told already changes nothing."""
        if path != self.commit:
            self.commit = path
            self.tell(Committed(step, path))

    # -- asking

    def describe(self) -> dict[str, Any]:
        """Return what the master knows, see `JobMaster.describe`."""
        import ray

        return ray.get(self.master.describe.remote(), timeout=RETURNS_WITHIN_S)

    def explain(self, error: WorkerLost) -> None:
        """Put what the master knows about a worker's end into the error. Without a master it stays as it is."""
        import ray

        slot = f"{error.role}-{error.rank}"
        try:
            known = ray.get(self.master.describe.remote(), timeout=ACCOUNT_WITHIN_S)["workers"]
            slots = [name for name in known if holds(name, error.role, error.rank)] or [slot]
            account = ray.get(self.master.account.remote(slots[0], ACCOUNT_WITHIN_S), timeout=2 * ACCOUNT_WITHIN_S)
        except (ray.exceptions.RayError, TimeoutError):
            return
        if account:
            error.cause = account
            error.args = (error.role, error.rank, error.method, account)

    # -- the end

    def end(self, *, succeeded: bool, reason: str, within_s: float = TOLD_WITHIN_S) -> None:
        """Tell how the job ended, before its workers are ended, so that nobody takes that for a failure.

        within_s: to be heard.
        """
        self.end_stage()
        self.tell(Ended(succeeded, reason))
        if not self._heartbeats.drain(within_s):
            logger.warning("the master of %s was not there to hear the end of the job", self.run)

    def close(self) -> None:
        """Have the master end once the job's processes are gone, whether or not it heard how the job ended."""
        self._heartbeats.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.end(succeeded=True, reason="done")
        else:
            self.fail(error)
        self.close()

    def fail(self, error: BaseException) -> None:
        """Tell that the trainer gives up, and why."""
        text = f"{type(error).__name__}: {error}"
        if not isinstance(error, (WorkerLost, KeyboardInterrupt, SystemExit)):
            self.tell(Failed(Kind.EXCEPTION, TRAINER, os.getpid(), text, signature=text))
        self.end(succeeded=False, reason=text)


def start_master(begun: Begun, journal: str, watchfulness: Watchfulness) -> Any:
    """Start the master of a run whose trainer this process is, on the same node; return the actor without waiting for
    it.

    Raises PlacementError when the run has one.
    """
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    here = NodeAffinitySchedulingStrategy(
        ray.get_runtime_context().get_node_id(), soft=False
    )  # a soft wish is often not heard
    options = {
        "name": master_name(begun.run),
        "namespace": NAMESPACE,
        "lifetime": "detached",
        "num_cpus": 0,
        "max_restarts": -1,
        "max_concurrency": CALLS_AT_ONCE,
        "scheduling_strategy": here,
    }
    try:
        return ray.remote(JobMaster).options(**options).remote(begun, journal, watchfulness, identity())
    except ValueError as error:
        raise PlacementError(
            f"the run {begun.run!r} has a master on this cluster already; give this one another name"
        ) from error


def take_up_master(run: str) -> Any:
    """Return the master of a run, or None where there is none.

    One that does not answer is given up: its machine is gone.
    """
    import ray

    master = find_actor(master_name(run))
    if master is None:
        return None
    try:
        ray.get(master.address.remote(), timeout=RETURNS_WITHIN_S)
        return master
    except ray.exceptions.RayError as error:
        logger.warning("the master of %s does not come back (%s); this is another one", run, type(error).__name__)
    end_named([master_name(run)], within_s=RETURNS_WITHIN_S)
    return None


def masters() -> dict[str, Any]:
    """Return the masters of the cluster that this process is connected to, by run."""
    names = [name for name in names_in_use() if name.endswith(f"/{MASTER}")]
    return {name.removesuffix(f"/{MASTER}"): master for name in names if (master := find_actor(name)) is not None}


def is_over(description: dict[str, Any]) -> bool:
    """Return whether a job that was described has ended."""
    return description["state"] in JOB_ENDS


def _stop_process(reason: str) -> None:
    logger.warning("this job is to stop: %s", reason)
    os.kill(os.getpid(), signal.SIGTERM)
