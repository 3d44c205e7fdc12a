"""`python -m hybridrl.main_rm key=value ...`: a reward model from pairs of responses.

Says which settings, trainer and workers; `trainer/supervised/program.py` runs them. Runs in the driver.
"""

from hybridrl.driver.entry import start  # isort: split

from collections.abc import Sequence

import hybridrl
from hybridrl import workers
from hybridrl.config import RMConfig, check_rm_config
from hybridrl.trainer.supervised.program import run_supervised


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program with these arguments (the command line's by default) and return its exit code."""
    return run_supervised(
        "rm", RMConfig, argv, check=check_rm_config, classes=lambda: (hybridrl.RMTrainer, workers.RewardTrainingWorker)
    )


if __name__ == "__main__":
    start(main)
