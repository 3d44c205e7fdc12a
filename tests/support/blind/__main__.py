"""Blind drills: harm random processes of real runs at random times, and compare the end with that of a calm run.

    make drill                          # ten drills
    make drill N=100 SEED=1             # a hundred, from seed 1 on
    python -m tests.support.blind --seed 7 --n 1 --kind ppo --kind sft --folder outputs/drills

A drill is clean if its run ended with the parameters and the step of the calm run, bit for bit. It is also clean if
the run ended with one error (`clarity.py`), a code other than 0, no traceback and nothing left behind, and the same
command then went on to the calm run's end. No prompt may be lost or repeated (`LedgerAudit`). Every drill is a function
of its seed, and one line. `drills.jsonl` has the details; what a run wrote is kept if its drill was not clean.
"""

import argparse
import json
import signal
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

from hybridrl.trainer.checkpoint.ledger_audit import PromptCount
from tests.support.blind.drill import Drills
from tests.support.blind.plan import KINDS, draw_drill
from tests.support.blind.runs import available_kinds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--n", type=int, default=10, help="number of drills (default: %(default)s)")
    add("--seed", type=int, default=1, help="of the first drill; the next ones count up (default: %(default)s)")
    add("--kind", choices=KINDS, action="append", help="only runs of these kinds (default: drawn from the seed)")
    add("--folder", type=Path, default=Path("outputs/drills"), help="for everything that is written")
    add("--plan", action="store_true", help="print what would happen, and do nothing")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # which ends the drill that runs
    kinds = arguments.kind or available_kinds()
    if arguments.plan:
        for seed in range(arguments.seed, arguments.seed + arguments.n):
            sys.stdout.write(draw_drill(seed, kinds=kinds).to_json() + "\n")
        return 0
    drills = Drills(arguments.folder)
    num_unclean, totals = 0, PromptCount()
    for seed in range(arguments.seed, arguments.seed + arguments.n):
        drill = draw_drill(seed, kinds=kinds, possible=drills.possible)
        try:
            verdict = drills.run(drill)
            is_clean, line, details = verdict.is_clean, verdict.line, verdict.to_json()
            totals += verdict.prompts or PromptCount()
        except (RuntimeError, subprocess.TimeoutExpired) as error:  # of the drill itself; the next one may work
            is_clean, line = False, f"seed {seed}, {drill.kind}: NOT JUDGED: {error}"
            details = asdict(drill) | {"ended": line, "clean": False}
        num_unclean += not is_clean
        sys.stdout.write(line + "\n")
        sys.stdout.flush()
        with open(arguments.folder / "drills.jsonl", "a", encoding="utf-8") as file:
            file.write(json.dumps(details) + "\n")
    sys.stdout.write(f"{arguments.n - num_unclean} of {arguments.n} drills were clean; prompts: {totals}\n")
    return 1 if num_unclean else 0


if __name__ == "__main__":
    sys.exit(main())
