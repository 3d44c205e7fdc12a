"""Commands about runs: `hybridrl view` (a page), `hybridrl trace` (the timeline), `hybridrl doctor` (what is wrong)."""

import argparse
import contextlib
import json
import os
import tempfile
import zipfile
from collections.abc import Iterator
from importlib.resources import as_file, files

from hybridrl.cli.arguments import check_port
from hybridrl.doctor.machine import examine_machine
from hybridrl.doctor.run import examine_run
from hybridrl.driver.terminal import show
from hybridrl.errors import ConfigError
from hybridrl.framework.graph import timeline
from hybridrl.view.runs import Run, open_runs
from hybridrl.view.server import ViewServer

ARCHIVE = "demo_run.zip"


def view_runs(arguments: argparse.Namespace) -> None:
    """Serve the page of the runs at `arguments.runs` until Ctrl-C, and print its link.

    Raises:
        ConfigError: There is no run at a path, or the port is in use.
    """
    check_port(arguments.port)
    if not arguments.runs and not arguments.demo:
        raise ConfigError("hybridrl view: name the directory of a run, or use --demo for recorded ones")
    with recorded_runs() if arguments.demo else contextlib.nullcontext() as recorded:
        runs = open_runs([*arguments.runs] if recorded is None else [*arguments.runs, recorded])
        server = ViewServer(runs, host=arguments.host, port=arguments.port)
        server.take_port()
        for run in runs.values():  # before the link is there, so that the page opens at once
            run.metrics.update()
        show(f"{_described(runs)} at {server.link} (Ctrl-C ends it)\n")
        server.serve()


def _described(runs: dict[str, Run]) -> str:
    return f"showing {len(runs)} runs" if len(runs) > 1 else f"showing {next(iter(runs.values())).folder.url}"


@contextlib.contextmanager
def recorded_runs() -> Iterator[str]:
    """Yield a directory with two recorded runs for `--demo`, which is removed afterwards.

    `quickstart` has 40 steps of one process. `soak`, whose workers were killed, has every twentieth step of its first
    1000. `tests/support/view/pack_demo.py` has made the archive.
    """
    with tempfile.TemporaryDirectory(prefix="hybridrl-view-") as folder:
        directory = os.path.join(folder, "demo")
        with as_file(files("hybridrl.view") / ARCHIVE) as path, zipfile.ZipFile(path) as archive:
            archive.extractall(directory)
        yield directory


def examine(arguments: argparse.Namespace) -> int:
    """Print what is wrong with this machine or with a run, and return 1 if something should be changed."""
    found = [*(examine_machine() if arguments.run is None else examine_run(arguments.run))]
    show("".join(f"{finding}\n" for finding in found))
    return int(any(finding.is_problem for finding in found))


def write_trace(arguments: argparse.Namespace) -> None:
    """Write the timeline of a run's newest job, and print a summary of its times; the run may still be running."""
    output = arguments.output or arguments.run / "trace.json"
    trace = timeline.newest_trace(arguments.run)
    spans = timeline.read_spans(trace)
    try:
        output.write_text(json.dumps(timeline.trace_events(spans)), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--output {output}: cannot be written ({error.strerror}); choose another file") from error
    end = f"wrote {output}, from {trace}; open it in https://ui.perfetto.dev or chrome://tracing"
    show(f"{timeline.summarize(spans)}\n{end}\n")
