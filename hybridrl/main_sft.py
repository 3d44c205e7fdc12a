"""`python -m hybridrl.main_sft key=value ...`: supervised fine-tuning on conversations.

Says which settings, trainer and workers; `trainer/supervised/program.py` runs them. Runs in the driver.
"""

from hybridrl.driver.entry import start  # isort: split

from collections.abc import Sequence

import hybridrl
from hybridrl import workers
from hybridrl.config import SFTConfig, check_sft_config
from hybridrl.trainer.supervised.program import run_supervised


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program with these arguments (the command line's by default) and return its exit code."""
    return run_supervised(
        "sft", SFTConfig, argv, check=check_sft_config, classes=lambda: (hybridrl.SFTTrainer, workers.SFTWorker)
    )


if __name__ == "__main__":
    start(main)
