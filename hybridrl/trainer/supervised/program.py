"""The program around a `SupervisedTrainer`: read and check settings, start, train, report. Runs in the driver."""

import logging
import sys
from collections.abc import Callable, Sequence
from typing import TypeVar

from hybridrl.config import SupervisedConfig, load_config
from hybridrl.config.plugins import load_plugins
from hybridrl.driver.program import run_program, set_up_logging
from hybridrl.driver.ray_cluster import start_ray
from hybridrl.driver.run_context import RunContext
from hybridrl.single_controller.local_worker_group import LocalWorkerGroup
from hybridrl.single_controller.ray_worker_group import RayWorkerGroup
from hybridrl.trainer.checkpoint.store import newest_checkpoint
from hybridrl.trainer.data.tokenizer import load_tokenizer
from hybridrl.trainer.recovery.master_link import run_under_master
from hybridrl.trainer.roles import ResourcePoolManager
from hybridrl.trainer.run.report import report_run
from hybridrl.trainer.run.setup import (
    newest_checkpoint_of_run,
    prepared_run_directory,
    run_directory,
    warn_about_disabled_outputs,
)
from hybridrl.trainer.supervised.trainer import SupervisedTrainer
from hybridrl.workers.engine.model_files import check_model

logger = logging.getLogger("hybridrl.main")
WORKER_GROUPS = {"ray": RayWorkerGroup, "local": LocalWorkerGroup}

Config = TypeVar("Config", bound=SupervisedConfig)


def run_supervised(
    schema: type[Config],
    argv: Sequence[str] | None,
    *,
    program: str,
    preset: str,
    check: Callable[[Config], None],
    trainer_cls: type[SupervisedTrainer],
    worker_cls: type,
) -> int:
    """Run the program with these arguments (the command line's by default) and return its exit code.

    Args:
        schema: Schema of the program's settings.
        argv: The arguments.
        program: The program as the user types it.
        preset: Name of its base preset.
        check: Raises ConfigError for contradictions in the settings. Plugins are loaded before it runs.
        trainer_cls: The driver's trainer.
        worker_cls: The class of its workers.
    """
    set_up_logging()
    directory: list[str] = []
    context = RunContext()

    def work() -> None:
        config = load_config(schema, sys.argv[1:] if argv is None else argv, program=program, config_name=preset)
        if config is not None:
            load_plugins(config)
            check(config)
            with prepared_run_directory(config.trainer) as prepared:
                directory.append(prepared)
                warn_about_disabled_outputs(config)
                _train(config, context, trainer_cls, worker_cls)

    return run_program(
        work,
        log_directory=lambda: directory[0] if directory else None,
        newest_checkpoint=newest_checkpoint,
        termination=context.termination,
    )


def _train(
    config: SupervisedConfig, context: RunContext, trainer_cls: type[SupervisedTrainer], worker_cls: type
) -> None:
    """Train as configured, then write the report."""
    assert config.model.path is not None  # the check of the settings demands it
    model = config.model
    tokenizer = load_tokenizer(config.model.path, key="model.path", trust_remote_code=model.trust_remote_code)
    check_model(config.model.path, key="model.path", tokenizer=tokenizer, trust_remote_code=model.trust_remote_code)
    if config.trainer.backend == "ray":
        start_ray(num_nodes=config.trainer.nnodes, lifecycle=context.lifecycle)
    use_gpu = {"auto": None, "cpu": False, "cuda": True}[config.trainer.device]
    spec = {"global_pool": [config.trainer.n_gpus_per_node] * config.trainer.nnodes}
    manager = ResourcePoolManager(spec, {}, use_gpu=use_gpu, backend=config.trainer.backend)
    trainer = trainer_cls(
        config, tokenizer, worker_cls, manager, WORKER_GROUPS[config.trainer.backend], context=context
    )
    logger.info("loading %s into the workers", config.model.path)
    try:
        with run_under_master(trainer):
            trainer.init_workers()
            trainer.fit()
    finally:
        trainer.shutdown()
    sys.stdout.write(report_run(run_directory(config.trainer), checkpoint=newest_checkpoint_of_run(config.trainer)))
