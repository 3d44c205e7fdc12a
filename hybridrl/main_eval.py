"""`python -m hybridrl.main_eval key=value ...`: scores of the responses in a file, by their data source.

Reads and checks the settings; `hybridrl/evaluation/scoring.py` does the work. Needs no model and no Ray.
"""

from hybridrl.driver.entry import start  # isort: split

from collections.abc import Sequence

from hybridrl import evaluation
from hybridrl.config import EvaluationConfig, check_evaluation_config, load_config
from hybridrl.driver.program import run_program, set_up_logging

PROGRAM, PRESET = "python -m hybridrl.main_eval", "evaluation"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program with these arguments (the command line's by default) and return its exit code."""
    set_up_logging()

    def work() -> int:
        config = load_config(EvaluationConfig, argv, program=PROGRAM, config_name=PRESET)
        if config is None:
            return 0
        check_evaluation_config(config)
        return evaluation.score_file(config)

    return run_program(work)


if __name__ == "__main__":
    start(main)
