"""`hybridrl view`: serve the page until Ctrl-C.

`--demo` shows two recorded runs: `quickstart`, and `soak`, whose workers were killed. `quickstart` has 40 steps of one
process. `soak` has every twentieth step of its first 1000. `tests/support/view/pack_demo.py` has made the archive.
"""

import contextlib
import os
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from importlib.resources import as_file, files

from hybridrl.driver.terminal import show
from hybridrl.errors import ConfigError
from hybridrl.view.runs import Run, open_runs
from hybridrl.view.server import ViewServer

MAX_PORT = 65535
ARCHIVE = "demo_run.zip"


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
    with recorded_runs() if demo else contextlib.nullcontext() as recorded:
        runs = open_runs([*paths] if recorded is None else [*paths, recorded])
        server = ViewServer(runs, host=host, port=port)
        server.take_port()
        for run in runs.values():  # before the link is there, so that the page opens at once
            run.metrics.update()
        show(f"{_described(runs)} at {server.link} (Ctrl-C ends it)\n")
        sys.stdout.flush()
        server.serve()


def _described(runs: dict[str, Run]) -> str:
    return f"showing {len(runs)} runs" if len(runs) > 1 else f"showing {next(iter(runs.values())).folder.url}"


@contextlib.contextmanager
def recorded_runs() -> Iterator[str]:
    """Yield a directory with the recorded runs, which is removed afterwards."""
    with tempfile.TemporaryDirectory(prefix="hybridrl-view-") as folder:
        directory = os.path.join(folder, "demo")
        with as_file(files("hybridrl.view") / ARCHIVE) as path, zipfile.ZipFile(path) as archive:
            archive.extractall(directory)
        yield directory
