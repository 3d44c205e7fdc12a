"""Check a step ledger: every step and every prompt stands in it exactly once.

    python -m hybridrl.trainer.checkpoint.ledger_audit RUN     print the audit of a run; exit code 1 if it found a
    problem

For each step or prompt that does not, the audit has one sentence. `PromptCount` is the sum that a run prints. The order
of the rows is computed anew from the size of the dataset and the seed. So a prompt that was drawn and stands in no line
is found, too. Pure functions on the entries of `step_ledger.py`.
"""

import collections
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from hybridrl.driver.terminal import show, show_error
from hybridrl.errors import CheckpointError
from hybridrl.trainer.checkpoint.step_ledger import DEFERRED, FILE, KEPT, TRAINED, Outcomes, read_ledger
from hybridrl.trainer.data.epoch_sampler import EpochSampler

COMMAND = "python -m hybridrl.trainer.checkpoint.ledger_audit"


@dataclass(frozen=True)
class PromptCount:
    """Prompts that a run has drawn from its data, one per row and epoch, and what became of them.

    Attributes:
        drawn: Prompts that the run has drawn: `trained`, `lost`, `left_out` and `waiting` add up to it.
        trained: Those that a step in the weights has trained on.
        lost: Those that no step has, though a later row of the epoch was used.
        repeated: Uses beyond the first one.
        waiting: Kept or deferred for a later step.
        left_out: Reason -> number of prompts that were drawn and left out of training.
    """

    drawn: int = 0
    trained: int = 0
    lost: int = 0
    repeated: int = 0
    waiting: int = 0
    left_out: Mapping[str, int] = field(default_factory=dict)

    def __add__(self, other: "PromptCount") -> "PromptCount":
        """Return the count of two runs."""
        counts = {
            one.name: getattr(self, one.name) + getattr(other, one.name)
            for one in fields(self)
            if one.name != "left_out"
        }
        return PromptCount(**counts, left_out=collections.Counter(self.left_out) + collections.Counter(other.left_out))

    def __str__(self) -> str:
        reasons = ", ".join(f"{number} {reason}" for reason, number in self.left_out.items())
        waiting = f", {self.waiting} waiting" if self.waiting else ""
        return (
            f"{self.drawn:,} drawn, {self.trained:,} trained once, {self.lost} lost, {self.repeated} repeated, "
            f"{sum(self.left_out.values())} left out{f' ({reasons})' if reasons else ''}{waiting}"
        )


