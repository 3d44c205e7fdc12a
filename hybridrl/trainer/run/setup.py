"""Set up and run any trainer's loop: run directory, tracking, tracing, stages. Knows no algorithm.

Used by `main_ppo`, `main_sft` and the trainers, in the driver.
"""

import contextlib
import functools
import logging
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence

from hybridrl import framework
from hybridrl.config import PPOConfig, SupervisedConfig, to_dict
from hybridrl.config.schema.trainer import TrainerConfig
from hybridrl.driver.program import ERROR_FILE
from hybridrl.driver.run_context import RunContext
from hybridrl.errors import ConfigError
from hybridrl.framework.context import OnlineRLContext
from hybridrl.framework.stage import DeviceSlots, StageFn, Wrapper, spec_of, with_spec
from hybridrl.framework.status import report_long_stages
from hybridrl.framework.tasks import Task
from hybridrl.framework.wrapper import StepTimer
from hybridrl.single_controller.monitoring import tracing
from hybridrl.system.directory_lock import lock_directory
from hybridrl.system.secrets import without_secrets
from hybridrl.trainer import run
from hybridrl.trainer.checkpoint.reading import find_resume_checkpoint
from hybridrl.trainer.checkpoint.store import CheckpointStore
from hybridrl.trainer.run.middleware import BatchContext, Column
from hybridrl.trainer.run.tracking import Tracking

logger = logging.getLogger(__name__)
CHECK_VARIABLE = "HYBRIDRL_CHECK_STAGES"  # environment variable: 1 checks what stages do to the batch
WRITE_TEST_BYTES = 4096  # an empty file can be made on a full disk


def run_directory(config: TrainerConfig) -> str:
    """Return the directory that a run writes to."""
    return config.default_local_dir or os.path.join("checkpoints", config.project_name, config.experiment_name)


@contextlib.contextmanager
def prepared_run_directory(config: TrainerConfig) -> Iterator[str]:
    """Create the run's directory, and lock it for the duration of the block; called before anything starts.

    The checkpoint that the run will resume from is verified. The error of an earlier attempt is removed.

    Raises:
        CheckpointError: No checkpoint to resume from is whole.
        ConfigError: The directory cannot be written, another program writes to it, or a new run would overwrite the
            record of an older one whose checkpoints are there. Or `trainer.page_port` is in use.
    """
    directory = run_directory(config)
    for key, path in output_directories(config, directory).items():
        _check_writable(key, path)
    with lock_directory(directory):
        _check_not_overwritten(directory, config)
        resume_checkpoint(CheckpointStore(directory), config)
        with contextlib.suppress(OSError):
            os.remove(os.path.join(directory, ERROR_FILE))
        with _page(directory, config.page_port):
            yield directory


def resume_checkpoint(store: CheckpointStore, config: TrainerConfig) -> str | None:
    """Return the verified checkpoint to resume from, or None for a new run, see `find_resume_checkpoint`."""
    is_new = config.resume_mode == "auto" and not store.steps()
    return None if is_new else find_resume_checkpoint(store, config)


def _page(directory: str, port: int | None) -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext() if port is None else run.served_page(directory, port)


def output_directories(config: TrainerConfig, directory: str) -> dict[str, str]:
    """Return setting -> directory, for all directories that a run writes to."""
    samples = {name: getattr(config, name, None) for name in ("rollout_data_dir", "validation_data_dir")}
    return {"default_local_dir": directory} | {name: path for name, path in samples.items() if path}


def _check_not_overwritten(directory: str, config: TrainerConfig) -> None:
    newest = CheckpointStore(directory).latest()
    if config.resume_mode == "disable" and newest is not None:
        raise ConfigError(
            f"trainer.resume_mode=disable: {newest} is of an earlier run, which trainer.resume_mode=auto resumes; for "
            "a new run set trainer.experiment_name or trainer.default_local_dir to a new value"
        )


def _check_writable(key: str, directory: str) -> None:
    try:
        os.makedirs(directory, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory, buffering=0) as file:
            file.write(bytes(WRITE_TEST_BYTES))
    except OSError as error:
        raise ConfigError(
            f"trainer.{key}={directory}: cannot be written ({error.strerror}); choose another directory"
        ) from error


def newest_checkpoint_of_run(config: TrainerConfig) -> str | None:
    """Return the newest checkpoint of this run, or None.

    None if the run saves none and resumes none in its directory.
    """
    of_this_run = config.save_freq > 0 or config.resume_mode == "auto"
    return CheckpointStore(run_directory(config)).latest() if of_this_run else None


