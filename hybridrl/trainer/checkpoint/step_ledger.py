"""Step ledger: a record that proves that every step and every prompt was applied exactly once.

`ledger.jsonl` in the run's directory is only ever appended to: one line per process that starts (or rewinds), one per
step:

    {"begin": 4, "rows": 7473, "order": {"seed": 1, "shuffle": true}, "from": ".../global_step_4"}
    {"step": 5, "epoch": 0, "prompts": [17, 3], "stages": {"update_actor": 1, ...}, "updates": {"actor": 10}}

    begin    the step that the process resumes after; updates of earlier lines of later steps are not in the weights
    order    of the rows in every epoch (`EpochSampler`); null with a sampler of the user's own
    prompts  rows of the training data that the step trained on
    drawn    with `algorithm.filter_groups`: epoch -> what became of a prompt -> rows. A prompt is trained, filtered,
             surplus (dropped), or kept for the next step, whose line has it again. So has the line of a later step
             a deferred one (tail batching)
    stages   how often each stage that is not pure ran
    updates  optimizer steps in the weights, as the workers count them

Every line ends with a checksum of itself and all lines before it.

A checkpoint holds the checksum and the updates of its step. When one is written or loaded, the updates are compared
with the engines' own count, which is stored with their weights.

Used by the PPO and SFT trainers, in the driver.
"""

import collections
import contextlib
import functools
import hashlib
import json
import os
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from hybridrl.errors import CheckpointError
from hybridrl.framework.stage import StageFn, spec_of

FILE = "ledger.jsonl"
LEDGER = "ledger"  # in a checkpoint's trainer.json
CHECKSUM = "sum"  # key of a line's checksum
TRAINED, KEPT = "trained", "kept"  # outcomes of a prompt; a later step's line has a kept one again
DEFERRED = "deferred"  # so has it a deferred one, which waits for a long round of tail batching
Outcomes = Mapping[str, Mapping[str, Sequence[int]]]  # epoch -> what became of a prompt -> rows
Updates = dict[str, int]


