"""`hybridrl trace`: the timeline of a run."""

import argparse
import json
import sys
from pathlib import Path

from hybridrl.errors import ConfigError
from hybridrl.framework.graph.timeline import newest_trace, read_spans, summarize, trace_events


def add_command(commands: argparse._SubParsersAction) -> None:
    """Add the command to those of `hybridrl`."""
    what = "make a timeline of a run with trainer.trace=true, for https://ui.perfetto.dev and chrome://tracing"
    trace = commands.add_parser("trace", help=what, description=what)
    trace.add_argument("run", help="the directory the run wrote to, or one of the jobs in its trace/", type=Path)
    trace.add_argument("--output", metavar="FILE", type=Path, help="default: trace.json in that directory")
    trace.set_defaults(
        run_command=lambda arguments: write_timeline(arguments.run, arguments.output or arguments.run / "trace.json")
    )


def write_timeline(run: Path, output: Path) -> None:
    """Write the timeline of a run's newest job, and print a summary of its times; the run may still be running."""
    trace = newest_trace(run)
    spans = read_spans(trace)
    try:
        output.write_text(json.dumps(trace_events(spans)), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--output {output}: cannot be written ({error.strerror}); choose another file") from error
    sys.stdout.write(
        f"{summarize(spans)}\nwrote {output}, from {trace}; open it in https://ui.perfetto.dev or chrome://tracing\n"
    )
