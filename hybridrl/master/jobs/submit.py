"""`submit`: starts a job on a Ray cluster, under a supervisor actor that runs and restarts its processes.

The submitting process needs neither torch nor the user's modules. The supervisor imports them on the cluster.
"""

import logging
import os
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from hybridrl.driver.cluster import ray_cluster
from hybridrl.driver.cluster.watch import shut_down_ray, watch_in_thread
from hybridrl.driver.terminal import show
from hybridrl.errors import ConfigError, WorkerLost
from hybridrl.import_path import load_object
from hybridrl.master.jobs import NAME_VARIABLE, NOT_STARTED
from hybridrl.master.jobs.entrypoint import check_entries
from hybridrl.master.jobs.job_handle import ResumePoint
from hybridrl.master.jobs.roster import RosterAnswer, RosterState
from hybridrl.master.plan.plan_table import plan_table
from hybridrl.master.plan.planner import choose_device, plan_job
from hybridrl.master.plan.spec import JobSpec
from hybridrl.master.plan.submit_options import MasterOptions
from hybridrl.master.service.journal import replay
from hybridrl.master.service.run_journals import JOURNAL_ROOT
from hybridrl.single_controller import cluster
from hybridrl.single_controller.awaiting import wait_all
from hybridrl.single_controller.placement.feasibility import check_feasible
from hybridrl.single_controller.placement.placement_groups import cluster_nodes, remove_leftover_groups
from hybridrl.single_controller.placement.plan import Plan, actor_options

