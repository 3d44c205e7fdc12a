"""`MasterClient`: the driver's end of the master.

Starts it, reports progress to it, queries it, and ends it.

    with MasterClient(job="gsm8k", run="gsm8k-1a2b3c", journal="checkpoints/.../master/gsm8k-1a2b3c") as master:
        master.report_step(1)
        ...
        master.report_commit(1, "global_step_1")

A report takes microseconds and never blocks: a thread sends it, keeps it while the master is away, and sends it again.
"""

import functools
import logging
import os
import signal
import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Self

from hybridrl.errors import CallTimeout, PlacementError, WorkerLost
from hybridrl.master.service.job_master import HANG_S, JobMaster
from hybridrl.master.state import events
from hybridrl.master.state.tables import JOB_ENDS
from hybridrl.single_controller.cluster import MASTER, actor_names, find_actor, get_value, master_name, process_here
from hybridrl.single_controller.monitoring.heartbeat_client import HeartbeatClient, process_identity
from hybridrl.single_controller.processes.on_node import start_detached
from hybridrl.single_controller.processes.termination import kill_named, kill_process
from hybridrl.system.process_stat import FreezeWatch

logger = logging.getLogger(__name__)
FINAL_REPORT_TIMEOUT_S = 5.0  # for the outcome, at the end of a job
EXIT_REASON_TIMEOUT_S = 3.0
MASTER_RESTART_TIMEOUT_S = 20.0  # for Ray to restart a lost master
MAX_CONCURRENT_CALLS = 16  # of the master's methods


class MasterClient:
    """Connects one run of a job to its master.

    Leaving a `with` block by an exception fails the job.

    Args:
        job: Name of the job.
        run: Unique name of this run.
        journal: Directory on any fsspec path.
        restarts_workers: See `JobStarted`.
        is_restart: Reattach to the master of the previous driver.
        hang_s: How long a method may take, see `HANG_S`.
        on_stop: Called in a thread when a stop was requested. By default the process gets SIGTERM.
        **about: Other attributes of `JobStarted`: `restarts_driver`, `replicas`, `supervisor_pid`, `driver` (the slot
            of this process), `spec` and `plan`.

    Raises:
        PlacementError: If this run has a master already.
    """

    def __init__(
        self,
        *,
        job: str,
        run: str,
        journal: str,
        restarts_workers: bool = True,
        is_restart: bool = False,
        hang_s: float = HANG_S,
        on_stop: Callable[[str], None] | None = None,
        **about: Any,
    ) -> None:
        self.run, self.step, self.commit = run, 0, ""
        self._activity: tuple[str | None, float] = (None, time.perf_counter())
        self._calls = 0
        started = events.JobStarted(job, run, restarts_workers=restarts_workers, **about)
        self.master = (is_restart and reattach_master(run)) or start_master(started, journal, hang_s)
        hello = {"slot": started.driver, "name": f"{run}/{started.driver}"}
        self._on_stop, self._stop_received = on_stop or _stop_process, False
        find = functools.partial(process_here, self.master)
        self._master_watch = FreezeWatch("the master", find=find, consequence="Ray restarts it", kill=kill_process)
        self._heartbeats = HeartbeatClient(master_name(run), hello, self._progress, {"stop": self._stop})

    def _progress(self) -> dict[str, Any]:
        doing, since = self._activity
        return {
            "doing": doing,
            "elapsed_s": round(time.perf_counter() - since, 3),
            "calls": self._calls,
            "step": self.step,
        }

    def _stop(self, reason: str) -> None:
        # A restarted master requests the stop again. A second SIGTERM would end the process at once, without a commit.
        if not self._stop_received:
            self._stop_received = True
            self._on_stop(reason)

    # -- reports

    def send(self, event: events.JobEvent) -> None:
        """Send an event to the master. Returns at once."""
        self._heartbeats.send(events.encode(event))

    def drain(self, timeout_s: float) -> bool:
        """Wait until the master has acknowledged all events, at most `timeout_s`.

        Returns whether it has.
        """
        return self._heartbeats.drain(timeout_s)

    def enter_stage(self, name: str) -> None:
        """Set the stage that the next heartbeats report."""
        self._calls += 1
        self._activity = (name, time.perf_counter())

    def leave_stage(self) -> None:
        self._activity = (None, time.perf_counter())

    def report_step(self, step: int, metrics: Mapping[str, float] | None = None) -> None:
        """Report that a step starts, which also completes the previous one. metrics: shown by `job status`."""
        self.step = step
        self.send(events.StepCompleted(step, dict(metrics or {})))

    def report_commit(self, step: int, path: str) -> None:
        """Report a commit. Reporting the same one again has no effect."""
        if path != self.commit:
            self.commit = path
            self.send(events.CheckpointCommitted(step, path))

    # -- queries

    def describe(self) -> dict[str, Any]:
        """Return the master's description of the job, see `JobMaster.describe`."""
        return get_value(
            self.master.describe.remote(), what="the master's description", timeout_s=MASTER_RESTART_TIMEOUT_S
        )

    def add_exit_reason(self, error: WorkerLost) -> None:
        """Add the reason of a worker's end to the error, if the master has it."""
        if reason := exit_reason_of(self.master, error.role, error.rank):
            error.cause = reason
            error.args = (error.role, error.rank, error.method, reason)

    # -- the end

    def finish_job(self, *, succeeded: bool, reason: str, timeout_s: float = FINAL_REPORT_TIMEOUT_S) -> None:
        """Report the outcome of the job.

        Call it before the workers are killed, so that the master does not count their end as a failure.

        Args:
            succeeded: False for a failure or a stop.
            reason: Why the job ended.
            timeout_s: Longest wait for the master's acknowledgement.
        """
        self.leave_stage()
        self.send(events.JobEnded(succeeded, reason))
        if not self._heartbeats.drain(timeout_s):
            logger.warning(
                "the master of %s did not acknowledge the end of the job within %g s; its journal may lack it",
                self.run,
                timeout_s,
            )

    def close(self) -> None:
        """Close the connection.

        The master ends when the job's processes are gone, also without a reported outcome.
        """
        self._master_watch.stop()
        self._heartbeats.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.finish_job(succeeded=True, reason="done")
        else:
            self.finish_job(succeeded=False, reason=f"{type(error).__name__}: {error}")
        self.close()


