"""The timeline of some steps of a run with `trainer.trace`, read from the middle of its trace.

A trace has a file per process. Of each block of lines only its place and the times that it covers stay in memory.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from hybridrl.framework.graph.timeline import Span, rank_times, stage_seconds, trace_events
from hybridrl.single_controller.monitoring.tracing import DRIVER, SUFFIX, TRACE
from hybridrl.view.readers.storage import Folder, LineTail, parsed

BLOCK_LINES = 200
MAX_STEPS = 50  # in one answer
MAX_SPANS = 50_000  # in one answer


@dataclass
class Block:
    """Some consecutive lines: from which byte, and the times in nanoseconds that their spans cover."""

    offset: int
    begin: int
    end: int
    num_lines: int = 0


class SpanFile:
    """The trace of one process.

    Attributes:
        steps: Step -> first begin and last end of its stages, in nanoseconds; of the driver's file.
    """

    def __init__(self, folder: Folder, name: str) -> None:
        self._folder, self._name = folder, name
        self._tail = LineTail(folder, name)
        self._reset()

    def _reset(self) -> None:
        self._blocks: list[Block] = []
        self.steps: dict[int, tuple[int, int]] = {}

    def update(self) -> None:
        """Read what the process has recorded since the last call."""
        for offset, line in self._tail.lines(on_replaced=self._reset):
            if (span := _span(line, "")) is None:
                continue
            if not self._blocks or self._blocks[-1].num_lines >= BLOCK_LINES:
                self._blocks.append(Block(offset, span.begin, span.end))
            block = self._blocks[-1]
            block.begin, block.end = min(block.begin, span.begin), max(block.end, span.end)
            block.num_lines += 1
            if span.kind == "stage" and span.step is not None:
                begin, end = self.steps.get(span.step, (span.begin, span.end))
                self.steps[span.step] = (min(begin, span.begin), max(end, span.end))

    def spans(self, begin: int, end: int) -> Iterator[Span]:
        """Yield the spans that overlap an interval in nanoseconds."""
        process = self._name.removesuffix(SUFFIX)
        ends = [block.offset for block in self._blocks[1:]] + [self._tail.offset]
        for block, after in zip(self._blocks, ends, strict=True):
            if block.begin < end and block.end > begin:
                for line in self._folder.read(self._name, block.offset, after).split(b"\n"):
                    span = _span(line, process)
                    if span is not None and span.begin < end and span.end > begin:
                        yield span


class TimelineReader:
    """The traces of one run, one per job."""

    def __init__(self, folder: Folder) -> None:
        self._folder = folder.below(TRACE)
        self._files: dict[tuple[str, str], SpanFile] = {}

    def jobs(self) -> list[str]:
        """Return the jobs that have a trace, the newest last."""
        found = []
        for job in self._folder.names():
            stat = self._folder.below(job).stat(f"{DRIVER}{SUFFIX}")
            if stat is not None:
                found.append((stat[1], job))
        return [job for _, job in sorted(found)]

    def window(self, *, job: str = "", first: int | None = None, last: int | None = None) -> dict[str, Any]:
        """Return the timeline of some steps: of the newest job, and its last steps, unless others are named.

        Returns:
            jobs, steps: What can be asked for: the jobs, first and last step of this one.
            first, last: The steps of this answer; null without any.
            events: As `trace_events` returns them.
            ranks, stages: Times of each rank, and seconds of each stage.
        """
        jobs = self.jobs()
        job = job if job in jobs else (jobs[-1] if jobs else "")
        files = self._updated(job) if job else {}
        steps = files[DRIVER].steps if DRIVER in files else {}
        answer: dict[str, Any] = {"jobs": jobs, "job": job, "steps": [min(steps), max(steps)] if steps else None}
        if not steps:
            return answer | {"first": None, "last": None, "events": [], "ranks": [], "stages": {}}
        last = max(steps) if last is None else last
        first = last - 2 if first is None else first
        chosen = [step for step in sorted(steps) if first <= step <= last][:MAX_STEPS]
        if not chosen:
            return answer | {"first": first, "last": last, "events": [], "ranks": [], "stages": {}}
        between = (min(steps[step][0] for step in chosen), max(steps[step][1] for step in chosen))
        spans = sorted(
            (span for file in files.values() for span in file.spans(*between)), key=lambda span: (span.begin, -span.end)
        )[:MAX_SPANS]
        return answer | {
            "first": chosen[0],
            "last": chosen[-1],
            "seconds": (between[1] - between[0]) / 1e9,
            "events": trace_events(spans)["traceEvents"],
            "ranks": [times._asdict() for times in rank_times(spans, between)],
            "stages": stage_seconds(spans),
        }

    def _updated(self, job: str) -> dict[str, SpanFile]:
        """Return process -> file of a job's trace, with what is new."""
        folder, found = self._folder.below(job), {}
        for name in sorted(folder.names()):
            if name.endswith(SUFFIX):
                file = self._files.setdefault((job, name), SpanFile(folder, name))
                file.update()
                found[name.removesuffix(SUFFIX)] = file
        return found


def _span(line: bytes, process: str) -> Span | None:
    record = parsed(line)
    try:
        span = None if record is None else Span(**(record | {"process": process}))
    except TypeError:
        return None
    return span if span is not None and isinstance(span.begin, int) and isinstance(span.end, int) else None
