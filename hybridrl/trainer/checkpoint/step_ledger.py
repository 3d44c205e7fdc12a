"""The step ledger: what every step did, so that it can be shown that no step was done twice, or left out, and no prompt
used twice.

    python -m hybridrl.trainer.checkpoint.step_ledger RUN          what the ledger of a run says; exit code 1 if
    something happened not exactly once

`ledger.jsonl` in the run's directory is only ever appended to. A line for every process that begins (or goes back), one
for every step:

    {"begin": 4, "rows": 7473, "from": ".../global_step_4"}
    {"step": 5, "epoch": 0, "prompts": [17, 3], "stages": {"update_actor": 1, ...}, "updates": {"actor": 10}}

begin: the step after which it goes on; lines of later steps before it count no more: what they did is not in the
weights. prompts: rows of the training data that were trained on. stages: how often each stage that is not pure ran.
updates: optimizer steps in the weights, as the workers count them. Every line ends with a checksum of itself and all
lines before it.

A commit holds the checksum and the updates of its step. Writing one and going on from one compare the updates with what
the engines, which keep a count of their own with their weights, say.
"""

import collections
import contextlib
import functools
import hashlib
import json
import os
import sys
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hybridrl.errors import CheckpointError
from hybridrl.framework.stage import StageFn, spec_of

FILE = "ledger.jsonl"
LEDGER = "ledger"  # in a checkpoint's trainer.json
SUM = "sum"
Updates = dict[str, int]


class StepLedger:
    """The ledger of the run in `directory`. rows: of the training data.

    It is also a wrapper of stages (`Task.use_wrapper`) that counts those that are not pure.
    """

    def __init__(self, directory: str, *, rows: int):
        self.path, self.rows = os.path.join(directory, FILE), rows
        self.step = 0  # the last one that ended
        self.updates = Updates()  # as the workers have told this process
        self._beginning: dict[str, Any] | None = None  # written with the first step: who only looks leaves no trace
        self._sum = ""
        self._runs: collections.Counter[str] = collections.Counter()
        self._counting = threading.Lock()  # stages may run beside each other
        self._unwritten = b""

    def __call__(self, fn: StageFn) -> StageFn:
        """Return `fn`, counted each time it is run, if it is not pure."""
        spec = spec_of(fn)
        if spec.pure:
            return fn

        @functools.wraps(fn)
        def counted(ctx: Any) -> Any:
            with self._counting:
                self._runs[spec.name] += 1
            return fn(ctx)

        return counted

    # -- written as the run goes

    def begin(self) -> None:
        """Begin at step 0."""
        self.go_on_from(None, path=None, step=0, taken={})

    def go_on_from(
        self, committed: Mapping[str, Any] | None, *, path: str | None, step: int, taken: Mapping[str, Sequence[int]]
    ) -> None:
        """Go on after `step`, from the commit at `path`, which holds `committed` (None: it is older than the ledger).

        taken: what every rank of each trained role says of the optimizer steps in its weights. Raises CheckpointError
        if they are not those that the commit knows of, or if the ledger that is there is damaged.
        """
        self.step, self.updates = step, {} if committed is None else dict(committed["updates"])
        self.compare(taken)
        self._sum = _end_of_file(self.path, expected=None if committed is None else (step, committed[SUM]))
        self.go_back(step, path=path)

    def go_back(self, step: int, *, path: str | None = None) -> None:
        """Note that it goes on after `step`, from the commit at `path` or from memory: what later steps did is in no
        weights any more.
        """
        self.step, self.updates = step, {}
        self._runs.clear()
        self._beginning = {"begin": step, "rows": self.rows, "from": path}

    def note(self, role: str, updates: Mapping[str, Sequence[float]], *, prefix: str) -> None:
        """Note what workers told of an update: `{prefix}/num_updates`, the optimizer steps in the role's weights after
        each of its own.
        """
        if told := updates.get(f"{prefix}/num_updates"):
            self.updates[role] = int(told[-1])

    def metrics(self) -> dict[str, float]:
        """Return how often a stage that may run only once has run in this step, at most."""
        return {"ledger/runs_per_stage": float(max(self._runs.values(), default=0))}

    def end_step(self, step: int, *, epoch: float | None, prompts: Iterable[int]) -> None:
        """Note a step that has ended, but for its commit. epoch: None where it is not known."""
        with self._counting:
            runs, self._runs = dict(self._runs), collections.Counter()
        if self._beginning is not None:
            self._append(self._beginning)
            self._beginning = None
        self.step = step
        entry = {"step": step, "epoch": None if epoch is None else int(epoch), "prompts": [int(row) for row in prompts]}
        self._append(entry | {"stages": runs, "updates": dict(self.updates)})

    def commit(self, taken: Mapping[str, Sequence[int]]) -> dict[str, Any]:
        """Return what a commit of the last step keeps. Raises as `compare` does, and OSError if the ledger cannot be
        written.

        taken: what every rank of each trained role says of the optimizer steps in its weights.
        """
        self.compare(taken)
        self._flush(durable=True)
        return {SUM: self._sum, "updates": {role: counts[0] for role, counts in taken.items() if counts}}

    def compare(self, taken: Mapping[str, Sequence[int]]) -> None:
        """Raise CheckpointError unless every rank has the optimizer steps in its weights that the ledger knows of."""
        for role, counts in taken.items():
            known = self.updates.get(role, counts[0] if counts else 0)
            if counts and {*counts} != {known}:
                raise CheckpointError(
                    f"the {role} has {sorted({*counts})} optimizer steps in its weights after step "
                    f"{self.step}, and the ledger knows of "
                    f"{known}: an update ran twice, or not at all. Go on from an earlier commit "
                    "(trainer.resume_from_path)"
                )

    def _append(self, entry: dict[str, Any]) -> None:
        self._sum = _checksum(self._sum, entry)
        self._unwritten += json.dumps(entry | {SUM: self._sum}).encode() + b"\n"
        with contextlib.suppress(
            OSError
        ):  # a full disk: the lines are written with the next one, and a commit insists on it
            self._flush()

    def _flush(self, *, durable: bool = False) -> None:
        os.makedirs(os.path.dirname(self.path) or ".", exist_ok=True)
        file = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            end = os.lseek(file, 0, os.SEEK_END)
            try:
                if os.write(file, self._unwritten) < len(self._unwritten):
                    raise OSError("a part of the ledger's lines only")
            except OSError:
                os.ftruncate(file, end)
                raise
            self._unwritten = b""
            if durable:
                os.fsync(file)
        finally:
            os.close(file)


