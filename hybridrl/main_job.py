"""`python -m hybridrl.main_job FILE`: start the job that a file describes; `hybridrl job submit` is the same.

Runs in the submitting process, which needs neither torch nor, for YAML and JSON, the user's modules.
"""

from hybridrl.driver.entry import start  # isort: split

import argparse
import logging
import os
import sys
from collections.abc import Sequence

from hybridrl import master
from hybridrl.driver.program import run_program, set_up_logging
from hybridrl.driver.terminal import show
from hybridrl.master.jobs import NAME_VARIABLE

logger = logging.getLogger("hybridrl.main_job")  # not __name__, which is __main__ in the program
WHAT = "start the job that a file describes, and wait for its end"
FILE_HELP = (
    "job.yaml or job.json: `workloads`, or what Job.model_dump_json() wrote; job.py: Python with build(), a job or a "
    "builder, job.py:NAME if it has several"
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program with these arguments (the command line's by default) and return its exit code."""
    parser = argparse.ArgumentParser(prog="python -m hybridrl.main_job", description=WHAT)
    add_arguments(parser)
    arguments = parser.parse_args(argv)
    set_up_logging()
    return run_program(lambda: submit_file(arguments))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that `submit_file` reads."""
    parser.add_argument("file", metavar="FILE", help=FILE_HELP)
    parser.add_argument("--name", help=f"name of the job; default: {NAME_VARIABLE}, the file's `name`, or its own name")
    parser.add_argument("--dry-run", action="store_true", help="print the plan and start nothing")
    parser.add_argument("--check", action="store_true", help="first import the entries on this machine")
    parser.add_argument(
        "--no-wait", action="store_true", help="return when the job has started; it needs a cluster that outlives this"
    )
    parser.add_argument("--journal", metavar="DIR", help="directory or URL for the journals of the job's runs")
    parser.add_argument(
        "--address", metavar="HOST:PORT", help="address of the Ray cluster; default: RAY_ADDRESS, or a new local one"
    )


def submit_file(arguments: argparse.Namespace) -> int:
    """Start the job of `arguments.file` and return its exit code.

    The code is 0 also if the job still runs, and 143 if it was stopped.

    Raises:
        ConfigError: Before anything starts, if the file does not describe one job.
    """
    if arguments.name is not None:
        master.check_job_name(arguments.name, "--name")
    found = master.load_job_file(arguments.file)
    name = arguments.name or os.environ.get(NAME_VARIABLE) or found.name
    # Modules are found in these directories too, as in the job's processes.
    sys.path.extend(folder for folder in (str(found.folder), os.getcwd()) if folder not in sys.path)
    if arguments.check:
        master.check_entries(found.job.spec)
    if arguments.dry_run:
        found.job.dry_run(name)
        return 0
    blocking, code_paths = not arguments.no_wait, [str(found.folder)]
    with master.connection(blocking=blocking, address=arguments.address, code_paths=code_paths):
        started = found.job.submit(name, blocking=blocking, journal=arguments.journal)
    if not isinstance(started, master.RunningJob):
        return started
    show(
        f"{started.name} has started; its journal: {started.journal}\n"
        f"hybridrl job status {started.name}   # or: logs, logs --process PROCESS, stop\n"
    )
    return 0


if __name__ == "__main__":
    start(main)
