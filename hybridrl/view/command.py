"""`hybridrl view`: serve the page until Ctrl-C."""

import contextlib
import sys
from collections.abc import Iterator, Sequence

from hybridrl.errors import ConfigError
from hybridrl.view.demo import recorded_runs
from hybridrl.view.runs import Run, open_runs
from hybridrl.view.server import ViewServer

MAX_PORT = 65535


def show_runs(paths: Sequence[str], *, host: str, port: int, demo: bool) -> None:
    """Serve the page of the runs at these paths, and print its link.

    Args:
        paths: Directories of runs, or with runs in them.
        host: Address to listen at.
        port: 0: any free one.
        demo: Show the recorded runs, too.

    Raises:
        ConfigError: There is no run at a path, or the port is in use.
    """
    if not 0 <= port <= MAX_PORT:
        raise ConfigError(f"--port {port}: must be from 0 (any free port) to {MAX_PORT}")
    if not paths and not demo:
        raise ConfigError("hybridrl view: name the directory of a run, or use --demo for recorded ones")
    with _demo_runs(demo) as more:
        runs = open_runs([*paths, *more])
        server = ViewServer(runs, host=host, port=port)
        server.take_port()
        for run in runs.values():  # before the link is there, so that the page opens at once
            run.metrics.update()
        sys.stdout.write(f"{_described(runs)} at {server.link} (Ctrl-C ends it)\n")
        sys.stdout.flush()
        server.serve()


def _described(runs: dict[str, Run]) -> str:
    return f"showing {len(runs)} runs" if len(runs) > 1 else f"showing {next(iter(runs.values())).folder.url}"


@contextlib.contextmanager
def _demo_runs(demo: bool) -> Iterator[list[str]]:
    if not demo:
        yield []
        return
    with recorded_runs() as directory:
        yield [directory]