# -- read


def _checksum(before: str, entry: Mapping[str, Any]) -> str:
    return hashlib.sha256((before + json.dumps(entry)).encode()).hexdigest()[:16]


def read_ledger(path: str) -> list[dict[str, Any]]:
    """Return the entries of a ledger with their checksums. A last line that a killed process left half-written is not
    one.

    Raises CheckpointError naming the line that is damaged.
    """
    try:
        with open(path, "rb") as file:
            lines = file.read().split(b"\n")
    except FileNotFoundError:
        return []
    entries: list[dict[str, Any]] = []
    before = ""
    for number, line in enumerate(lines[:-1], 1):
        entry = _read_line(line, before)
        if entry is None:
            raise CheckpointError(
                f"{path} is damaged in line {number}; move it away: the run goes on without it, from its "
                "commit's own counts"
            )
        before = entry[SUM]
        entries.append(entry)
    return entries


def _read_line(line: bytes, before: str) -> dict[str, Any] | None:
    try:
        entry = json.loads(line)
        said = entry.pop(SUM)
    except (ValueError, KeyError, AttributeError):
        return None
    return entry | {SUM: said} if said == _checksum(before, entry) else None


def _end_of_file(path: str, *, expected: tuple[int, str] | None) -> str:
    """Return the last checksum, after cutting a half-written last line off.

    expected: a step, and the checksum its line has to have.
    """
    entries = read_ledger(path)
    if not entries:
        return ""
    with open(path, "rb+") as file:
        content = file.read()
        file.truncate(content.rfind(b"\n") + 1)
    if expected is not None and any("step" in entry for entry in entries):
        step, checksum = expected
        if not any(
            entry[SUM] == checksum for entry in entries if entry.get("step") == step or entry.get("begin") == step
        ):
            raise CheckpointError(
                f"{path} has no line of step {step} with the checksum {checksum} that the commit of that "
                "step holds: it is the ledger of "
                "another run; move it away, or set trainer.default_local_dir to something new"
            )
    return entries[-1][SUM]


