"""`python -m hybridrl.main_sft key=value ...`: supervised fine-tuning on conversations.

Says which settings, trainer and workers; `trainer/supervised/program.py` runs them. Runs in the driver.
"""

import signal
import sys
from collections.abc import Sequence

if __name__ == "__main__" and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    # Ctrl-C during the seconds of the imports ends the process, without a traceback out of torch.
    signal.signal(signal.SIGINT, signal.SIG_DFL)

import hybridrl
from hybridrl import workers
from hybridrl.config import SFTConfig, check_sft_config
from hybridrl.trainer.supervised.program import run_supervised


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program with these arguments (the command line's by default) and return its exit code."""
    return run_supervised(
        SFTConfig,
        argv,
        program="python -m hybridrl.main_sft",
        preset="sft_trainer",
        check=check_sft_config,
        classes=lambda: (hybridrl.SFTTrainer, workers.SFTWorker),
    )


if __name__ == "__main__":
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.exit(main())
