"""Connect a run to the job master: report stages, steps, commits, and how the job ends. Makes no recovery decision.

`Trainer.monitored` calls `run_under_master` in the driver. The supervisor (`driver/supervisor.py`) calls
`report_final_decision` in its own process when it gives up. A master that still runs writes that into the journal;
without one no other process does, and it is written here.
"""

import functools
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from hybridrl.config import SupervisedConfig
from hybridrl.config.schema.trainer import TrainerConfig
from hybridrl.driver.cluster.ray_cluster import existing_cluster, start_ray
from hybridrl.errors import WorkerLost
from hybridrl.failure_policy import Decision
from hybridrl.framework.stage import StageFn, spec_of
from hybridrl.framework.tasks import Task
from hybridrl.master.service.client import MasterClient
from hybridrl.master.service.journal import JournaledState
from hybridrl.master.state.events import JobEnded, RecoveryDecided
from hybridrl.single_controller.cluster import MASTER, find_actor, master_name
from hybridrl.single_controller.monitoring.process import report_decision
from hybridrl.trainer.roles import Role
from hybridrl.trainer.run.setup import run_directory

logger = logging.getLogger(__name__)


@contextmanager
def run_under_master(trainer: Any) -> Iterator[None]:
    """Monitor the block with a job master.

    A `WorkerLost` raised in the block gets the reason why its worker ended. Shut the workers down after the block, so
    that the master does not count their end as a failure.

    Args:
        trainer: A `RayPPOTrainer` or an `SFTTrainer` whose workers do not run yet.
    """
    settings, lifecycle = trainer.config.trainer, trainer.context.lifecycle
    journal = os.path.join(journal_root(settings), trainer.job)
    with MasterClient(
        job=settings.experiment_name, run=trainer.job, journal=journal, **_recovery_options(trainer)
    ) as watch:
        lifecycle.on_orphaned = functools.partial(
            watch.finish_job, succeeded=False, reason="its program was killed", timeout_s=0.5
        )
        if lifecycle.restarted_by is not None:  # the supervisor has no connection of its own
            report_decision(lifecycle.restarted_by)
        trainer.middleware = [*trainer.middleware, report_stages_to(watch)]
        try:
            yield
        except WorkerLost as error:
            watch.add_exit_reason(error)
            raise


def journal_root(settings: TrainerConfig) -> str:
    """Return the directory with the journals of a run, one for each of its jobs."""
    return os.path.join(os.path.abspath(run_directory(settings)), MASTER)


def _recovery_options(trainer: Any) -> dict[str, Any]:
    """Return arguments for `MasterClient`: who restarts what this job loses."""
    if isinstance(trainer.config, SupervisedConfig):
        return {"restarts_workers": False}
    rollout = trainer.config.actor_rollout_ref.rollout
    replaceable = rollout.mode == "async" and rollout.n_gpus_per_node
    return {
        "replicas": (str(Role.Rollout),) if replaceable else (),  # the router goes on without a replica
        "restarts_driver": trainer.resume_state.outlives_driver,
        "is_restart": trainer.resume_state.snapshot is not None,
        "supervisor_pid": os.getppid() if trainer.context.lifecycle.is_supervised else 0,
    }


def report_stages_to(watch: MasterClient) -> Callable[[Task, Any], None]:
    """Return middleware that reports every stage, step and commit to the master."""

    def change(task: Task, trainer: Any) -> None:
        task.use_wrapper(lambda fn: _reported(fn, spec_of(fn).name, watch, trainer))

    return change


def _reported(fn: StageFn, name: str, watch: MasterClient, trainer: Any) -> StageFn:
    @functools.wraps(fn)
    def reported(ctx: Any) -> Any:
        watch.enter_stage(name)
        try:
            return fn(ctx)
        finally:
            watch.leave_stage()
            if trainer.global_steps != watch.step:  # `next_batch` counts it up
                watch.report_step(trainer.global_steps)
            if name == "save_checkpoint" and (newest := trainer.store.latest()):
                watch.report_commit(trainer.global_steps, newest)

    return reported


# -- the end of a run whose supervisor gives up


def report_final_decision(config: TrainerConfig, run_id: str, decision: Decision, *, num_nodes: int = 1) -> None:
    """Record the decision, and that the job failed.

    A failure of this report is logged; it changes no exit code.

    Args:
        config: Settings of the run.
        run_id: Of the supervisor's drivers.
        decision: What the supervisor decided.
        num_nodes: Machines that the job needs, as for `start_ray`.
    """
    run = _newest_job(journal_root(config), f"{config.experiment_name}-{run_id}")
    if run is None:  # no driver came so far
        return
    journal = os.path.join(journal_root(config), run)
    try:
        if not _sent_to_master(config, run, journal, decision, num_nodes=num_nodes):
            _write(journal, decision)
    except Exception as error:
        logger.warning("the decision of the supervisor is not in the journal %s (%s)", journal, error)


def _newest_job(root: str, run_name: str) -> str | None:
    """Return the name of the newest job of these drivers: one without a snapshot starts job `run_name`.ATTEMPT."""
    names = os.listdir(root) if os.path.isdir(root) else []
    attempts = {int(name.rpartition(".")[2]): name for name in names if name.startswith(f"{run_name}.")}
    return attempts[max(attempts)] if attempts else run_name if run_name in names else None


def _sent_to_master(config: TrainerConfig, run: str, journal: str, decision: Decision, *, num_nodes: int) -> bool:
    """Send the decision to the job's master. Returns False if none runs."""
    import ray

    if is_connected_here := not ray.is_initialized():
        if existing_cluster(num_nodes=num_nodes) is None:  # the supervisor's own, and its master, are gone
            return False
        start_ray(num_nodes=num_nodes)
    try:
        if find_actor(master_name(run)) is None:
            return False
        client = MasterClient(job=config.experiment_name, run=run, journal=journal, is_restart=True)
        report_decision(decision)
        client.finish_job(succeeded=False, reason=str(decision))
        client.close()
        return True
    finally:
        if is_connected_here:
            ray.shutdown()


def _write(journal: str, decision: Decision) -> None:
    state = JournaledState(journal)
    state.apply(RecoveryDecided(**decision.to_json()))
    state.apply(JobEnded(False, str(decision)))
    state.close()
