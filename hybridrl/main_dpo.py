"""`python -m hybridrl.main_dpo key=value ...`: preference learning (DPO, IPO, KTO, ORPO, SimPO).

Says which settings, trainer and workers; `trainer/supervised/program.py` runs them. Runs in the driver.
"""

from hybridrl.driver.entry import start  # isort: split

from collections.abc import Sequence

import hybridrl
from hybridrl import algos, workers
from hybridrl.config import DPOConfig, check_dpo_config
from hybridrl.trainer.supervised.program import run_supervised


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program with these arguments (the command line's by default) and return its exit code."""
    return run_supervised(
        "dpo",
        DPOConfig,
        argv,
        check=lambda config: check_dpo_config(config, losses=algos.PREFERENCE_LOSSES),
        classes=lambda: (hybridrl.DPOTrainer, workers.PreferenceWorker),
    )


if __name__ == "__main__":
    start(main)