def start_master(job_started: events.JobStarted, journal: str, hang_s: float = HANG_S) -> Any:
    """Start the master of this process's run on the same node, and return its actor without waiting.

    Raises:
        PlacementError: If the run has a master already.
    """
    options = {"max_restarts": -1, "max_concurrency": MAX_CONCURRENT_CALLS}
    arguments = (job_started, journal, hang_s, process_identity())
    try:
        return start_detached(master_name(job_started.run), JobMaster, *arguments, must_be_here=True, **options)
    except ValueError as error:
        raise PlacementError(
            f"the run {job_started.run!r} has a master on this cluster already; give this run another name"
        ) from error


def reattach_master(run: str) -> Any:
    """Return the master of a run, or None if there is none.

    Kills a master that does not answer: its machine is gone.
    """
    import ray

    master = find_actor(master_name(run))
    if master is None:
        return None
    try:
        get_value(master.address.remote(), what="the master's address", timeout_s=MASTER_RESTART_TIMEOUT_S)
        return master
    except (ray.exceptions.RayError, CallTimeout) as error:
        logger.warning("the master of %s was lost (%s); starting a new one", run, type(error).__name__)
    kill_named([master_name(run)], timeout_s=MASTER_RESTART_TIMEOUT_S)
    return None


def exit_reason_of(master: Any, role: str, rank: int) -> str:
    """Return how the process of a rank ended, or "" if its master does not know. master: its actor, or None."""
    import ray

    if master is None:
        return ""
    try:
        workers = get_value(master.describe.remote(), what="workers", timeout_s=EXIT_REASON_TIMEOUT_S)["workers"]
        slots = [name for name in workers if events.slot_matches(name, role, rank)] or [f"{role}-{rank}"]
        query = master.exit_reason.remote(slots[0], EXIT_REASON_TIMEOUT_S)
        return get_value(query, what="exit reason", timeout_s=2 * EXIT_REASON_TIMEOUT_S)
    except (ray.exceptions.RayError, CallTimeout):
        return ""


def list_masters() -> dict[str, Any]:
    """Return run -> master of all jobs on the connected cluster."""
    names = [name for name in actor_names() if name.endswith(f"/{MASTER}")]
    return {name.removesuffix(f"/{MASTER}"): master for name in names if (master := find_actor(name)) is not None}


def is_finished(description: dict[str, Any]) -> bool:
    """Return whether the job of this description has ended."""
    return description["state"] in JOB_ENDS


def _stop_process(reason: str) -> None:
    logger.warning("stopping this job with SIGTERM: %s", reason)
    os.kill(os.getpid(), signal.SIGTERM)
