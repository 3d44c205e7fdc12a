"""What every trainer's run has: a directory, a record, and steps that are due for something. Knows no algorithm."""

import functools
import logging
import os
import tempfile
from collections.abc import Callable, Sequence

from hybridrl.config import PPOConfig, SFTConfig, to_dict
from hybridrl.config.schema.trainer import TrainerConfig
from hybridrl.errors import ConfigError
from hybridrl.framework import OnlineRLContext, StepTimer, Task
from hybridrl.framework.graph.timeline import DRIVER, TRACE, StageTracer
from hybridrl.framework.overlap import Places
from hybridrl.framework.stage import StageFn, spec_of, with_spec
from hybridrl.single_controller.monitoring.tracing import DIRECTORY_VARIABLE, is_recording, start_recording
from hybridrl.trainer.checkpoint.store import CheckpointStore
from hybridrl.trainer.run.middleware import BatchContext
from hybridrl.trainer.run.tracking import Tracking

logger = logging.getLogger(__name__)


def run_directory(config: TrainerConfig) -> str:
    """Return where a run writes."""
    return config.default_local_dir or os.path.join("checkpoints", config.project_name, config.experiment_name)


def claim_directory(config: TrainerConfig) -> str:
    """Make the run's directory and return it.

    Raises ConfigError, before anything starts, where nothing can be written, and where a new run would replace the
    record of an older one whose checkpoints are there.
    """
    directory = run_directory(config)
    newest = CheckpointStore(directory).latest()
    if config.resume_mode == "disable" and newest is not None:
        raise ConfigError(
            f"trainer.resume_mode=disable: {newest} is of an earlier run, which trainer.resume_mode=auto "
            "goes on with; for a new run set "
            "trainer.experiment_name or trainer.default_local_dir to something new"
        )
    try:
        os.makedirs(directory, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            pass
    except OSError as error:
        raise ConfigError(
            f"trainer.default_local_dir={directory}: cannot be written ({error.strerror}); choose another directory"
        ) from error
    return directory


def own_checkpoint(config: TrainerConfig) -> str | None:
    """Return the newest commit of this run, or None if it made none and goes on from none in its directory."""
    of_this_run = config.save_freq > 0 or config.resume_mode == "auto"
    return CheckpointStore(run_directory(config)).latest() if of_this_run else None


def tell_what_is_left_out(config: PPOConfig | SFTConfig) -> None:
    """Say at the start what would be missed at the end."""
    trainer = config.trainer
    if trainer.save_freq < 0 and not trainer.val_only:
        logger.warning("trainer.save_freq=-1: no checkpoint will be written, the trained weights end with the run")
    if trainer.test_freq < 0 and config.data.val_files and not trainer.val_only:
        logger.warning(
            "trainer.test_freq=-1: there will be no validation after training; trainer.test_freq=N "
            "validates every N steps"
        )


def tell_what_is_smaller(config: PPOConfig | SFTConfig, *, num_rows: int) -> None:
    """Say where batches will be smaller than was asked for. num_rows: of the training data."""
    batch, size = config.data.train_batch_size, min(config.data.train_batch_size, num_rows)
    if size < batch:
        logger.warning(
            "data.train_batch_size=%d: the training data has %d rows, so every step has only those", batch, num_rows
        )
    mini = config.actor_rollout_ref.actor.ppo_mini_batch_size if isinstance(config, PPOConfig) else size
    if size > mini and size % mini:
        key = "actor_rollout_ref.actor.ppo_mini_batch_size"
        logger.warning("%s=%d: the last optimizer step of every batch has only %d prompts", key, mini, size % mini)


def open_tracking(config: PPOConfig | SFTConfig, *, start_step: int, total_steps: int) -> Tracking:
    """Return the run's loggers, going on behind `start_step`."""
    trainer = config.trainer
    return Tracking(
        trainer.project_name,
        trainer.experiment_name,
        trainer.logger,
        run_directory(trainer),
        to_dict(config),
        start_step=start_step,
        total_steps=total_steps,
    )


def open_trace(config: TrainerConfig, job: str) -> dict[str, str]:
    """Begin to record this process if `trainer.trace` says so, and return the environment that makes its workers record
    too.

    Every process of the job writes a file of its own in the run's `trace/{job}`. `stop_recording` ends it here.
    """
    if not config.trace:
        return {}
    directory = os.path.abspath(os.path.join(run_directory(config), TRACE, job))
    start_recording(directory, DRIVER)
    return {DIRECTORY_VARIABLE: directory}


def run_stages(
    stages: Sequence[Callable[[OnlineRLContext], None]],
    *,
    max_step: int,
    first_step: int = 1,
    change: Callable[[Task], None] = lambda task: None,
    places: Places | None = None,
    wrappers: Sequence[Callable[[StageFn], StageFn]] = (),
) -> None:
    """Run the stages in order, `max_step` times, and time each of them.

    first_step: number of the first step, for those who look at the run. change: what is done to the loop before it
    runs. places: role -> device slots; stages that do not need each other then run side by side, see
    `framework/overlap.py`. wrappers: put around every stage of the run's own.
    """
    with Task(ctx=BatchContext()) as task:
        task.use_wrapper(StepTimer())
        if is_recording():
            task.use_wrapper(StageTracer(first_step=first_step))
        for fn in stages:
            task.use(functools.reduce(_wrapped, wrappers, fn))
        change(task)
        task.run(max_step=max_step, overlap=places)


def _wrapped(fn: StageFn, wrapper: Callable[[StageFn], StageFn]) -> StageFn:
    return with_spec(wrapper(fn), spec_of(fn))


def is_due(freq: int, step: int, *, total_steps: int) -> bool:
    """Return whether something done every `freq` steps and at the end is due; -1 is never."""
    return freq > 0 and (step % freq == 0 or step == total_steps)
