"""Connect a trainer to the job master: report stages, steps, commits and how the job ends.

`main_ppo` and `main_sft` wrap their training in `run_under_master`; runs in the driver. Makes no recovery decision. A
run without a master does not load the master's code.
"""

import functools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from hybridrl import master
from hybridrl.config import SupervisedConfig
from hybridrl.config.schema.trainer import TrainerConfig
from hybridrl.errors import WorkerLost
from hybridrl.framework.loop import Task
from hybridrl.framework.stage import StageFn, spec_of
from hybridrl.single_controller.cluster import MASTER
from hybridrl.single_controller.monitoring.process import report_decision
from hybridrl.trainer.roles import Role
from hybridrl.trainer.run.setup import run_directory


@contextmanager
def run_under_master(trainer: Any) -> Iterator[None]:
    """Monitor the block with a job master if `trainer.master` is set (backend ray only).

    A `WorkerLost` raised in the block gets the reason why its worker ended. Shut the workers down after the block, so
    that the master does not count their end as a failure.

    Args:
        trainer: A `RayPPOTrainer` or an `SFTTrainer` whose workers do not run yet.
    """
    settings, lifecycle = trainer.config.trainer, trainer.context.lifecycle
    if not settings.master or settings.backend != "ray":
        yield
        return
    journal = os.path.join(journal_root(settings), trainer.job)
    with master.MasterClient(
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
        "restarts_driver": trainer.resume_state.is_supervised,
        "is_restart": trainer.resume_state.snapshot is not None,
        "supervisor_pid": os.getppid() if trainer.context.lifecycle.is_supervised else 0,
    }


def report_stages_to(watch: "master.MasterClient") -> Callable[[Task, Any], None]:
    """Return middleware that reports every stage, step and commit to the master."""

    def change(task: Task, trainer: Any) -> None:
        def wrapper(fn: StageFn) -> StageFn:
            return _reported(fn, spec_of(fn).name, watch, trainer)

        task.use_wrapper(wrapper)

    return change


def _reported(fn: StageFn, name: str, watch: "master.MasterClient", trainer: Any) -> StageFn:
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
