"""The program around a `SupervisedTrainer`: read and check settings, start, train, report. Runs in the driver."""

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

from hybridrl import driver, single_controller
from hybridrl.config import SupervisedConfig, load_config
from hybridrl.config.plugs import load_plugins
from hybridrl.driver.program import run_program, set_up_logging
from hybridrl.driver.run_context import RunContext
from hybridrl.driver.terminal import show
from hybridrl.framework.status import reporting
from hybridrl.trainer import run as run_files
from hybridrl.trainer.checkpoint.store import newest_checkpoint
from hybridrl.trainer.data.tokenizer import load_tokenizer
from hybridrl.trainer.roles import ResourcePoolManager
from hybridrl.workers import engine

if TYPE_CHECKING:
    from hybridrl.trainer.supervised.supervised_trainer import SupervisedTrainer

logger = logging.getLogger("hybridrl.main")

Config = TypeVar("Config", bound=SupervisedConfig)


def run_supervised(
    name: str,
    schema: type[Config],
    argv: Sequence[str] | None,
    *,
    check: Callable[[Config], None],
    classes: Callable[[], tuple[type["SupervisedTrainer"], type]],
) -> int:
    """Run the program with these arguments (the command line's by default) and return its exit code.

    Args:
        name: NAME of the program `hybridrl.main_NAME` and of its base preset `NAME_trainer`.
        schema: Schema of the program's settings.
        argv: The arguments.
        check: Raises ConfigError for contradictions in the settings. Plugins are loaded before it runs.
        classes: Returns the driver's trainer and the class of its workers. Called when the settings are known.
    """
    set_up_logging()
    context = RunContext()

    def work() -> None:
        program = f"python -m hybridrl.main_{name}"
        config = load_config(schema, argv, program=program, config_name=f"{name}_trainer")
        if config is not None:
            load_plugins(config)
            check(config)
            with run_files.prepared_run_directory(config.trainer) as context.directory:
                run_files.warn_about_disabled_outputs(config)
                _train(config, context, *classes())

    return run_program(work, context=context, newest_checkpoint=newest_checkpoint)


def _train(
    config: SupervisedConfig, context: RunContext, trainer_cls: type["SupervisedTrainer"], worker_cls: type
) -> None:
    """Train as configured, then write the report."""
    assert config.model.path is not None  # the check of the settings demands it
    model = config.model
    tokenizer = load_tokenizer(config.model.path, key="model.path", trust_remote_code=model.trust_remote_code)
    engine.check_model(
        config.model.path, key="model.path", tokenizer=tokenizer, trust_remote_code=model.trust_remote_code
    )
    if config.trainer.backend == "ray":
        driver.start_ray(num_nodes=config.trainer.nnodes, lifecycle=context.lifecycle)
    use_gpu = {"auto": None, "cpu": False, "cuda": True}[config.trainer.device]
    spec = {"global_pool": [config.trainer.n_gpus_per_node] * config.trainer.nnodes}
    manager = ResourcePoolManager(spec, {}, use_gpu=use_gpu, backend=config.trainer.backend)
    groups = single_controller.RayWorkerGroup if config.trainer.backend == "ray" else single_controller.LocalWorkerGroup
    trainer = trainer_cls(config, tokenizer, worker_cls, manager, groups, context=context)
    logger.info("loading %s into the workers", config.model.path)
    try:
        with trainer.monitored():
            with reporting("loading the models"):
                trainer.init_workers()
            trainer.fit()
    finally:
        trainer.shutdown()
    newest = run_files.newest_checkpoint_of_run(config.trainer)
    show(run_files.report_run(run_files.run_directory(config.trainer), checkpoint=newest))
