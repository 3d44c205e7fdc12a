"""The files of a run, as small or as large as a test of its readers wants them."""

import json
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from hybridrl.master.service.journal import JournaledState
from hybridrl.master.state.events import JobEnded, JobEvent, JobStarted, RecoveryDecided, WorkerFailed, WorkerJoined

MS = 1_000_000  # nanoseconds


def write_lines(path: Path, records: Iterable[Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a", encoding="utf-8") as file:
        file.writelines(json.dumps(record) + "\n" for record in records)
    return path


def write_metrics(run: Path, steps: Iterable[int], **metrics: float) -> Path:
    return write_lines(run / "metrics.jsonl", ({"step": step, "score": step / 10, **metrics} for step in steps))


def sample(step: int, row: int, *, score: float = 0.0, prompt: str = "1+1?", answer: str = "2") -> dict[str, Any]:
    return {
        "step": step,
        "id": f"{step}-{row}:{zlib.crc32(answer.encode()):08x}",
        "input": prompt,
        "output": answer,
    } | {
        "gts": "2",
        "score": score,
        "version": step - 1,
    }


def write_samples(run: Path, step: int, records: Iterable[dict[str, Any]]) -> Path:
    path = run / "rollouts" / f"{step}.jsonl"
    path.unlink(missing_ok=True)
    return write_lines(path, records)


def write_trace(run: Path, steps: int, *, job: str = "job") -> None:
    """Write a trace with 2 ms of `prepare` and 8 ms of `update` (actor: 6 ms) per step."""
    stages, calls = [], []
    for step in range(1, steps + 1):
        begin = step * 10 * MS
        common = {"thread": "MainThread", "step": step}
        stages.append({"kind": "stage", "name": "prepare", "begin": begin, "end": begin + 2 * MS, **common})
        wait = {"kind": "wait", "name": "actor.update", "begin": begin + 2 * MS, "end": begin + 9 * MS}
        stages.append(wait | {"thread": "MainThread"})
        stages.append({"kind": "stage", "name": "update", "begin": begin + 2 * MS, "end": begin + 10 * MS, **common})
        call = {"kind": "call", "name": "update", "begin": begin + 3 * MS, "end": begin + 9 * MS}
        calls.append(call | {"thread": "MainThread", "role": "actor", "rank": 0})
    write_lines(run / "trace" / job / "driver.jsonl", stages)
    write_lines(run / "trace" / job / "actor-0.jsonl", calls)


LOST: tuple[JobEvent, ...] = (
    JobStarted(job="run", run="run-1", restarts_workers=True),
    WorkerJoined(slot="actor-0", name="run-1/actor-0", pid=11, node="n"),
    WorkerFailed(kind="died", slot="actor-0", pid=11, evidence="killed by SIGKILL"),
    RecoveryDecided("died", "actor-0", "role", "snapshot", "trainer", 1, 3, "the trainer rebuilds role actor"),
    WorkerJoined(slot="actor-0", name="run-1/actor-0.2", pid=12, node="n"),
)
ENDED = JobEnded(succeeded=True, reason="done")


def write_journal(run: Path, events: Iterable[JobEvent], *, name: str = "run-1") -> Path:
    path = run / "master" / name
    journal = JournaledState(str(path))
    for event in events:
        journal.apply(event)
    journal.close()
    return path
