"""`python -m hybridrl.main_dpo key=value ...`: preference learning (DPO, IPO, KTO, ORPO, SimPO).

Says which settings, trainer and workers; `trainer/supervised/program.py` runs them. Runs in the driver.
"""

import signal
import sys
from collections.abc import Sequence
from functools import partial

if __name__ == "__main__" and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    # Ctrl-C during the seconds of the imports ends the process, without a traceback out of torch.
    signal.signal(signal.SIGINT, signal.SIG_DFL)

from hybridrl.algos.preference_losses import PREFERENCE_LOSSES
from hybridrl.config import DPOConfig, check_dpo_config
from hybridrl.trainer.preference.trainer import DPOTrainer
from hybridrl.trainer.supervised.program import run_supervised
from hybridrl.workers.preference.policy import PreferenceWorker


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program with these arguments (the command line's by default) and return its exit code."""
    return run_supervised(
        DPOConfig,
        argv,
        program="python -m hybridrl.main_dpo",
        preset="dpo_trainer",
        check=partial(check_dpo_config, losses=PREFERENCE_LOSSES),
        trainer_cls=DPOTrainer,
        worker_cls=PreferenceWorker,
    )


if __name__ == "__main__":
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.exit(main())