@dataclass
class Account:
    """What a ledger says.

    steps: entry of each step that is in the weights. again: steps that were done anew after a process ended.
    """

    steps: dict[int, dict[str, Any]] = field(default_factory=dict)
    again: int = 0
    first: int = 0  # the steps up to this one are in another run's ledger
    rows: int = 0

    def problems(self) -> list[str]:
        """What did not happen exactly once, as sentences."""
        found = [
            f"step {step} is missing"
            for step in range(self.first + 1, max(self.steps, default=self.first))
            if step not in self.steps
        ]
        found += [
            f"step {step}: {stage} ran {times} times"
            for step, entry in self.steps.items()
            for stage, times in entry["stages"].items()
            if times != 1
        ]
        used = self.prompts()
        for epoch, rows in used.items():
            twice = sorted(row for row, times in collections.Counter(rows).items() if times > 1)
            found += (
                [f"epoch {epoch}: prompts {twice[:5]} were used more than once ({len(twice)} in all)"] if twice else []
            )
        for epoch in sorted(used)[:-1] if not self.first else ():
            missing = sorted({*range(self.rows)} - {*used[epoch]})
            found += [f"epoch {epoch}: prompts {missing[:5]} were not used ({len(missing)} in all)"] if missing else []
        return found

    def prompts(self) -> dict[int, list[int]]:
        """Rows that were trained on, by epoch."""
        found: dict[int, list[int]] = {}
        for entry in self.steps.values():
            if entry["epoch"] is not None:
                found.setdefault(entry["epoch"], []).extend(entry["prompts"])
        return found

    def __str__(self) -> str:
        runs = [times for entry in self.steps.values() for times in entry["stages"].values()]
        mean = sum(runs) / max(1, len(runs))
        updates = self.steps[max(self.steps)]["updates"] if self.steps else {}
        lines = [
            f"steps in the weights: {len(self.steps)}, done anew after a process ended or went back: {self.again}",
            f"runs of a stage per step: {mean:g} (of those that may run only once)",
            "optimizer steps in the weights: "
            f"{', '.join(f'{role} {number}' for role, number in updates.items()) or 'none'}",
            f"prompts per epoch, of {self.rows}: "
            f"{', '.join(str(len(rows)) for rows in self.prompts().values()) or 'none'}",
        ]
        return "\n".join([*lines, *(self.problems() or ["every stage and every prompt exactly once"])])


def account(entries: Iterable[Mapping[str, Any]]) -> Account:
    """Return what the entries of a ledger come to."""
    result = Account()
    for entry in entries:
        if "begin" in entry:
            gone = [step for step in result.steps if step > entry["begin"]]
            result.again += len(gone)
            for step in gone:
                del result.steps[step]
            result.rows = entry["rows"]
            if not result.steps:
                result.first = entry["begin"]
        else:
            result.steps[entry["step"]] = dict(entry)
    return result


def main(argv: Sequence[str]) -> int:
    """Print what the ledger of a run says, and return the exit code."""
    if len(argv) != 1 or not os.path.isfile(os.path.join(argv[0], FILE)):
        sys.stderr.write(
            "usage: python -m hybridrl.trainer.checkpoint.step_ledger RUN\nRUN: the directory that a run "
            f"wrote to, with {FILE} in it\n"
        )
        return 2
    try:
        told = account(read_ledger(os.path.join(argv[0], FILE)))
    except CheckpointError as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    sys.stdout.write(f"{told}\n")
    return 1 if told.problems() else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
