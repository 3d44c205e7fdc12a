"""`hybridrl doctor`: what is wrong with this machine, or with a run."""

import argparse
import sys

from hybridrl import doctor


def examine(arguments: argparse.Namespace) -> int:
    """Print what is found, and return 1 if something should be changed."""
    found = [*(doctor.examine_machine() if arguments.run is None else doctor.examine_run(arguments.run))]
    sys.stdout.write("".join(f"{finding}\n" for finding in found))
    return int(any(finding.is_problem for finding in found))
