"""`submit`: a job starts. A process on the cluster keeps it: starts its trainer and all others, and starts them again.

What is needed there is imported there: who submits needs neither torch nor the user's modules.
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

from hybridrl.config.import_path import load_object
from hybridrl.errors import ConfigError, WorkerLost
from hybridrl.master.jobs.plan_table import plan_table
from hybridrl.master.jobs.planner import plan_job
from hybridrl.master.jobs.spec import JobSpec
from hybridrl.single_controller.awaiting import gather
from hybridrl.single_controller.cluster import (
    KEEPER,
    NAMESPACE,
    NOTES,
    RECOVERIES,
    find_actor,
    keeper_name,
    master_name,
)
from hybridrl.single_controller.placement.feasibility import check_feasible
from hybridrl.single_controller.placement.placement_groups import machines_of_cluster, remove_left
from hybridrl.single_controller.placement.plan import Plan

logger = logging.getLogger(__name__)
NAME_VARIABLE = "DLROVER_UNIFIED_JOB_NAME"  # as DLRover's users set it
KEEPER_CLASS = ("hybridrl.master.jobs.job_supervisor", "JobKeeper")
MOST_RESTARTS = 3  # of a keeper
# A keeper outlives its job so long, for its answer to arrive at who waits for it.
LINGER_S = 2.0
FIRST_ANSWER_S = 120.0  # of a process that starts; longer means that nobody gives it its core
STOP_WITHIN_S = 45.0  # a trainer has 30 s to leave
JOURNALS = os.path.join(tempfile.gettempdir(), f"hybridrl-{os.getuid()}", "jobs")


@dataclass
class RunningJob:
    """A job that was submitted.

    name: of this run, the given one and six letters, so that the same job can run twice at once. journal: where its
    master keeps what happens, on the machine of the keeper: `hybridrl job logs` reads it also when the job is over.
    """

    name: str
    journal: str
    keeper: Any
    outcome: Any

    def wait(self, timeout_s: float | None = None) -> int:
        """Return 0 when the job is over, 143 when it was stopped.

        What it failed of is raised here; past the time, CallTimeout.
        """
        [code] = gather([self.outcome], role=KEEPER, method="outcome", timeout_s=timeout_s)
        return code

    def is_over(self) -> bool:
        """Return whether the job has ended, well or not."""
        import ray

        return bool(ray.wait([self.outcome], timeout=0)[0])

    def stop(self, reason: str = "RunningJob.stop()") -> None:
        """Have the job leave, as `hybridrl job stop` does: its trainer gets SIGTERM, and 30 s later all that is left is
        ended.
        """
        import ray

        if not self.is_over() and (master := find_actor(master_name(self.name))) is not None:
            master.stop.remote(reason)
            ray.wait([self.outcome], timeout=STOP_WITHIN_S)
        ray.kill(self.keeper, no_restart=True)
        remove_left(self.name)


def submit(
    spec: JobSpec,
    job_name: str | None = None,
    *,
    blocking: bool = True,
    dry_run: bool = False,
    journal: str | None = None,
) -> int | RunningJob:
    """Start a job on the Ray cluster that this process is connected to, or RAY_ADDRESS names; without either, on one
    started here.

    blocking: return 0 when it is over, 143 when somebody stopped it, and raise what it failed of; else return a
    `RunningJob` at once, which goes on when this process ends. dry_run: print the plan, start nothing, return 0.
    job_name: or the environment variable DLROVER_UNIFIED_JOB_NAME. journal: a directory on any fsspec path, in which
    every run gets one of its own; by default one for temporary files, on the machine of the job's first process. Raises
    PlacementError before anything starts when the cluster cannot hold the job.
    """
    name = job_name or os.environ.get(NAME_VARIABLE) or "job"
    if dry_run:
        sys.stdout.write(plan_table(plan_job(spec, name), spec.edges))
        return 0
    plan = plan_job(spec, f"{name}-{uuid.uuid4().hex[:6]}")
    _connect(blocking=blocking)
    check_feasible(plan.reservations(), machines_of_cluster())
    running = _start(spec, plan, name, journal=os.path.join(journal or JOURNALS, plan.job), detached=not blocking)
    count = len(plan.workers()) + (plan.driver is not None)
    logger.info("job %s has started; its processes: %d, its journal: %s", plan.job, count, running.journal)
    if not blocking:
        return running
    try:
        return running.wait()
    finally:
        running.stop("who submitted the job does not wait for it any more")


def _connect(*, blocking: bool) -> None:
    import ray

    if ray.is_initialized():
        return
    address = os.environ.get("RAY_ADDRESS")
    if not address and not blocking:
        raise ConfigError(
            "blocking=False: a cluster that is started here ends with this process, and the job with it; "
            "set RAY_ADDRESS"
        )
    ray.init(address=address or "local", include_dashboard=False if not address else None, logging_level=logging.ERROR)


def _start(spec: JobSpec, plan: Plan, name: str, *, journal: str, detached: bool) -> RunningJob:
    import ray

    options: dict[str, Any] = {"lifetime": "detached"} if detached else {}
    if plan.driver is not None and plan.driver.reservation.labels:
        options["label_selector"] = dict(plan.driver.reservation.labels)
    threads = {group: 1 for group in (NOTES, RECOVERIES)}
    process = ray.remote(num_cpus=0, concurrency_groups=threads)(JobProcess).options(
        name=keeper_name(plan.job), namespace=NAMESPACE, max_restarts=MOST_RESTARTS, max_task_retries=-1, **options
    )
    keeper = process.remote(spec.model_dump_json(), name, plan.job, journal)
    try:
        gather([keeper.ping.remote()], role=KEEPER, method="ping", timeout_s=FIRST_ANSWER_S)
        return RunningJob(plan.job, journal, keeper, keeper.outcome.remote())
    except BaseException:
        ray.kill(keeper, no_restart=True)
        raise


class JobProcess:
    """The Ray actor that keeps a job, see `driver.JobKeeper`. It owns the job's processes: when it ends, they do.

    The job begins in `__init__`, because Ray calls nothing else when it starts it again, on this machine or on another.
    """

    def __init__(self, spec: str, job: str, run: str, journal: str) -> None:
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
        self._keeper: Any = None
        self._outcome: Future[int] = Future()
        threading.Thread(target=self._run, args=(spec, job, run, journal), name="keeper", daemon=True).start()

    def ping(self) -> None:
        """Return: the process is there."""

    def outcome(self) -> int:
        """Return the exit code, when the job is over. What it failed of is raised."""
        return self._outcome.result()

    def _run(self, spec: str, job: str, run: str, journal: str) -> None:
        """Run the job to its end, then end this process."""
        import ray

        context = ray.get_runtime_context()
        try:
            keeper_class = load_object(*KEEPER_CLASS)
            parsed = JobSpec.model_validate_json(spec)
            self._keeper = keeper_class(parsed, job=job, run=run, journal=journal, me=context.current_actor)
            self._outcome.set_result(self._keeper.run(again=context.was_current_actor_reconstructed))
        except BaseException as error:
            self._outcome.set_exception(error)
        time.sleep(LINGER_S)
        _end_this_process()

    def note(self, step: int, commit: str | None) -> None:
        """The trainer says which step begins, or what is committed."""
        self._keeper.note(step, commit)

    def recover(self, lost: WorkerLost, names: dict[str, list[str]]) -> dict[str, Any]:
        """The trainer has lost somebody; see `JobKeeper.recover`."""
        return self._keeper.recover(lost, names)


def _end_this_process() -> None:
    import ray

    ray.kill(ray.get_runtime_context().current_actor, no_restart=True)
