"""A run's timeline: stages are recorded here, and what all processes recorded becomes trace events for Perfetto and
chrome://tracing.

    task.use_wrapper(StageTracer(first_step=1))         # while the run goes, beside the calls and waits of
    single_controller/monitoring/tracing.py spans = read_spans("run/trace/job")                 # afterwards
    json.dump(trace_events(spans), file)

Of the trace event format the three simplest things are used: complete events (ph X: ts and dur in microseconds), which
have to lie inside each other or apart on one row, and metadata events (ph M), which give rows and groups of rows their
names and order.
"""

import contextlib
import functools
import json
from bisect import bisect_left
from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from types import GeneratorType
from typing import Any

from hybridrl.errors import DataError
from hybridrl.framework.stage import StageFn, StageSpec, spec_of
from hybridrl.single_controller.monitoring.tracing import SUFFIX, span

TRACE = "trace"  # the directory of a run that holds the spans: one directory per job, in it one file per process
DRIVER = "driver"  # the driver's file, and its group of rows
STEPS, MAIN = "steps", "MainThread"
Row = tuple[str, str]  # group, and name within it
MIN_IDLE_NS = 50_000  # a rank that is idle for less is between two calls
APART_NS = 1000  # between a call and the wait beside it: viewers round, and what overlaps on a row they do not show


class StageTracer:
    """Records both halves of every stage, under the number of its step.

    first_step: the one that the context counts as 0.
    """

    def __init__(self, *, first_step: int = 1) -> None:
        self.first_step = first_step

    def __call__(self, fn: StageFn) -> StageFn:
        """Return `fn`, recorded."""
        spec = spec_of(fn)

        @functools.wraps(fn)
        def traced(ctx: Any) -> Any:
            with self._span(spec, ctx):
                result = fn(ctx)
                if (
                    isinstance(result, GeneratorType) and next(result, self) is self
                ):  # it ended, or waits for its second half
                    result = None
            return self._second_half(spec, ctx, result) if isinstance(result, GeneratorType) else result

        return traced

    def _second_half(self, spec: StageSpec, ctx: Any, halves: Generator) -> Generator[None, None, None]:
        with contextlib.closing(halves):
            ended = False
            while not ended:
                yield
                with self._span(spec, ctx):
                    ended = next(halves, self) is self

    def _span(self, spec: StageSpec, ctx: Any) -> contextlib.AbstractContextManager[None]:
        return span("stage", spec.name, step=ctx.total_step + self.first_step, of=spec.role or DRIVER)


@dataclass(frozen=True)
class Span:
    """What was recorded.

    begin, end: nanoseconds. process: whose file it stands in. role, rank: of the call it is or is part of.
    """

    kind: str  # "stage", "call" or "wait"
    name: str
    begin: int
    end: int
    thread: str
    process: str
    role: str | None = None
    rank: int = 0
    step: int | None = None  # of a stage
    of: str | None = None  # of a stage: whose work it is

    @property
    def duration(self) -> int:
        return self.end - self.begin

    def holds(self, other: "Span") -> bool:
        return self.begin <= other.begin and other.end <= self.end


def newest_trace(directory: str | Path) -> Path:
    """Return where the spans of a run's newest job are; `directory` may be that place itself.

    Raises DataError where there are none.
    """
    directory = Path(directory)
    if (directory / f"{DRIVER}{SUFFIX}").exists():
        return directory
    jobs = sorted((directory / TRACE).glob(f"*/{DRIVER}{SUFFIX}"), key=lambda path: path.stat().st_mtime)
    if not jobs:
        raise DataError(f"{directory} holds no trace; run with trainer.trace=true and give the run's directory")
    return jobs[-1].parent


def read_spans(directory: str | Path) -> list[Span]:
    """Return what all processes of a job recorded, by its begin.

    A line that a killed process left half-written is skipped.
    """
    spans = []
    for path in sorted(Path(directory).glob(f"*{SUFFIX}")):
        for line in path.read_text(encoding="utf-8").splitlines():
            with contextlib.suppress(json.JSONDecodeError):
                spans.append(Span(process=path.name.removesuffix(SUFFIX), **json.loads(line)))
    return sorted(spans, key=lambda span: (span.begin, -span.end))


def steps_of(spans: Iterable[Span]) -> list[Span]:
    """Return one span for each step: from the begin of its first stage to the end of its last one."""
    found: dict[int, list[Span]] = {}
    for stage in spans:
        if stage.kind == "stage" and stage.step is not None:
            found.setdefault(stage.step, []).append(stage)
    ends = {step: (min(s.begin for s in stages), max(s.end for s in stages)) for step, stages in found.items()}
    return [Span("step", f"step {step}", *ends[step], STEPS, DRIVER, step=step) for step in sorted(ends)]