@dataclass
class LedgerAudit:
    """What a ledger adds up to.

    Attributes:
        steps: Step -> entry, for the steps that are in the weights.
        num_repeated: Steps that ran again after a process ended or rewound.
        first: Steps up to this one are in another run's ledger.
        rows: Rows of the training data.
        order: `seed` and `shuffle` of their order, None if it is not known.
    """

    steps: dict[int, dict[str, Any]] = field(default_factory=dict)
    num_repeated: int = 0
    first: int = 0
    rows: int = 0
    order: Mapping[str, Any] | None = None

    def problems(self) -> list[str]:
        """Return one sentence per step, stage or prompt that was not applied exactly once."""
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
        for epoch, rows in used.items():
            unknown = sorted({*rows} - {*range(self.rows)})
            found += [f"epoch {epoch}: prompts {unknown[:5]} are no rows of the data"] if unknown else []
            missing = self._lost(epoch, used)
            found += [f"epoch {epoch}: prompts {missing[:5]} were not used ({len(missing)} in all)"] if missing else []
        return found

    def _lost(self, epoch: int, used: Mapping[int, Sequence[int]]) -> list[int]:
        """Return the rows that the epoch has drawn and no step has used.

        An epoch that is over has drawn all rows, the last one those up to its last used row. In the first epoch of a
        run whose beginning is in another ledger, rows before the first used one are not counted.
        """
        is_over, begins_here = epoch < max(used), not (self.first and epoch == min(used))
        if self.order is None:
            return sorted({*range(self.rows)} - {*used[epoch]}) if is_over and begins_here else []
        order = EpochSampler(self.rows, **self.order).order(epoch).tolist()
        known = {*used[epoch]}
        positions = [place for place, row in enumerate(order) if row in known]
        begin = 0 if begins_here else min(positions, default=0)
        end = self.rows if is_over else max(positions, default=-1) + 1
        return sorted({*order[begin:end]} - known)

    def prompt_count(self) -> PromptCount:
        """Return what became of the prompts that the run has drawn."""
        used, left_out = self.prompts(), self.num_left_out()
        lost = sum(len(self._lost(epoch, used)) for epoch in used)
        distinct, uses = (sum(map(len, rows)) for rows in (map(set, used.values()), used.values()))
        newest = _drawn(self.steps[max(self.steps)]) if self.steps else {}
        waiting = sum(len(outcomes.get(KEPT, ())) for outcomes in newest.values())
        waiting += sum(trained is None for _, trained in self.deferred().values())
        return PromptCount(
            drawn=distinct + lost,
            trained=distinct - sum(left_out.values()) - waiting,
            lost=lost,
            repeated=uses - distinct,
            waiting=waiting,
            left_out=left_out,
        )

    def prompts(self) -> dict[int, list[int]]:
        """Return epoch -> rows that were used: trained on, with `drawn` left out of training, or still waiting."""
        found: dict[int, list[int]] = {}
        newest = max(self.steps, default=0)
        for step, entry in self.steps.items():
            for epoch, outcomes in _drawn(entry).items():
                used = found.setdefault(int(epoch), [])
                for outcome, rows in outcomes.items():
                    used.extend(rows if outcome not in (KEPT, DEFERRED) or (outcome, step) == (KEPT, newest) else ())
        for (number, row), (_, trained) in self.deferred().items():
            found[number].extend([row] if trained is None else ())
        return found

    def deferred(self) -> dict[tuple[int, int], tuple[int, int | None]]:
        """Return epoch and row of each deferred prompt -> step that deferred it, and a later step that used it.

        The second is None for a prompt that waits.
        """
        found: dict[tuple[int, int], tuple[int, int | None]] = {}
        for step, entry in sorted(self.steps.items()):
            for epoch, outcomes in _drawn(entry).items():
                for outcome, rows in outcomes.items():
                    for prompt in ((int(epoch), row) for row in rows):
                        if outcome == DEFERRED:
                            found[prompt] = (step, None)
                        elif prompt in found and found[prompt][1] is None:
                            found[prompt] = (found[prompt][0], step)
        return found

    def num_left_out(self) -> dict[str, int]:
        """Return outcome -> number of prompts that no step trained on, by their outcome."""
        outcomes = [outcome for entry in self.steps.values() for outcome in _drawn(entry).values()]
        names = dict.fromkeys(name for outcome in outcomes for name in outcome if name not in (TRAINED, KEPT, DEFERRED))
        return {name: sum(len(outcome.get(name, ())) for outcome in outcomes) for name in names}

    def __str__(self) -> str:
        runs = [times for entry in self.steps.values() for times in entry["stages"].values()]
        mean = sum(runs) / max(1, len(runs))
        updates = self.steps[max(self.steps)]["updates"] if self.steps else {}
        lines = [
            f"steps in the weights: {len(self.steps)}, run again after a process ended or rewound: {self.num_repeated}",
            f"runs of a stage per step: {mean:g} (of those that may run only once)",
            "optimizer steps in the weights: "
            f"{', '.join(f'{role} {number}' for role, number in updates.items()) or 'none'}",
            f"prompts per epoch, of {self.rows}: "
            f"{', '.join(str(len(rows)) for rows in self.prompts().values()) or 'none'}",
        ]
        lines.append(f"prompts: {self.prompt_count()}")
        if deferred := self.deferred().values():
            ages = [trained - step for step, trained in deferred if trained is not None]
            mean = sum(ages) / max(1, len(ages))
            lines.append(
                f"prompts deferred: {len(deferred)}, trained {mean:.1f} steps later on average (at most "
                f"{max(ages, default=0)}), still waiting {len(deferred) - len(ages)}"
            )
        return "\n".join([*lines, *(self.problems() or ["every stage and every prompt exactly once"])])


def _drawn(entry: Mapping[str, Any]) -> Outcomes:
    """Return epoch -> outcome -> rows of a step's entry."""
    if "drawn" in entry:
        return entry["drawn"]
    return {} if entry["epoch"] is None else {entry["epoch"]: {TRAINED: entry["prompts"]}}


def audit(entries: Iterable[Mapping[str, Any]]) -> LedgerAudit:
    """Return the audit of a ledger's entries."""
    result = LedgerAudit()
    for entry in entries:
        if "begin" in entry:
            undone = [step for step in result.steps if step > entry["begin"]]
            result.num_repeated += len(undone)
            for step in undone:
                del result.steps[step]
            result.rows, result.order = entry["rows"], entry.get("order")
            if not result.steps:
                result.first = entry["begin"]
        else:
            result.steps[entry["step"]] = dict(entry)
    return result


def main(argv: Sequence[str]) -> int:
    """Print the audit of a run's ledger, and return the exit code."""
    if len(argv) != 1 or not os.path.isfile(os.path.join(argv[0], FILE)):
        show_error(f"usage: {COMMAND} RUN\nRUN: the directory that a run wrote to, with {FILE} in it\n")
        return 2
    try:
        result = audit(read_ledger(os.path.join(argv[0], FILE)))
    except CheckpointError as error:
        show_error(f"error: {error}\n")
        return 1
    show(f"{result}\n")
    return 1 if result.problems() else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
