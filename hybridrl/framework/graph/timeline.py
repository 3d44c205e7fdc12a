"""Make a timeline of a recorded run for Perfetto and chrome://tracing.

    spans = read_spans("run/trace/job")
    json.dump(trace_events(spans), file)

Stages are recorded by `stage_tracer.py`, worker calls and waits by `single_controller/monitoring/tracing.py`.
`hybridrl trace` reads and prints the timeline. Two kinds of trace events are used. Complete events (ph X, ts and dur in
microseconds) must be nested or disjoint within a row. Metadata events (ph M) give rows and groups of rows their names
and order.
"""

import contextlib
import json
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

from hybridrl.driver.text_table import text_table
from hybridrl.errors import DataError
from hybridrl.single_controller.monitoring.tracing import DRIVER, SUFFIX, TRACE

STEPS, MAIN = "steps", "MainThread"
Row = tuple[str, str]  # (group, name within the group)
MIN_IDLE_NS = 50_000  # shorter gaps are the overhead between two calls
ROW_GAP_NS = 1000  # gap between a call and a wait: viewers round times and hide events that overlap on a row


@dataclass(frozen=True)
class Span:
    """A recorded interval.

    Attributes:
        begin: Start, in nanoseconds.
        end: End, in nanoseconds.
        process: Name of the process that recorded it.
        role: Role of the call that the span is, or in which it lies.
        rank: Rank of that call.
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
    of: str | None = None  # of a stage: its role

    @property
    def duration(self) -> int:
        return self.end - self.begin

    def contains(self, other: "Span") -> bool:
        return self.begin <= other.begin and other.end <= self.end


def newest_trace(directory: str | Path) -> Path:
    """Return the directory with the spans of a run's newest job.

    Args:
        directory: The run's directory, or the job's directory itself.

    Raises:
        DataError: There are no spans.
    """
    directory = Path(directory)
    if (directory / f"{DRIVER}{SUFFIX}").exists():
        return directory
    jobs = sorted((directory / TRACE).glob(f"*/{DRIVER}{SUFFIX}"), key=lambda path: path.stat().st_mtime)
    if not jobs:
        raise DataError(f"{directory} has no trace; run with trainer.trace=true and give the run's directory")
    return jobs[-1].parent


def read_spans(directory: str | Path) -> list[Span]:
    """Return the spans of all processes of a job, by start.

    A partial line of a killed process, and what is no span, is skipped.
    """
    spans = []
    for path in sorted(Path(directory).glob(f"*{SUFFIX}")):
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            with contextlib.suppress(ValueError, TypeError, RecursionError):
                spans.append(Span(process=path.name.removesuffix(SUFFIX), **json.loads(line)))
    return sorted(spans, key=lambda span: (span.begin, -span.end))


def group_by_step(spans: Iterable[Span]) -> list[Span]:
    """Return one span per step, from its first stage's start to its last end."""
    found: dict[int, list[Span]] = {}
    for stage in spans:
        if stage.kind == "stage" and stage.step is not None:
            found.setdefault(stage.step, []).append(stage)
    ends = {step: (min(s.begin for s in stages), max(s.end for s in stages)) for step, stages in found.items()}
    return [Span("step", f"step {step}", *ends[step], STEPS, DRIVER, step=step) for step in sorted(ends)]


def idle_intervals(spans: Iterable[Span], *, between: tuple[int, int]) -> list[tuple[int, int]]:
    """Return the intervals within `between` in which none of the spans was in progress."""
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
    """Return the timeline as a JSON-serializable object.

    The first group of rows is the driver: its steps, its stages with their waits, its other threads. Each role is a
    group, and each rank of it a row, or several rows where a rank does several things at once. Where a rank's process
    was idle during the steps, its row shows a wait for the next call or for that call's arguments. Times count from the
    first span.
    """
    origin, steps = min((span.begin for span in spans), default=0), group_by_step(spans)
    rows = {(DRIVER, STEPS): steps, (DRIVER, MAIN): [], **_rows(spans)}
    if steps:
        for row, idle in _idle_rows(spans, between=(steps[0].begin, steps[-1].end)).items():
            rows[row] = rows[row] + [_wait(row, *gap) for gap in idle]
    groups = list(dict.fromkeys(group for group, _ in rows))
    events = [_metadata("process_name", groups.index(group) + 1, 0, name=group) for group in groups]
    events += [
        _metadata("process_sort_index", groups.index(group) + 1, 0, sort_index=groups.index(group)) for group in groups
    ]
    for number, ((group, name), entries) in enumerate(rows.items(), start=1):
        pid = groups.index(group) + 1
        tid = 1000 * pid + number  # unique in the file: viewers tell rows apart by tid alone
        events += [
            _metadata("thread_name", pid, tid, name=name),
            _metadata("thread_sort_index", pid, tid, sort_index=number),
        ]
        events += [
            _complete(entry, pid, tid, origin=origin)
            for entry in sorted(entries, key=lambda entry: (entry.begin, -entry.end))
        ]
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _rows(spans: Iterable[Span]) -> dict[Row, list[Span]]:
    """Return the spans by row: one per thread of the driver, one per rank.

    Concurrent spans of a row get further rows.
    """
    threads: dict[Row, dict[str, list[Span]]] = {}
    for entry in sorted(
        spans, key=lambda entry: (entry.role is not None, entry.role or "", entry.rank, entry.begin, -entry.end)
    ):
        row = (entry.process, entry.thread) if entry.role is None else (entry.role, _rank_row(entry.rank))
        threads.setdefault(row, {}).setdefault(entry.thread, []).append(entry)
    rows: dict[Row, list[Span]] = {}
    for (group, name), by_thread in threads.items():
        lanes = [lane for entries in by_thread.values() for lane in assign_lanes(entries)]
        rows |= {(group, f"{name} +{number}" if number else name): lane for number, lane in enumerate(lanes)}
    return rows


