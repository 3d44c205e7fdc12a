"""`submit`: a job starts. The trainer gets a process of its own on the cluster, which launches the others and runs the loop.

What is needed there is imported there: who submits needs neither torch nor the user's modules.
"""

import logging
import os
import sys
import threading
import uuid
from dataclasses import dataclass
from typing import Any

from hybridrl.config.import_path import load_object
from hybridrl.errors import ConfigError
from hybridrl.master.placement import plan_job
from hybridrl.master.plan_table import plan_table
from hybridrl.master.spec import TRAINER, JobSpec
from hybridrl.single_controller.feasibility import check_feasible
from hybridrl.single_controller.naming import NAMESPACE
from hybridrl.single_controller.plan import Plan, actor_options
from hybridrl.single_controller.reservation import machines_of_cluster, remove_left
from hybridrl.single_controller.waiting import gather

logger = logging.getLogger(__name__)
NAME_VARIABLE = "DLROVER_UNIFIED_JOB_NAME"  # as DLRover's users set it
RUN_JOB = ("hybridrl.master.driver", "run_job")
# A trainer's process outlives its loop so long, for its answer to arrive at who waits for it.
LINGER_S = 2.0
FIRST_ANSWER_S = 120.0  # of a process that starts; longer means that nobody gives it its core


@dataclass
class RunningJob:
    """A job that was submitted. name: the given one and six letters, so that the same job can run twice at once."""

    name: str
    trainer: Any
    outcome: Any

    def wait(self, timeout_s: float | None = None) -> int:
        """Return 0 when the job is over. What its trainer raised is raised here; past the time, CallTimeout."""
        gather([self.outcome], role=TRAINER, method="run", timeout_s=timeout_s)
        return 0

    def is_over(self) -> bool:
        """Return whether the job has ended, well or not."""
        import ray

        return bool(ray.wait([self.outcome], timeout=0)[0])

    def stop(self) -> None:
        """End the job's processes, whatever they are doing, and give its devices back."""
        import ray

        ray.kill(self.trainer, no_restart=True)
        remove_left(self.name)


def submit(spec: JobSpec, job_name: str | None = None, *, blocking: bool = True, dry_run: bool = False) -> int | RunningJob:
    """Start a job on the Ray cluster that this process is connected to, or RAY_ADDRESS names; without either, on one started here.

    blocking: return 0 when it is over, and raise what its trainer raised; else return a `RunningJob` at once, which goes on when this
    process ends. dry_run: print the plan, start nothing, return 0.
    job_name: or the environment variable DLROVER_UNIFIED_JOB_NAME.
    Raises PlacementError before anything starts when the cluster cannot hold the job, and ConfigError for a job without a trainer.
    """
    name = job_name or os.environ.get(NAME_VARIABLE) or "job"
    if dry_run:
        sys.stdout.write(plan_table(plan_job(spec, name), spec.edges))
        return 0
    plan = plan_job(spec, f"{name}-{uuid.uuid4().hex[:6]}")
    if plan.driver is None:
        raise ConfigError("this job has no trainer, so nothing would happen in it; add .trainer('module:Class')")
    _connect(blocking=blocking)
    check_feasible(plan.reservations(), machines_of_cluster())
    running = _start(spec, plan, detached=not blocking)
    logger.info("job %s has started: one trainer, worker processes: %d", plan.job, len(plan.workers()))
    if not blocking:
        return running
    try:
        return running.wait()
    finally:
        running.stop()


def _connect(*, blocking: bool) -> None:
    import ray

    if ray.is_initialized():
        return
    address = os.environ.get("RAY_ADDRESS")
    if not address and not blocking:
        raise ConfigError("blocking=False: a cluster that is started here ends with this process, and the job with it; set RAY_ADDRESS")
    ray.init(address=address or "local", include_dashboard=False if not address else None, logging_level=logging.ERROR)


def _start(spec: JobSpec, plan: Plan, *, detached: bool) -> RunningJob:
    import ray

    driver = plan.driver
    assert driver is not None
    [bundle] = driver.reservation.bundles
    options = actor_options(bundle) | ({"lifetime": "detached"} if detached else {})
    if driver.reservation.labels:
        options["label_selector"] = dict(driver.reservation.labels)
    if driver.environment:
        options["runtime_env"] = {"env_vars": dict(driver.environment)}
    process = ray.remote(TrainerProcess).options(
        name=f"{plan.job}/{TRAINER}-0", namespace=NAMESPACE, max_restarts=0, max_concurrency=2, **options
    )
    trainer = process.remote()
    try:
        gather([trainer.ping.remote()], role=TRAINER, method="ping", timeout_s=FIRST_ANSWER_S)
        return RunningJob(plan.job, trainer, trainer.run.remote(spec.model_dump_json(), plan.job))
    except BaseException:
        ray.kill(trainer, no_restart=True)
        raise


class TrainerProcess:
    """The Ray actor in which a trainer runs. It owns the other processes: when it ends, they do."""

    def ping(self) -> None:
        """Return: the process is there."""

    def run(self, spec: str, job: str) -> None:
        """Launch the job and run its trainer, then end this process."""
        try:
            load_object(*RUN_JOB)(JobSpec.model_validate_json(spec), job)
        finally:
            end = threading.Timer(LINGER_S, _end_this_process)
            end.daemon = True
            end.start()


def _end_this_process() -> None:
    import ray

    ray.kill(ray.get_runtime_context().current_actor, no_restart=True)
