"""`python -m hybridrl.main_generation key=value ...`: responses of a model to a file of prompts.

Reads and checks the settings; `hybridrl/evaluation/generation.py` does the work. Runs in the driver.
"""

from hybridrl.driver.entry import start  # isort: split

from collections.abc import Sequence

from hybridrl import evaluation
from hybridrl.config import GenerationConfig, check_generation_config, load_config
from hybridrl.driver.program import run_program, set_up_logging
from hybridrl.workers import rollout

PROGRAM, PRESET = "python -m hybridrl.main_generation", "generation"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program with these arguments (the command line's by default) and return its exit code."""
    set_up_logging()

    def work() -> None:
        config = load_config(GenerationConfig, argv, program=PROGRAM, config_name=PRESET)
        if config is not None:
            engine = rollout.rollout_class(config.rollout.name, setting="rollout.name")
            check_generation_config(config, rollout=engine.capabilities)
            evaluation.generate_file(config)

    return run_program(work)


if __name__ == "__main__":
    start(main)
