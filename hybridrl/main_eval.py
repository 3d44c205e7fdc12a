"""`python -m hybridrl.main_eval key=value ...`: scores of the responses in a file, by their data source.

Reads and checks the settings; `hybridrl/evaluation/scoring.py` does the work. Needs no model and no Ray.
"""

import signal
import sys
from collections.abc import Sequence

if __name__ == "__main__" and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    # Ctrl-C during the imports ends the process without a traceback.
    signal.signal(signal.SIGINT, signal.SIG_DFL)

from hybridrl import evaluation
from hybridrl.config import EvaluationConfig, check_evaluation_config, load_config
from hybridrl.driver.program import run_program, set_up_logging

PROGRAM, PRESET = "python -m hybridrl.main_eval", "evaluation"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program with these arguments (the command line's by default) and return its exit code."""
    set_up_logging()
    codes: list[int] = [0]

    def work() -> None:
        words = sys.argv[1:] if argv is None else argv
        config = load_config(EvaluationConfig, words, program=PROGRAM, config_name=PRESET)
        if config is not None:
            check_evaluation_config(config)
            codes.append(evaluation.score_file(config))

    return run_program(work) or codes[-1]


if __name__ == "__main__":
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.exit(main())
