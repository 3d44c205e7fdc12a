"""The parser of the `hybridrl` command."""

import argparse
from collections.abc import Sequence

from hybridrl import __version__
from hybridrl.cli import graph, jobs, models, trace
from hybridrl.driver.program import run_program, set_up_logging


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command with these arguments (the command line's by default) and return its exit code."""
    parser = argparse.ArgumentParser(prog="hybridrl", description="Tools around hybridrl jobs.")
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    job = commands.add_parser("job", help="submit, inspect, stop or resume a job")
    job_commands = job.add_subparsers(dest="what", required=True)
    graph.add_command(job_commands)
    jobs.add_commands(job_commands)
    trace.add_command(commands)
    models.add_commands(commands)
    arguments, settings = parser.parse_known_args(argv)
    if settings and arguments.run_command is not graph.show_graph:
        parser.error(f"unrecognized arguments: {' '.join(settings)}")
    arguments.settings = settings
    set_up_logging()
    codes: list[int | None] = []  # a command returns its exit code, or None for success
    return run_program(lambda: codes.append(arguments.run_command(arguments))) or codes[0] or 0