class StepLedger:
    """Writes the ledger of one run.

    Also a stage wrapper (`Task.use_wrapper`) that counts stages that are not pure.

    Args:
        directory: The run's directory.
        rows: Rows of the training data.
        order: `seed` and `shuffle` of the rows' order, None if it is not the built-in one.

    Attributes:
        engine_updates: Trained role -> optimizer steps in the weights, one value per rank. The trainer sets it whenever
            it saves or loads the engines.
    """

    def __init__(self, directory: str, *, rows: int, order: Mapping[str, Any] | None = None):
        self.path, self.rows, self.order = os.path.join(directory, FILE), rows, order
        self.engine_updates: dict[str, Sequence[int]] = {}
        self.step = 0  # the last completed one
        self.updates = Updates()  # as the workers reported them to this process
        # Written with the first step, so that a run without steps writes nothing.
        self._start_entry: dict[str, Any] | None = None
        self._checksum = ""
        self._stage_runs: collections.Counter[str] = collections.Counter()
        self._count_lock = threading.Lock()  # stages may run concurrently
        self._unwritten = b""

    def __call__(self, fn: StageFn) -> StageFn:
        """Return `fn`, with every run counted if it is not pure."""
        spec = spec_of(fn)
        if spec.pure:
            return fn

        @functools.wraps(fn)
        def counted(ctx: Any) -> Any:
            with self._count_lock:
                self._stage_runs[spec.name] += 1
            return fn(ctx)

        return counted

    # -- writing

    def start(self) -> None:
        """Start a new run at step 0."""
        self.resume_from(None, path=None, step=0, num_updates={})

    def resume_from(
        self,
        committed: Mapping[str, Any] | None,
        *,
        path: str | None,
        step: int,
        num_updates: Mapping[str, Sequence[int]],
    ) -> None:
        """Resume after `step`.

        Args:
            committed: What `commit` returned for the checkpoint; None if the checkpoint is older than the ledger.
            path: The checkpoint, for the record.
            step: Completed step.
            num_updates: Trained role -> optimizer steps in the weights, one value per rank.

        Raises:
            CheckpointError: The counts differ from the checkpoint's, or the existing ledger is damaged.
        """
        self.step, self.updates = step, {} if committed is None else dict(committed["updates"])
        self.check_ranks_agree(num_updates)
        if self._unwritten:  # lines that the disk still does not take are of steps that are not resumed
            with contextlib.suppress(OSError):
                self._flush()
            self._unwritten = b""
        self._checksum = _cut_partial_line(
            self.path, expected=None if committed is None else (step, committed[CHECKSUM])
        )
        self.rewind(step, path=path)

    def rewind(self, step: int, *, path: str | None = None) -> None:
        """Record that the run continues after `step`, from the checkpoint at `path` or from a snapshot (None).

        Updates of later steps are no longer in the weights.
        """
        self.step, self.updates = step, {}
        self._stage_runs.clear()
        self._start_entry = {"begin": step, "rows": self.rows, "order": self.order, "from": path}

    def record_update(self, role: str, updates: Mapping[str, Sequence[float]], *, prefix: str) -> None:
        """Record the optimizer steps in a role's weights.

        Args:
            role: The trained role.
            updates: Metrics of an update; `{prefix}/num_updates` has one count per optimizer step, the last one counts.
            prefix: Prefix of the role's metrics.
        """
        if counts := updates.get(f"{prefix}/num_updates"):
            self.updates[role] = int(counts[-1])

    def metrics(self) -> dict[str, float]:
        """Return the largest number of runs, in this step, of a stage that may run only once."""
        return {"ledger/runs_per_stage": float(max(self._stage_runs.values(), default=0))}

    def end_step(
        self, step: int, *, epoch: float | None, prompts: Iterable[int], outcomes: Outcomes | None = None
    ) -> None:
        """Record a step that is complete except for its checkpoint.

        Args:
            step: The step.
            epoch: Epoch of its prompts, None if unknown.
            prompts: Rows that it trained on.
            outcomes: What became of every prompt, if the step has drawn more than it trained on.
        """
        with self._count_lock:
            runs, self._stage_runs = dict(self._stage_runs), collections.Counter()
        if self._start_entry is not None:
            self._append(self._start_entry)
            self._start_entry = None
        self.step = step
        entry = {"step": step, "epoch": None if epoch is None else int(epoch), "prompts": [int(row) for row in prompts]}
        drawn = {} if outcomes is None else {"drawn": outcomes}
        self._append(entry | drawn | {"stages": runs, "updates": dict(self.updates)})

    def commit(self, num_updates: Mapping[str, Sequence[int]]) -> dict[str, Any]:
        """Return the ledger's part of a checkpoint of the last step.

        Args:
            num_updates: Trained role -> optimizer steps in the weights, one value per rank.

        Raises:
            CheckpointError: See `check_ranks_agree`.
            OSError: The ledger cannot be written.
        """
        self.check_ranks_agree(num_updates)
        self._flush(durable=True)
        return {
            CHECKSUM: self._checksum,
            "updates": {role: counts[0] for role, counts in num_updates.items() if counts},
        }

    # -- stateful part of a trainer

    def state_dict(self) -> dict[str, int]:
        """Return the last completed step, for a snapshot."""
        return {"step": self.step}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Continue after the step of a snapshot."""
        self.rewind(state["step"])

    def save(self, directory: str) -> dict[str, Any]:
        """Return what `commit` returns for `engine_updates`; writes no file to `directory`."""
        return self.commit(self.engine_updates)

    def load(self, directory: str, state: Mapping[str, Any] | None) -> None:
        """Resume after `step` from the checkpoint around `directory`, whose engines are loaded already."""
        self.resume_from(state, path=os.path.dirname(directory), step=self.step, num_updates=self.engine_updates)

    def check_ranks_agree(self, num_updates: Mapping[str, Sequence[int]]) -> None:
        """Raise CheckpointError unless every rank's count of optimizer steps equals the ledger's."""
        for role, counts in num_updates.items():
            expected = self.updates.get(role, counts[0] if counts else 0)
            if counts and {*counts} != {expected}:
                raise CheckpointError(
                    f"the {role} has {sorted({*counts})} optimizer steps in its weights after step {self.step}, and "
                    f"the ledger has {expected}: an update ran twice, or not at all. Resume from an earlier checkpoint "
                    "(trainer.resume_from_path)"
                )

    def _append(self, entry: dict[str, Any]) -> None:
        self._checksum = _chained_checksum(self._checksum, entry)
        self._unwritten += json.dumps(entry | {CHECKSUM: self._checksum}).encode() + b"\n"
        with contextlib.suppress(OSError):  # disk full: the lines are written with the next one, at latest for a commit
            self._flush()

    def _flush(self, *, durable: bool = False) -> None:
        os.makedirs(os.path.dirname(self.path) or ".", exist_ok=True)
        file = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            end = os.lseek(file, 0, os.SEEK_END)
            try:
                if os.write(file, self._unwritten) < len(self._unwritten):
                    raise OSError("only a part of the ledger's lines was written")
            except OSError:
                os.ftruncate(file, end)
                raise
            self._unwritten = b""
            if durable:
                os.fsync(file)
        finally:
            os.close(file)


# -- reading


def _chained_checksum(before: str, entry: Mapping[str, Any]) -> str:
    return hashlib.sha256((before + json.dumps(entry)).encode()).hexdigest()[:16]


def read_ledger(path: str) -> list[dict[str, Any]]:
    """Return the entries of a ledger with their checksums, without a half-written last line.

    Raises:
        CheckpointError: A line is damaged; the message has its number.
    """
    return list(_iterate_ledger(path))


def _iterate_ledger(path: str) -> Iterator[dict[str, Any]]:
    """Yield what `read_ledger` returns, one entry in memory at a time."""
    if os.path.exists(path):
        with open(path, "rb") as file:
            yield from parse_ledger(file, path)


def parse_ledger(lines: Iterable[bytes], path: str) -> Iterator[dict[str, Any]]:
    """Yield the entries of the lines of a ledger, as `read_ledger` returns them; `path` is for the error."""
    before = ""
    for number, line in enumerate(lines, 1):
        if not line.endswith(b"\n"):
            return
        entry = _read_line(line, before)
        if entry is None:
            raise CheckpointError(
                f"{path} is damaged in line {number}; move it away: the run then resumes without it, from its "
                "checkpoint's own counts"
            )
        before = entry[CHECKSUM]
        yield entry


def _read_line(line: bytes, before: str) -> dict[str, Any] | None:
    try:
        entry = json.loads(line)
        checksum = entry.pop(CHECKSUM)
    except (ValueError, KeyError, AttributeError):
        return None
    return entry | {CHECKSUM: checksum} if checksum == _chained_checksum(before, entry) else None


def _cut_partial_line(path: str, *, expected: tuple[int, str] | None) -> str:
    """Cut off a half-written last line, and return the last checksum.

    Args:
        path: The ledger.
        expected: A step and the checksum that its line must have.

    Raises:
        CheckpointError: No line of that step has that checksum.
    """
    last, has_steps, found = "", False, expected is None
    for entry in _iterate_ledger(path):
        last, has_steps = entry[CHECKSUM], has_steps or "step" in entry
        if expected is not None and expected == (entry.get("step", entry.get("begin")), last):
            found = True
    if not last:
        return ""
    with open(path, "rb+") as file:
        file.truncate(sum(len(line) for line in file if line.endswith(b"\n")))
    if expected is not None and has_steps and not found:
        step, checksum = expected
        raise CheckpointError(
            f"{path} has no line of step {step} with the checksum {checksum} of that step's checkpoint: it is the "
            "ledger of another run; move it away, or set trainer.default_local_dir to a new value"
        )
    return last


if __name__ == "__main__":
    raise SystemExit("the audit of a run's ledger is now `python -m hybridrl.trainer.checkpoint.ledger_audit RUN`")
