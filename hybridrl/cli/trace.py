"""`hybridrl trace`: the timeline of a run."""

import argparse
import json
import sys
from pathlib import Path

from hybridrl.errors import ConfigError
from hybridrl.framework.graph.timeline import newest_trace, read_spans, summarize, trace_events


def write_trace(arguments: argparse.Namespace) -> None:
    """Run `hybridrl trace`."""
    write_timeline(arguments.run, arguments.output or arguments.run / "trace.json")


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
