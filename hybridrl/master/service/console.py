"""What `hybridrl job ls|status|logs|stop` do: find a job's master or its journal, and say in words what they know."""

import logging
import os
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hybridrl.errors import CallTimeout, ConfigError
from hybridrl.master.service.client import masters
from hybridrl.master.service.journal import Entry, history, replay
from hybridrl.master.state.events import TRAINER
from hybridrl.master.state.reducer import to_json
from hybridrl.master.state.tables import JOB_ENDS
from hybridrl.single_controller.cluster import MASTER

ANSWER_TIMEOUT_S = 20.0


def connect(address: str | None) -> None:
    """Join the cluster whose masters are asked: `address`, that of RAY_ADDRESS, or the only one of this machine.

    Raises ConfigError where there is none, or several.
    """
    import ray

    if ray.is_initialized():
        return
    address = address or os.environ.get("RAY_ADDRESS") or "auto"
    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except (OSError, ValueError, RuntimeError, ray.exceptions.RayError) as error:
        raise ConfigError(
            f"--address {address}: no Ray cluster to ask ({' '.join(str(error).split())}); give --address "
            "HOST:PORT of the job's cluster, "
            "or the run's directory in place of the job"
        ) from error


def list_jobs() -> str:
    """Return a line for every job that runs on the cluster."""
    described = _describe_all(masters())
    if not described:
        return "no job runs on this cluster\n"
    rows = [("RUN", "JOB", "STATE", "STEP", "PROCESSES", "FOR")]
    for run, seen in sorted(described.items()):
        alive = sum(worker["state"] == "alive" for worker in seen["workers"].values())
        lasts = f"{(time.time() - seen['started']) / 60:.0f} min"
        rows.append(
            (run, seen["job"], seen["state"], str(seen["step"]), f"{alive}/{len(seen['workers'])} alive", lasts)
        )
    return _table(rows)


def status(job: str, address: str | None) -> str:
    """Return what is known of a job: a run, a job's name, or the directory of a run, whose journal is read then."""
    journal = _journal_in(job)
    if journal is not None:
        state, _ = replay(journal)
        return _in_words(
            {**to_json(state), "beats": {}, "doings": {}, "journal": journal, "is_durable": True}, live=False
        )
    connect(address)
    _, master = find(job)
    return _in_words(_ask(master), live=True)


def logs(job: str, address: str | None) -> str:
    """Return the job's history, a line for each event."""
    journal = _journal_in(job)
    if journal is None:
        connect(address)
        journal = _ask(find(job)[1])["journal"]
    return "".join(f"{_line(entry)}\n" for entry in history(journal))


def stop(job: str, address: str | None, *, timeout_s: float) -> str:
    """Have a job's trainer end, as SIGTERM would, and wait until the job is gone.

    Raises CallTimeout when it is still there.
    """
    connect(address)
    run, master = find(job)
    _answer(master.stop.remote("`hybridrl job stop`"))
    until = time.monotonic() + timeout_s
    while run in masters():
        if time.monotonic() > until:
            raise CallTimeout(
                f"{run} was told to stop and is still there after {timeout_s:g} s; its trainer may be committing"
            )
        time.sleep(0.1)
    return f"{run} has ended\n"


def find(job: str) -> tuple[str, Any]:
    """Return (run, master) by a run or by the name of a job that has one run.

    Raises ConfigError, with those that there are.
    """
    found = masters()
    if job in found:
        return job, found[job]
    runs = [run for run, seen in _describe_all(found).items() if seen["job"] == job]
    if len(runs) == 1:
        return runs[0], found[runs[0]]
    if runs:
        raise ConfigError(f"{job}: the job runs {len(runs)} times here; name one of {', '.join(sorted(runs))}")
    raise ConfigError(f"{job}: no such job runs on this cluster; there are {', '.join(sorted(found)) or 'none'}")


def _describe_all(found: dict[str, Any]) -> dict[str, dict[str, Any]]:
    import ray

    described = {}
    for run, master in found.items():
        try:
            described[run] = _ask(master)
        except (ray.exceptions.RayError, CallTimeout):  # it ends, or is being started again
            continue
    return described


def _ask(master: Any) -> dict[str, Any]:
    return _answer(master.describe.remote())


def _answer(reference: Any) -> Any:
    import ray

    try:
        return ray.get(reference, timeout=ANSWER_TIMEOUT_S)
    except ray.exceptions.GetTimeoutError:
        raise CallTimeout(
            f"the master did not answer within {ANSWER_TIMEOUT_S:g} s; it may be on its way back, ask again"
        ) from None


def _journal_in(job: str) -> str | None:
    """The newest journal in a directory, if `job` is one: the run's own, or the journal itself."""
    if not os.path.isdir(job):
        return None
    journals = [
        path.parent
        for path in Path(job).rglob("events-*.jsonl")
        if path.parent.parent.name == MASTER or path.parent == Path(job)
    ]
    if not journals:
        raise ConfigError(f"{job}: no master has kept a journal there")
    return str(max(set(journals), key=lambda path: path.stat().st_mtime))


def _in_words(seen: dict[str, Any], *, live: bool) -> str:
    lines = [
        f"{seen['run']} ({seen['job']}) is {seen['state']}, at step {seen['step']}"
        + (f": {seen['reason']}" if seen["reason"] else "")
    ]
    if not live and seen["state"] not in JOB_ENDS:
        lines.append(
            "this is what its journal says last; whether it still runs, `hybridrl job status RUN` asks its cluster"
        )
    lines.append(f"last commit: {seen['commit'] or 'none'}")
    rows = [("PROCESS", "STATE", "PID", "LIFE", "MEMORY", "DOES")]
    for slot, worker in sorted(seen["workers"].items(), key=lambda item: (item[0] != TRAINER, item[0])):
        beat, doing = seen["beats"].get(slot, {}), seen["doings"].get(slot)
        memory = f"{beat['memory'] / 2**30:.2f} GiB" if "memory" in beat else "-"
        does = worker["account"] or (
            "-" if doing is None else f"{doing['method'] or 'idle'} for {doing['for_s']:.0f} s"
        )
        rows.append((slot, worker["state"], str(worker["pid"]), str(worker["life"]), memory, does))
    lines.append(_table(rows).rstrip())
    lines += [f"failure: {text}" for text in seen["failures"]] + [f"notice: {text}" for text in seen["notices"]]
    if not seen["is_durable"]:
        lines.append(f"the journal {seen['journal']} cannot be written; the master keeps it in memory and tries again")
    return "\n".join(lines) + "\n"


def _line(entry: Entry) -> str:
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(entry.at))
    words = ", ".join(
        f"{name}={value}"
        for name, value in asdict(entry.event).items()
        if value not in ("", (), {}) and name != "machine"
    )
    return f"{when}  {type(entry.event).__name__:<10} {words}"


def _table(rows: list[tuple[str, ...]]) -> str:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() + "\n" for row in rows
    )
