"""`submit`: starts a job on a Ray cluster, under a supervisor actor that runs and restarts its processes.

The submitting process needs neither torch nor the user's modules. The supervisor imports them on the cluster.
"""

import logging
import os
import sys
import tempfile
import threading
import time
import uuid
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from hybridrl.errors import ConfigError, WorkerLost
from hybridrl.failure_policy import RULES, FailureKind
from hybridrl.import_path import load_object
from hybridrl.master.plan.plan_table import plan_table
from hybridrl.master.plan.planner import plan_job
from hybridrl.master.plan.spec import JobSpec
from hybridrl.single_controller.awaiting import wait_all
from hybridrl.single_controller.cluster import (
    JOB_SUPERVISOR,
    NAMESPACE,
    PROGRESS_GROUP,
    RECOVERY_GROUP,
    find_actor,
    job_supervisor_name,
    master_name,
)
from hybridrl.single_controller.placement.feasibility import check_feasible
from hybridrl.single_controller.placement.placement_groups import cluster_nodes, remove_leftover_groups
from hybridrl.single_controller.placement.plan import Plan

logger = logging.getLogger(__name__)
NAME_VARIABLE = "DLROVER_UNIFIED_JOB_NAME"  # as DLRover's users set it
SUPERVISOR_CLASS = ("hybridrl.master.jobs.job_supervisor", "JobSupervisor")
LINGER_S = 2.0  # for the outcome to arrive at its receiver before the supervisor exits
START_TIMEOUT_S = 120.0  # a longer start means that the cluster has no free core
STOP_TIMEOUT_S = 45.0  # the trainer has 30 s of it to exit
JOURNAL_ROOT = os.path.join(tempfile.gettempdir(), f"hybridrl-{os.getuid()}", "jobs")


@dataclass
class RunningJob:
    """A submitted job.

    Attributes:
        name: Name of this run: the given name and six letters, so that the same job can run twice at once.
        journal: Directory of the master's journal, on the supervisor's machine. `hybridrl job logs` reads it, also
            after the job's end.
        supervisor: Handle of the supervisor's actor.
        outcome: Ray reference of the exit code.
    """

    name: str
    journal: str
    supervisor: Any
    outcome: Any

    def wait(self, timeout_s: float | None = None) -> int:
        """Wait for the end of the job. Raises the error that the job failed with.

        Returns:
            0 on success, 143 if the job was stopped.

        Raises:
            CallTimeout: If the job still runs after `timeout_s`.
        """
        [code] = wait_all([self.outcome], role=JOB_SUPERVISOR, method="outcome", timeout_s=timeout_s)
        return code

    def is_finished(self) -> bool:
        """Return whether the job has ended, successfully or not."""
        import ray

        return bool(ray.wait([self.outcome], timeout=0)[0])

    def stop(self, reason: str = "RunningJob.stop()") -> None:
        """Stop the job, as `hybridrl job stop` does: SIGTERM to its trainer, and 30 s later SIGKILL to what is left."""
        import ray

        if not self.is_finished() and (master := find_actor(master_name(self.name))) is not None:
            master.stop.remote(reason)
            ray.wait([self.outcome], timeout=STOP_TIMEOUT_S)
        ray.kill(self.supervisor, no_restart=True)
        remove_leftover_groups(self.name)


def submit(
    spec: JobSpec,
    job_name: str | None = None,
    *,
    blocking: bool = True,
    dry_run: bool = False,
    journal: str | None = None,
) -> int | RunningJob:
    """Start a job on the connected Ray cluster, else on that of RAY_ADDRESS, else on a new local one.

    Args:
        spec: The job.
        job_name: Default: the environment variable DLROVER_UNIFIED_JOB_NAME, else "job".
        blocking: Wait for the end of the job. Otherwise return at once; the job outlives this process.
        dry_run: Print the plan and start nothing.
        journal: Directory on any fsspec path; every run gets a subdirectory. Default: a directory for temporary files,
            on the machine of the supervisor.

    Returns:
        Blocking: 0 on success, 143 if the job was stopped; the error that the job failed with is raised. Not blocking:
        a `RunningJob`. With dry_run: 0.

    Raises:
        PlacementError: Before anything starts, if the cluster cannot hold the job.
    """
    name = job_name or os.environ.get(NAME_VARIABLE) or "job"
    if dry_run:
        sys.stdout.write(plan_table(plan_job(spec, name), spec.edges))
        return 0
    plan = plan_job(spec, f"{name}-{uuid.uuid4().hex[:6]}")
    _connect(blocking=blocking)
    check_feasible(plan.reservations(), cluster_nodes())
    running = _start(spec, plan, name, journal=os.path.join(journal or JOURNAL_ROOT, plan.job), detached=not blocking)
    count = len(plan.workers()) + (plan.driver is not None)
    logger.info("started job %s with %d processes; journal: %s", plan.job, count, running.journal)
    if not blocking:
        return running
    try:
        return running.wait()
    finally:
        running.stop("the submitting process no longer waits for the job")


