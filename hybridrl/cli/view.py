"""`hybridrl view`: a web page about one or more runs."""

import argparse

from hybridrl import view


def view_runs(arguments: argparse.Namespace) -> None:
    """Run `hybridrl view`."""
    view.show_runs(arguments.runs, host=arguments.host, port=arguments.port, demo=arguments.demo)
