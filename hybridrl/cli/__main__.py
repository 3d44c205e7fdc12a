"""`python -m hybridrl.cli`: the `hybridrl` command."""

import sys
from collections.abc import Sequence

from hybridrl import cli
from hybridrl.cli.arguments import command_parser
from hybridrl.driver.program import run_program, set_up_logging

MOVED = {"simulate": "python -m benchmarks.simulation, from a checkout of hybridrl; see docs/simulation.md"}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command with these arguments (the command line's by default) and return its exit code."""
    parser = command_parser()
    if argv is None:
        argv = sys.argv[1:]
    if argv and argv[0] in MOVED:
        parser.error(f"{argv[0]} is now {MOVED[argv[0]]}")
    arguments, settings = parser.parse_known_args(argv)
    if settings and arguments.run_command not in ("evaluate", "inspect_file", "plan", "replay", "show_graph", "train"):
        parser.error(f"unrecognized arguments: {' '.join(settings)}")
    arguments.settings = settings
    set_up_logging()
    return run_program(lambda: getattr(cli, arguments.run_command)(arguments))


if __name__ == "__main__":
    sys.exit(main())