logger = logging.getLogger(__name__)
SUPERVISOR_CLASS = ("hybridrl.master.jobs.job_supervisor", "JobSupervisor")
LINGER_S = 2.0  # for the outcome to arrive at its receiver before the supervisor exits
ROSTER_THREADS = 4  # of the supervisor, for processes that look up roles
STOP_TIMEOUT_S = 45.0  # the trainer has 30 s of it to exit


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
            WorkerLost: The supervisor was lost with its cluster, or too often.
        """
        try:
            [code] = wait_all([self.outcome], role=cluster.JOB_SUPERVISOR, method="outcome", timeout_s=timeout_s)
        except WorkerLost as error:
            if error.role == cluster.JOB_SUPERVISOR:
                error.add_note(
                    "the job ended with it; start the same command again; training resumes from what it has committed"
                )
            raise
        return code

    def is_finished(self) -> bool:
        """Return whether the job has ended, successfully or not."""
        import ray

        return bool(ray.wait([self.outcome], timeout=0)[0])

    def restart(self) -> None:
        """End all processes of the job and start it again from its last commit.

        A loss of its supervisor has the same effect.

        Raises:
            ConfigError: If the job has ended.
        """
        import ray

        if self.is_finished():
            raise ConfigError(f"{self.name}: the job has ended; submit it again")
        ray.kill(self.supervisor, no_restart=False)

    def stop(self, reason: str = "RunningJob.stop()") -> None:
        """Stop the job: SIGTERM to its trainer, and 30 s later SIGKILL to what is left."""
        import ray

        if not self.is_finished() and (master := cluster.find_actor(cluster.master_name(self.name))) is not None:
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
    check: bool = False,
    journal: str | None = None,
    resume_point: ResumePoint | None = None,
    master: MasterOptions | None = None,
) -> int | RunningJob:
    """Start a job on the connected Ray cluster, else on that of RAY_ADDRESS, else on a new local one.

    Args:
        spec: The job.
        job_name: Default: the environment variable DLROVER_UNIFIED_JOB_NAME, else "job".
        blocking: Wait for the end of the job. Otherwise return at once; the job outlives this process.
        dry_run: Print the plan and start nothing.
        check: First import the entries on this machine, in a process of its own. The supervisor imports them on the
            cluster in any case, before it starts another process.
        journal: Directory on any fsspec path; every run gets a subdirectory. Default: a directory for temporary files,
            on the machine of the supervisor.
        resume_point: Progress of an earlier run, for the trainer's `resume_point`; see `resume.resume_job`.
        master: How the supervisor's process is started.

    Returns:
        Blocking: 0 on success, 143 if the job was stopped; the error that the job failed with is raised. Not blocking:
        a `RunningJob`. With dry_run: 0.

    Raises:
        ConfigError: Before any worker starts, if an entry cannot be imported.
        PlacementError: Before anything starts, if the cluster cannot hold the job.
    """
    name, master = job_name or os.environ.get(NAME_VARIABLE) or "job", master or MasterOptions()
    if check:
        check_entries(spec)
    if dry_run:
        show(plan_table(plan_job(spec, name), spec.edges))
        return 0
    with connection(blocking=blocking):
        nodes = cluster_nodes()
        spec = choose_device(spec, nodes)
        plan = plan_job(spec, f"{name}-{uuid.uuid4().hex[:6]}")
        check_feasible([*master.reservations(plan.job), *plan.reservations()], nodes)
        journal = os.path.join(journal or JOURNAL_ROOT, plan.job)
        journal = journal if "://" in journal else os.path.abspath(journal)  # the supervisor works in another directory
        running = _start(
            spec, plan, name, journal=journal, resume_point=resume_point, detached=not blocking, master=master
        )
        count = len(plan.workers()) + (plan.driver is not None)
        logger.info("started job %s with %d processes; journal: %s", plan.job, count, running.journal)
        if not blocking:
            return running
        try:
            return running.wait()
        finally:
            running.stop("the submitting process no longer waits for the job")


@contextmanager
def connection(*, blocking: bool, address: str | None = None, code_paths: Sequence[str] = ()) -> Iterator[None]:
    """Be connected to the cluster of `submit`; see `connect`.

    An error ends a connection that began here, so that what Ray still prints of its workers comes before the error.
    """
    is_own = connect(blocking=blocking, address=address, code_paths=code_paths)
    try:
        yield
    except Exception:
        if is_own:
            shut_down_ray()
        raise


def connect(*, blocking: bool, address: str | None = None, code_paths: Sequence[str] = ()) -> bool:
    """Connect to the cluster of `submit`, and return True; return False if this process is connected already.

    Args:
        blocking: See `submit`.
        address: The cluster's, from the command line. None: see `submit`.
        code_paths: Directories from which the job's processes also import modules.
    """
    if ray_cluster.is_connected():
        return False
    setting = "--address" if address else "RAY_ADDRESS"
    address = address or os.environ.get("RAY_ADDRESS")
    if not address and not blocking:
        raise ConfigError(
            "blocking=False (--no-wait): a local cluster ends with this process, and the job with it; set RAY_ADDRESS, "
            "or connect to a cluster with ray.init()"
        )
    if address:
        hint = "start a cluster with `ray start --head`, or unset RAY_ADDRESS"
        ray_cluster.connect(address, setting=setting, hint=hint, code_paths=code_paths)
    else:
        ray = ray_cluster.import_ray()
        try:
            ray_cluster.start_cluster(code_paths=code_paths)
        except (OSError, RuntimeError, ray.exceptions.RayError) as error:
            text = " ".join(str(error).split()) or type(error).__name__
            raise ConfigError(
                f"no Ray cluster could be started on this machine ({text}); start the same command again, or set "
                "RAY_ADDRESS to a running cluster"
            ) from error
        watch_in_thread()
    return True


def _start(
    spec: JobSpec,
    plan: Plan,
    name: str,
    *,
    journal: str,
    resume_point: ResumePoint | None,
    detached: bool,
    master: MasterOptions,
) -> RunningJob:
    import ray

    options: dict[str, Any] = {"lifetime": "detached"} if detached else {}
    for reservation in master.reservations(plan.job):
        options |= actor_options(reservation.resources)
    if plan.driver is not None and plan.driver.reservation.labels:
        options["label_selector"] = dict(plan.driver.reservation.labels)
    concurrency_groups = {cluster.PROGRESS_GROUP: 1, cluster.RECOVERY_GROUP: 1, cluster.ROSTER_GROUP: ROSTER_THREADS}
    remote: Any = ray.remote  # its types lack concurrency groups
    process = remote(num_cpus=0, concurrency_groups=concurrency_groups)(JobSupervisorActor).options(
        name=cluster.job_supervisor_name(plan.job),
        namespace=cluster.NAMESPACE,
        max_restarts=master.max_restarts,
        max_task_retries=-1,
        **options,
    )
    supervisor = process.remote(spec.model_dump_json(), name, plan.job, journal, resume_point)
    try:
        wait_all(
            [supervisor.ping.remote()], role=cluster.JOB_SUPERVISOR, method="ping", timeout_s=master.start_timeout_s
        )
        return RunningJob(plan.job, journal, supervisor, supervisor.outcome.remote())
    except BaseException as error:
        ray.kill(supervisor, no_restart=True)
        if isinstance(error, WorkerLost):
            error.add_note(NOT_STARTED)
        raise


class JobSupervisorActor:
    """The Ray actor that runs a `JobSupervisor`.

    It owns the job's processes: when it ends, they end.

    The job starts in `__init__`, because Ray calls nothing else when it restarts an actor.
    """

    def __init__(self, spec: str, job: str, run: str, journal: str, resume_point: ResumePoint | None) -> None:
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
        self._queues: dict[str, str] = {}  # name -> process that holds it
        self._supervisor: Any = None
        self._outcome: Future[int] = Future()
        arguments = (spec, job, run, journal, resume_point)
        threading.Thread(target=self._run, args=arguments, name="supervisor", daemon=True).start()

    def ping(self) -> None:
        """Return nothing. A reply shows that the process has started."""

    def outcome(self) -> int:
        """Wait for the end of the job and return its exit code.

        Raises the error that the job failed with.
        """
        return self._outcome.result()

    def _run(self, spec: str, job: str, run: str, journal: str, resume_point: ResumePoint | None) -> None:
        """Run the job to its end, then exit this process."""
        import ray

        try:
            supervisor_class = load_object(*SUPERVISOR_CLASS)
            parsed = JobSpec.model_validate_json(spec)
            self._supervisor = supervisor_class(
                parsed,
                job=job,
                run=run,
                journal=journal,
                own_handle=ray.get_runtime_context().current_actor,
                resume_point=resume_point,
            )
            # An earlier supervisor of this run was lost if its master is there, or its journal.
            is_restart = cluster.find_actor(cluster.master_name(run)) is not None or replay(journal)[0].run == run
            self._outcome.set_result(self._supervisor.run(is_restart=is_restart))
        except BaseException as error:
            self._outcome.set_exception(error)
        time.sleep(LINGER_S)
        _exit_process()

    def record_progress(self, step: int, commit: str | None, metrics: dict[str, float] | None = None) -> None:
        """See `JobSupervisor.record_progress`. Called by the trainer."""
        self._supervisor.record_progress(step, commit, metrics)

    def recover(self, lost: WorkerLost, names: dict[str, list[str]]) -> dict[str, Any]:
        """See `JobSupervisor.recover`. Called by the trainer."""
        return self._supervisor.recover(lost, names)

    def roster(self, role: str) -> RosterAnswer:
        """See `JobSupervisor.roster`. Called by any process of the job."""
        return RosterAnswer(RosterState.STARTING) if self._supervisor is None else self._supervisor.roster(role)

    def register_queue(self, name: str, process: str) -> str:
        """Return the process that holds the queue `name`: this one if there was none.

        Called by `roster.py`.
        """
        return self._queues.setdefault(name, process)

    def queue_owner(self, name: str) -> str | None:
        """Return the process that holds a queue, or None. Called by `roster.py`."""
        return self._queues.get(name)


def _exit_process() -> None:
    import ray

    ray.kill(ray.get_runtime_context().current_actor, no_restart=True)