def assign_lanes(spans: Iterable[Span]) -> list[list[Span]]:
    """Distribute the spans over lists in which any two are disjoint or nested."""
    lanes: list[tuple[list[Span], list[Span]]] = []  # (all spans, those still open)
    for entry in sorted(spans, key=lambda entry: (entry.begin, -entry.end)):
        fitting = next((pair for pair in lanes if _fits(entry, pair[1])), None)
        if fitting is None:
            fitting = ([], [])
            lanes.append(fitting)
        for entries in fitting:
            entries.append(entry)
    return [lane for lane, _ in lanes]


def _fits(entry: Span, still_open: list[Span]) -> bool:
    """Return whether a span lies inside the innermost open one, after removing ended ones."""
    while still_open and still_open[-1].end <= entry.begin:
        still_open.pop()
    return not still_open or still_open[-1].contains(entry)


def _rank_row(rank: int) -> str:
    return f"rank {rank}"


def _idle_rows(spans: Iterable[Span], *, between: tuple[int, int]) -> dict[Row, list[tuple[int, int]]]:
    """Return the idle intervals of each process, by row.

    They appear in the first row of every role and rank in the process.
    """
    calls: dict[tuple[str, int], list[Span]] = {}
    for entry in spans:
        if entry.kind == "call":
            calls.setdefault((entry.process, entry.rank), []).append(entry)
    found: dict[Row, list[tuple[int, int]]] = {}
    for (_, rank), own in calls.items():
        idle = [(begin, end) for begin, end in idle_intervals(own, between=between) if end - begin >= MIN_IDLE_NS]
        found |= {(role, _rank_row(rank)): idle for role in {entry.role for entry in own if entry.role is not None}}
    return found


def _wait(row: Row, begin: int, end: int) -> Span:
    return Span("wait", "next call", begin + ROW_GAP_NS, end - ROW_GAP_NS, MAIN, row[0], row[0])


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


# -- summary


def summarize(spans: Sequence[Span]) -> str:
    """Return a text table of where the time went, per stage and per rank."""
    steps = group_by_step(spans)
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
    rows = [
        (name, f"{took:.3f}", f"{took / total:.1%}", f"{waited:.3f}")
        for name, (took, waited) in stage_seconds(spans).items()
    ]
    return text_table(("stage", "s", "of the time", "s waiting for workers"), rows, is_ruled=False, num_left=1)


def stage_seconds(spans: Sequence[Span]) -> dict[str, tuple[float, float]]:
    """Return stage -> seconds that it took, and seconds of them in which it waited for workers."""
    waits: dict[str, list[Span]] = {}  # of the driver, by thread; within a thread they are disjoint
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
    return seconds


def _rank_lines(spans: Sequence[Span], between: tuple[int, int]) -> list[str]:
    rows = [
        (times.role, str(times.rank), f"{times.working_s:.3f}", f"{times.waiting_s:.3f}", f"{times.idle_share:.1%}")
        for times in rank_times(spans, between)
    ]
    header = ("role", "rank", "s at work", "s waiting for data", "process waits for its next call")
    return text_table(header, rows, is_ruled=False, num_left=1)


class RankTimes(NamedTuple):
    """What a rank did in an interval: seconds at work, seconds of waiting for data, share without a call."""

    role: str
    rank: int
    working_s: float
    waiting_s: float
    idle_share: float


def rank_times(spans: Sequence[Span], between: tuple[int, int]) -> list[RankTimes]:
    """Return the times of every rank that was called, between two moments in nanoseconds."""
    total = between[1] - between[0]
    calls: dict[tuple[str, int], list[Span]] = {}
    waited: dict[tuple[str, int], int] = {}
    for entry in spans:
        rank_key = (entry.role or "", entry.rank)
        if entry.kind == "call":
            calls.setdefault(rank_key, []).append(entry)
        elif entry.kind == "wait":
            waited[rank_key] = waited.get(rank_key, 0) + max(
                0, min(entry.end, between[1]) - max(entry.begin, between[0])
            )
    idle = {row: _length(gaps) for row, gaps in _idle_rows(spans, between=between).items()}
    found = []
    for (role, rank), own in sorted(calls.items()):
        waiting = waited.get((role, rank), 0)
        working = total - _length(idle_intervals(own, between=between)) - waiting
        share = idle[role, _rank_row(rank)] / total
        found.append(RankTimes(role, rank, working / 1e9, waiting / 1e9, share))
    return found


def _length(intervals: Iterable[tuple[int, int]]) -> int:
    return sum(end - begin for begin, end in intervals)