def _connect(*, blocking: bool) -> None:
    import ray

    if ray.is_initialized():
        return
    address = os.environ.get("RAY_ADDRESS")
    if not address and not blocking:
        raise ConfigError(
            "blocking=False: a local cluster ends with this process, and the job with it; set RAY_ADDRESS, or connect "
            "to a cluster with ray.init()"
        )
    ray.init(address=address or "local", include_dashboard=False if not address else None, logging_level=logging.ERROR)


def _start(spec: JobSpec, plan: Plan, name: str, *, journal: str, detached: bool) -> RunningJob:
    import ray

    options: dict[str, Any] = {"lifetime": "detached"} if detached else {}
    if plan.driver is not None and plan.driver.reservation.labels:
        options["label_selector"] = dict(plan.driver.reservation.labels)
    concurrency_groups = {group: 1 for group in (PROGRESS_GROUP, RECOVERY_GROUP)}
    remote: Any = ray.remote  # its types lack concurrency groups
    process = remote(num_cpus=0, concurrency_groups=concurrency_groups)(JobSupervisorActor).options(
        name=job_supervisor_name(plan.job),
        namespace=NAMESPACE,
        max_restarts=RULES[FailureKind.JOB_SUPERVISOR_LOST].limit,
        max_task_retries=-1,
        **options,
    )
    supervisor = process.remote(spec.model_dump_json(), name, plan.job, journal)
    try:
        wait_all([supervisor.ping.remote()], role=JOB_SUPERVISOR, method="ping", timeout_s=START_TIMEOUT_S)
        return RunningJob(plan.job, journal, supervisor, supervisor.outcome.remote())
    except BaseException:
        ray.kill(supervisor, no_restart=True)
        raise


class JobSupervisorActor:
    """The Ray actor that runs a `JobSupervisor`. It owns the job's processes: when it ends, they end.

    The job starts in `__init__`, because Ray calls nothing else when it restarts an actor.
    """

    def __init__(self, spec: str, job: str, run: str, journal: str) -> None:
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
        self._supervisor: Any = None
        self._outcome: Future[int] = Future()
        threading.Thread(target=self._run, args=(spec, job, run, journal), name="supervisor", daemon=True).start()

    def ping(self) -> None:
        """Return nothing. A reply shows that the process has started."""

    def outcome(self) -> int:
        """Wait for the end of the job and return its exit code. Raises the error that the job failed with."""
        return self._outcome.result()

    def _run(self, spec: str, job: str, run: str, journal: str) -> None:
        """Run the job to its end, then exit this process."""
        import ray

        context = ray.get_runtime_context()
        try:
            supervisor_class = load_object(*SUPERVISOR_CLASS)
            parsed = JobSpec.model_validate_json(spec)
            self._supervisor = supervisor_class(
                parsed, job=job, run=run, journal=journal, own_handle=context.current_actor
            )
            self._outcome.set_result(self._supervisor.run(is_restart=context.was_current_actor_reconstructed))
        except BaseException as error:
            self._outcome.set_exception(error)
        time.sleep(LINGER_S)
        _exit_process()

    def record_progress(self, step: int, commit: str | None) -> None:
        """See `JobSupervisor.record_progress`. Called by the trainer."""
        self._supervisor.record_progress(step, commit)

    def recover(self, lost: WorkerLost, names: dict[str, list[str]]) -> dict[str, Any]:
        """See `JobSupervisor.recover`. Called by the trainer."""
        return self._supervisor.recover(lost, names)


def _exit_process() -> None:
    import ray

    ray.kill(ray.get_runtime_context().current_actor, no_restart=True)