def idle_of(spans: Iterable[Span], *, between: tuple[int, int]) -> list[tuple[int, int]]:
    """Return when none of these spans was in progress, as (begin, end) in order, within `between`."""
    begin, end = between
    idle = []
    for busy in sorted(spans, key=lambda span: span.begin):
        if busy.begin > begin:
            idle.append((begin, min(busy.begin, end)))
        begin = max(begin, busy.end)
        if begin >= end:
            return idle
    return [*idle, (begin, end)]


# -- trace events


def trace_events(spans: Sequence[Span]) -> dict[str, Any]:
    """Return the timeline as a JSON-able object.

    The driver is the first group of rows: its steps, its stages with what it waited for inside them, its other threads.
    Then every role is a group and every rank a row, or several where a rank does several things at once; where a rank's
    process did nothing during the steps, the row says that it waits for its next call, or for that call's arguments.
    Times count from the first span.
    """
    origin, steps = min((span.begin for span in spans), default=0), steps_of(spans)
    rows = {(DRIVER, STEPS): steps, (DRIVER, MAIN): [], **_rows(spans)}
    if steps:
        for row, idle in _idle_rows(spans, between=(steps[0].begin, steps[-1].end)).items():
            rows[row] = rows[row] + [_wait(row, *gap) for gap in idle]
    groups = list(dict.fromkeys(group for group, _ in rows))
    events = [_metadata("process_name", groups.index(group) + 1, 0, name=group) for group in groups]
    events += [
        _metadata("process_sort_index", groups.index(group) + 1, 0, sort_index=groups.index(group)) for group in groups
    ]
    for number, ((group, row), entries) in enumerate(rows.items(), start=1):
        pid = groups.index(group) + 1
        tid = 1000 * pid + number  # no two rows of the file share one: viewers tell threads apart by it
        events += [
            _metadata("thread_name", pid, tid, name=row),
            _metadata("thread_sort_index", pid, tid, sort_index=number),
        ]
        events += [
            _complete(entry, pid, tid, origin=origin)
            for entry in sorted(entries, key=lambda entry: (entry.begin, -entry.end))
        ]
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _rows(spans: Iterable[Span]) -> dict[Row, list[Span]]:
    """Spans by row: of the driver one for each thread, of a role one for each rank, and more rows for what was done at
    the same time.
    """
    threads: dict[Row, dict[str, list[Span]]] = {}
    for entry in sorted(
        spans, key=lambda entry: (entry.role is not None, entry.role or "", entry.rank, entry.begin, -entry.end)
    ):
        row = (entry.process, entry.thread) if entry.role is None else (entry.role, _rank_row(entry.rank))
        threads.setdefault(row, {}).setdefault(entry.thread, []).append(entry)
    rows: dict[Row, list[Span]] = {}
    for (group, name), by_thread in threads.items():
        lanes = [lane for entries in by_thread.values() for lane in lanes_of(entries)]
        rows |= {(group, f"{name} +{number}" if number else name): lane for number, lane in enumerate(lanes)}
    return rows


def lanes_of(spans: Iterable[Span]) -> list[list[Span]]:
    """Return the spans in as many lists as it takes that in each of them any two lie apart or one inside the other."""
    lanes: list[tuple[list[Span], list[Span]]] = []  # the spans, and those of them that are still open
    for entry in sorted(spans, key=lambda entry: (entry.begin, -entry.end)):
        fitting = next((pair for pair in lanes if _fits(entry, pair[1])), None)
        if fitting is None:
            fitting = ([], [])
            lanes.append(fitting)
        for entries in fitting:
            entries.append(entry)
    return [lane for lane, _ in lanes]


def _fits(entry: Span, still_open: list[Span]) -> bool:
    """Whether a span lies inside the innermost one that is open when it begins; those that are over by
    then are closed.
    """
    while still_open and still_open[-1].end <= entry.begin:
        still_open.pop()
    return not still_open or still_open[-1].holds(entry)


def _rank_row(rank: int) -> str:
    return f"rank {rank}"


