"""Commands about runs: `hybridrl view` (a page), `hybridrl trace` (the timeline), `hybridrl doctor` (what is wrong)."""

import argparse
import json

from hybridrl.doctor.machine import examine_machine
from hybridrl.doctor.run import examine_run
from hybridrl.driver.terminal import show
from hybridrl.errors import ConfigError
from hybridrl.framework.graph import timeline
from hybridrl.view.command import show_runs


def view_runs(arguments: argparse.Namespace) -> None:
    """Serve a web page about one or more runs."""
    show_runs(arguments.runs, host=arguments.host, port=arguments.port, demo=arguments.demo)


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
