"""A trainer under the eyes of a master: it is told which stage runs, each step and each commit, and
how the job ends.
"""

import functools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from hybridrl.config import SFTConfig
from hybridrl.driver.lifecycle import LIFE
from hybridrl.errors import WorkerLost
from hybridrl.framework import Task, spec_of
from hybridrl.framework.stage import StageFn
from hybridrl.master.service.client import TRAINER_LEVELS, JobWatch
from hybridrl.master.state.events import Level
from hybridrl.single_controller.cluster import MASTER
from hybridrl.trainer.roles import Role
from hybridrl.trainer.run.setup import run_directory


@contextmanager
def watched(trainer: Any) -> Iterator[None]:
    """Have a master watch over what is done inside, as `trainer.master` says; a lost worker's error then says how the
    worker ended.

    trainer: a `RayPPOTrainer` or an `SFTTrainer` whose workers do not run yet. They have to be ended after this, so
    that their end is no failure.
    """
    settings = trainer.config.trainer
    if not settings.master or settings.backend != "ray":
        yield
        return
    journal = os.path.join(os.path.abspath(run_directory(settings)), MASTER, trainer.job)
    with JobWatch(job=settings.experiment_name, run=trainer.job, journal=journal, **_survives(trainer)) as watch:
        LIFE.on_orphaned = functools.partial(watch.end, succeeded=False, reason="its program was killed", within_s=0.5)
        trainer.middleware = [*trainer.middleware, tells(watch)]
        try:
            yield
        except WorkerLost as error:
            watch.explain(error)
            raise


def _survives(trainer: Any) -> dict[str, Any]:
    """Which failures the trainer goes on after, for `JobWatch`."""
    if isinstance(trainer.config, SFTConfig):
        return {"levels": ()}
    rollout = trainer.config.actor_rollout_ref.rollout
    alone = rollout.mode == "async" and rollout.n_gpus_per_node and rollout.tensor_model_parallel_size == 1
    return {
        "replicas": (str(Role.Rollout),) if alone else (),  # the router goes on without one of them
        "levels": TRAINER_LEVELS + ((Level.TRAINER,) if trainer.past.is_kept else ()),
        "limits_itself": True,  # how many losses are too many says `failover.py`
        "again": trainer.past.moment is not None,
        "program": os.getppid() if LIFE.is_kept else 0,
    }


def tells(watch: JobWatch) -> Callable[[Task, Any], None]:
    """Return the change of the loop that has every stage told to the master."""

    def change(task: Task, trainer: Any) -> None:
        def wrapper(fn: StageFn) -> StageFn:
            return _told(fn, spec_of(fn).name, watch, trainer)

        task.use_wrapper(wrapper)

    return change


def _told(fn: StageFn, name: str, watch: JobWatch, trainer: Any) -> StageFn:
    @functools.wraps(fn)
    def told(ctx: Any) -> Any:
        watch.begin_stage(name)
        try:
            return fn(ctx)
        finally:
            watch.end_stage()
            if trainer.global_steps != watch.step:  # `next_batch` counts
                watch.begin_step(trainer.global_steps)
            if name == "save_checkpoint" and (newest := trainer.store.latest()):
                watch.committed(trainer.global_steps, newest)

    return told
