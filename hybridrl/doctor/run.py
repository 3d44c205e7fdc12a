"""Faults of a run, found in the files that it has written."""

from collections import Counter
from collections.abc import Iterator
from typing import Any

from hybridrl.doctor import rules
from hybridrl.doctor.curves import MIN_STEPS, Curves
from hybridrl.doctor.finding import Finding
from hybridrl.driver.program import ERROR_FILE
from hybridrl.errors import CheckpointError, ConfigError
from hybridrl.trainer.checkpoint import ledger_audit
from hybridrl.trainer.checkpoint.step_ledger import FILE, parse_ledger
from hybridrl.view.readers.storage import Folder
from hybridrl.view.runs import Run, open_runs

ERROR_BYTES = 65536
MAX_LOSSES = 3  # of one role, that chance explains
STOPPED = ("Terminated", "KeyboardInterrupt")  # by whoever ran it


def examine_run(path: str) -> Iterator[Finding]:
    """Yield what was found in the files of a run, from a local disk or any fsspec path.

    Raises:
        ConfigError: There is no run, or there are several.
    """
    runs = [*open_runs([path]).values()]
    if len(runs) > 1:
        raise ConfigError(
            f"{path}: has {len(runs)} runs; name one of them: {', '.join(run.folder.url for run in runs[:5])}"
        )
    run = runs[0]
    run.metrics.update()
    curves = Curves(run.metrics)
    steps = curves.last_step
    total = run.settings.total_steps()
    only_validates = _setting(run, "trainer.val_only", False) is True
    yield Finding(
        "steps", "none: it only validates" if only_validates else f"{steps} of {total or 'an unknown number'}"
    )
    yield from _end(run.folder, is_complete=steps == total)
    yield from _failures(run)
    if only_validates:
        return
    yield from _checkpoints(run, steps)
    yield from _prompts(run.folder)
    yield from rules.far_steps(curves, _setting(run, "actor_rollout_ref.actor.optim.lr", "unknown"))
    if steps < MIN_STEPS:
        yield from rules.failure_shares(curves)
        yield Finding("metrics", f"fewer than {MIN_STEPS} steps: too few to judge the curves by")
        return
    lag = _setting(run, "trainer.lag", 0)
    found = [*rules.findings(curves, lag=int(lag) if str(lag).isdigit() else 0)]
    yield from found or [Finding("metrics", "no rule finds anything")]


def _end(folder: Folder, *, is_complete: bool) -> Iterator[Finding]:
    """Yield the error that a run has ended with. If the last step completed, an earlier attempt left the error."""
    stat = folder.stat(ERROR_FILE)
    if stat is None or is_complete:
        return
    text = folder.read(ERROR_FILE, max(0, stat[0] - ERROR_BYTES), stat[0]).decode(errors="replace")
    lines = [line for line in text.splitlines() if line.strip()]
    last = next((line for line in reversed(lines) if not line.startswith((" ", "\t"))), "")
    yield Finding(
        "the run ended with an error", last[:300], f"{ERROR_FILE} has the whole traceback; start the same command again"
    )


def _failures(run: Run) -> Iterator[Finding]:
    """Yield lost processes, and what the master says about the run."""
    found = run.failures.read()
    lost = Counter(name.rsplit("-", 1)[0] for entry in found["recoveries"] for name in entry.get("lost", ()))
    if lost:
        seen = ", ".join(f"{role} {count} times" for role, count in lost.most_common())
        seconds = sum(float(entry.get("seconds", 0.0)) for entry in found["recoveries"])
        often = [role for role, count in lost.items() if count > MAX_LOSSES]
        change = ""
        if often:
            change = f"read the logs of {', '.join(often)} (memory first): hybridrl job logs RUN --process NAME"
        yield Finding("lost processes", f"{seen}; {seconds:.0f} s of recovery", change)
    for journal in found["journals"][:1]:
        if str(journal["state"]).lower() == "failed" and not str(journal["reason"]).startswith(STOPPED):
            yield Finding("the master ended the run", str(journal["reason"]), "hybridrl job status RUN says more")
        if journal["problem"]:
            yield Finding("the master's journal", journal["problem"], "what came after the damage is not known")


def _checkpoints(run: Run, steps: int) -> Iterator[Finding]:
    names = [name for name in run.folder.names() if name.startswith("global_step_")]
    newest = max((int(name.rpartition("_")[2]) for name in names if name.rpartition("_")[2].isdigit()), default=None)
    if newest is not None:
        yield Finding("newest checkpoint", f"step {newest}")
        return
    freq = _setting(run, "trainer.save_freq", -1)
    if isinstance(freq, int) and freq > steps:
        seen = f"none yet: trainer.save_freq={freq} commits the first one after step {freq}, at most after five minutes"
        yield Finding("checkpoint", seen)
    elif isinstance(freq, int) and freq > 0:
        seen = f"none after {steps} steps, although trainer.save_freq={freq}"
        yield Finding("no checkpoint", seen, "read the log about checkpoints; trainer.default_local_dir may be full")
    elif steps >= MIN_STEPS:
        yield Finding(
            "no checkpoint", f"{steps} steps are lost with the run", "trainer.save_freq=N commits every N steps"
        )


def _prompts(folder: Folder) -> Iterator[Finding]:
    """Yield what became of the prompts that the run has drawn."""
    if (stat := folder.stat(FILE)) is None:
        return
    try:
        audit = ledger_audit.audit(parse_ledger(folder.read(FILE, 0, stat[0]).splitlines(keepends=True), FILE))
    except CheckpointError as error:
        yield Finding("the step ledger", str(error))
        return
    problems = audit.problems()
    change = f"{'; '.join(problems[:3])}: {ledger_audit.COMMAND} RUN" if problems else ""
    yield Finding("prompts", str(audit.prompt_count()), change)


def _setting(run: Run, name: str, default: Any) -> Any:
    return run.settings.values().get(name, default)