def warn_about_disabled_outputs(config: PPOConfig | SupervisedConfig) -> None:
    """Warn at the start about outputs that the settings disable."""
    trainer = config.trainer
    if trainer.save_freq < 0 and not trainer.val_only:
        logger.warning(
            "trainer.save_freq=-1: no checkpoint will be written, the trained weights are lost at the end of the run"
        )
    if trainer.test_freq < 0 and config.data.val_files and not trainer.val_only:
        logger.warning(
            "trainer.test_freq=-1: no validation after training; trainer.test_freq=N validates every N steps"
        )


def warn_about_small_batches(config: PPOConfig | SupervisedConfig, *, num_rows: int) -> None:
    """Warn if batches will be smaller than configured; `num_rows` is of the training data, 0 without any."""
    if not num_rows:
        return
    batch, size = config.data.train_batch_size, min(config.data.train_batch_size, num_rows)
    if isinstance(config, PPOConfig) and config.algorithm.filter_groups.fills_batches:
        size = batch  # a step generates until it is full
    if size < batch:
        logger.warning(
            "data.train_batch_size=%d: the training data has %d rows, so every step has only those", batch, num_rows
        )
    mini = config.actor_rollout_ref.actor.ppo_mini_batch_size if isinstance(config, PPOConfig) else size
    if size > mini and size % mini:
        key = "actor_rollout_ref.actor.ppo_mini_batch_size"
        logger.warning("%s=%d: the last optimizer step of every batch has only %d prompts", key, mini, size % mini)


def open_tracking(config: PPOConfig | SupervisedConfig, *, start_step: int, total_steps: int | None) -> Tracking:
    """Return the run's loggers, which continue after `start_step`."""
    trainer = config.trainer
    return Tracking(
        trainer.project_name,
        trainer.experiment_name,
        trainer.logger,
        run_directory(trainer),
        without_secrets(to_dict(config)),
        start_step=start_step,
        total_steps=total_steps,
    )


def enable_tracing(config: TrainerConfig, job: str, context: RunContext) -> dict[str, str]:
    """Start to record a trace of this process if `trainer.trace` is set; `disable_tracing` ends it.

    Every process of the job writes a file of its own in the run's `trace/{job}`.

    Returns:
        Environment variables that make the workers record too.
    """
    if not config.trace:
        return {}
    directory = os.path.abspath(os.path.join(run_directory(config), tracing.TRACE, job))
    context.trace = tracing.start_recording(directory, tracing.DRIVER)
    return {tracing.DIRECTORY_VARIABLE: directory}


def disable_tracing(context: RunContext) -> None:
    """End the trace of this run, if it records one. Safe to call twice."""
    if context.trace is not None:
        context.trace.close()
        context.trace = None


def run_stages(
    stages: Sequence[Callable[[OnlineRLContext], None]],
    *,
    max_step: int,
    first_step: int = 1,
    change: Callable[[Task], None] = lambda task: None,
    device_slots: DeviceSlots | None = None,
    queued: bool = False,
    wrappers: Sequence[Wrapper] = (),
    columns: Mapping[str, Column] = {},
) -> None:
    """Run the stages in order, `max_step` times, and time each of them.

    Args:
        stages: The loop.
        max_step: Number of steps.
        first_step: Number of the first step, for traces and errors.
        change: Applied to the loop before it runs.
        device_slots: Role -> device slots; submitted work then runs beside other stages, see `framework/overlap.py`.
        queued: Whether roles that share a slot share its process.
        wrappers: Applied to every stage of the run.
        columns: Table of the batch's columns, for the checks of `run/column_check.py`.
    """
    if os.environ.get(CHECK_VARIABLE) == "1":
        wrappers = [*wrappers, functools.partial(run.check_columns, table=columns)]
    with Task(ctx=BatchContext(first_step=first_step)) as task:
        task.use_wrapper(StepTimer(print_per_step=0))
        task.use_wrapper(report_long_stages)
        if tracing.is_recording():
            task.use_wrapper(framework.StageTracer(first_step=first_step))
        for fn in stages:
            task.use(functools.reduce(_wrapped, wrappers, fn))
        change(task)
        task.run(max_step=max_step, overlap=device_slots, queued=queued)


def _wrapped(fn: StageFn, wrapper: Wrapper) -> StageFn:
    return with_spec(wrapper(fn), spec_of(fn))
