"""`python -m hybridrl.main_sft key=value ...`: supervised fine-tuning on conversations.

Loads and checks the settings, and trains. Runs in the driver.
"""

import logging
import signal
import sys
from collections.abc import Sequence

if __name__ == "__main__" and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    # Ctrl-C during the seconds of the imports ends the process, without a traceback out of torch.
    signal.signal(signal.SIGINT, signal.SIG_DFL)

from hybridrl.config import SFTConfig, check_sft_config, load_config
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
from hybridrl.trainer.sft.trainer import SFTTrainer
from hybridrl.workers.sft import SFTWorker

logger = logging.getLogger("hybridrl.main_sft")  # not __name__, which is __main__ in the program
PROGRAM = "python -m hybridrl.main_sft"
WORKER_GROUPS = {"ray": RayWorkerGroup, "local": LocalWorkerGroup}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program with these arguments (the command line's by default) and return its exit code."""
    set_up_logging()
    directory: list[str] = []
    context = RunContext()

    def work() -> None:
        config = load_config(
            SFTConfig, sys.argv[1:] if argv is None else argv, program=PROGRAM, config_name="sft_trainer"
        )
        if config is not None:
            check_sft_config(config)
            load_plugins(config)
            with prepared_run_directory(config.trainer) as prepared:
                directory.append(prepared)
                warn_about_disabled_outputs(config)
                run(config, context)

    return run_program(
        work,
        log_directory=lambda: directory[0] if directory else None,
        newest_checkpoint=newest_checkpoint,
        termination=context.termination,
    )


def run(config: SFTConfig, context: RunContext) -> None:
    """Train as configured, then write the report."""
    assert config.model.path is not None  # `check_sft_config` demands it
    tokenizer = load_tokenizer(config.model.path, key="model.path", trust_remote_code=config.model.trust_remote_code)
    if config.trainer.backend == "ray":
        start_ray(num_nodes=config.trainer.nnodes, lifecycle=context.lifecycle)
    use_gpu = {"auto": None, "cpu": False, "cuda": True}[config.trainer.device]
    spec = {"global_pool": [config.trainer.n_gpus_per_node] * config.trainer.nnodes}
    manager = ResourcePoolManager(spec, {}, use_gpu=use_gpu, backend=config.trainer.backend)
    trainer = SFTTrainer(config, tokenizer, SFTWorker, manager, WORKER_GROUPS[config.trainer.backend], context=context)
    logger.info("loading %s into the workers", config.model.path)
    try:
        with run_under_master(trainer):
            trainer.init_workers()
            trainer.fit()
    finally:
        trainer.shutdown()
    sys.stdout.write(report_run(run_directory(config.trainer), checkpoint=newest_checkpoint_of_run(config.trainer)))


if __name__ == "__main__":
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.exit(main())