def _idle_rows(spans: Iterable[Span], *, between: tuple[int, int]) -> dict[Row, list[tuple[int, int]]]:
    """When no role in a process did anything, for the first row of every role and rank in it."""
    calls: dict[tuple[str, int], list[Span]] = {}
    for entry in spans:
        if entry.kind == "call":
            calls.setdefault((entry.process, entry.rank), []).append(entry)
    found: dict[Row, list[tuple[int, int]]] = {}
    for (_, rank), own in calls.items():
        idle = [(begin, end) for begin, end in idle_of(own, between=between) if end - begin >= MIN_IDLE_NS]
        found |= {(role, _rank_row(rank)): idle for role in {entry.role for entry in own if entry.role is not None}}
    return found


def _wait(row: Row, begin: int, end: int) -> Span:
    return Span("wait", "next call", begin + APART_NS, end - APART_NS, MAIN, row[0], row[0])


def _metadata(name: str, pid: int, tid: int, /, **args: Any) -> dict[str, Any]:
    return {"ph": "M", "name": name, "pid": pid, "tid": tid, "args": args}


def _complete(entry: Span, pid: int, tid: int, *, origin: int) -> dict[str, Any]:
    name = f"wait: {entry.name}" if entry.kind == "wait" else entry.name
    facts = {"step": entry.step, "role": entry.of} if entry.kind == "stage" else {}
    return {
        "ph": "X",
        "name": name,
        "cat": entry.kind,
        "pid": pid,
        "tid": tid,
        "ts": (entry.begin - origin) / 1000,
        "dur": entry.duration / 1000,
        "args": facts,
    }


# -- the numbers of it


def summarize(spans: Sequence[Span]) -> str:
    """Return where the time of the steps went: per stage of the driver, and per rank of every role."""
    steps = steps_of(spans)
    if not steps:
        return "no stage was recorded\n"
    between = (steps[0].begin, steps[-1].end)
    total = (between[1] - between[0]) / 1e9
    lines = [
        f"{len(steps)} steps, {steps[0].name} to {steps[-1].name}, in {total:.3f} s",
        "",
        *_stage_lines(spans, total),
    ]
    return "\n".join([*lines, "", *_rank_lines(spans, between)]) + "\n"


def _stage_lines(spans: Sequence[Span], total: float) -> list[str]:
    waits: dict[str, list[Span]] = {}  # of the driver, by thread; of one thread none overlap
    for entry in spans:
        if entry.kind == "wait" and entry.role is None:
            waits.setdefault(entry.thread, []).append(entry)
    seconds: dict[str, tuple[float, float]] = {}
    for stage in spans:
        if stage.kind == "stage":
            own = waits.get(stage.thread, [])
            first, last = (bisect_left(own, moment, key=attrgetter("begin")) for moment in (stage.begin, stage.end))
            took, waited = seconds.get(stage.name, (0.0, 0.0))
            seconds[stage.name] = (
                took + stage.duration / 1e9,
                waited + sum(wait.duration for wait in own[first:last]) / 1e9,
            )
    rows = [(name, f"{took:.3f}", f"{took / total:.1%}", f"{waited:.3f}") for name, (took, waited) in seconds.items()]
    return _table(("stage", "s", "of the time", "s waiting for workers"), rows)


def _rank_lines(spans: Sequence[Span], between: tuple[int, int]) -> list[str]:
    total = between[1] - between[0]
    calls: dict[tuple[str, int], list[Span]] = {}
    waited: dict[tuple[str, int], int] = {}
    for entry in spans:
        who = (entry.role or "", entry.rank)
        if entry.kind == "call":
            calls.setdefault(who, []).append(entry)
        elif entry.kind == "wait":
            waited[who] = waited.get(who, 0) + max(0, min(entry.end, between[1]) - max(entry.begin, between[0]))
    idle = {row: _length(gaps) for row, gaps in _idle_rows(spans, between=between).items()}
    rows = []
    for (role, rank), own in sorted(calls.items()):
        waiting = waited.get((role, rank), 0)
        working = total - _length(idle_of(own, between=between)) - waiting
        share = idle[role, _rank_row(rank)] / total
        rows.append((role, str(rank), f"{working / 1e9:.3f}", f"{waiting / 1e9:.3f}", f"{share:.1%}"))
    return _table(("role", "rank", "s at work", "s waiting for data", "process waits for its next call"), rows)


def _length(intervals: Iterable[tuple[int, int]]) -> int:
    return sum(end - begin for begin, end in intervals)


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    words = {"role", "stage"}
    return [
        "  ".join(
            cell.ljust(width) if title in words else cell.rjust(width)
            for cell, width, title in zip(row, widths, header, strict=True)
        )
        for row in (header, *rows)
    ]
