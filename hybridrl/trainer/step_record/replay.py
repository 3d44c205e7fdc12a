"""Repeat a kept step in one process, and compare every stage.

Each stage gets the columns that it had in the run.

    replay = StepReplay(record, config, only=None, stop_at=None)
    replay.prepare(trainer)       engines, random numbers and the driver's state as before the step
    replay.run(trainer)           the stages, then metrics and weights
    replay.lines                  what is equal, and what is not

A stage does not see what an earlier repeated stage has computed, so one that deviates does not hide the next. Stages
without a use in one process (validation, logging, checkpoints, pushes) are not repeated. Neither is generation that
does not depend on the step alone: by another engine than `hf`, by agents, or ahead of training.

`hybridrl replay` uses it, in the driver.
"""

import functools
import os
import pdb
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from hybridrl.config import PPOConfig
from hybridrl.framework.stage import StageFn, spec_of
from hybridrl.framework.step_runner import run_once
from hybridrl.trainer.run.middleware import apply_middleware
from hybridrl.trainer.run.setup import run_stages
from hybridrl.trainer.run.state import load_states
from hybridrl.trainer.step_record.comparison import column_difference, compare_columns, compare_metrics, nan_lines
from hybridrl.trainer.step_record.files import AFTER, BEFORE, StageOutput, StepRecord, changed_columns

NO_USE = ("update_weights", "testing", "log", "save_checkpoint", "update_sampler")
GENERATION = ("next_batch", "gen", "filter_groups")


class StepReplay:
    """One repetition of a kept step.

    Args:
        record: The kept step.
        config: The run's settings, as they were.
        only: Name of the stage to repeat; None for all.
        stop_at: Rank at whose part of a stage the debugger stops; None: nowhere.

    Attributes:
        lines: What was found, one line each.
    """

    def __init__(self, record: StepRecord, config: PPOConfig, *, only: str | None, stop_at: int | None):
        self.record, self._config, self._only, self._stop_at = record, config, only, stop_at
        self._kept = {output.name: output for output in record.outputs}
        self._input: StageOutput | None = None
        self._metrics: Mapping[str, float] = {}
        self._stage = ""  # in progress
        self._nan_at = ""  # the first stage with a NaN
        self.lines: list[str] = []

    @property
    def step(self) -> int:
        """Number of the step."""
        return int(self.record.state["global_steps"])

    def prepare(self, trainer: Any) -> None:
        """Set a running trainer to the state before the step.

        Its groups repeat the run's ranks from then on.
        """
        trainer.global_steps = trainer.ledger.step = self.step - 1
        for role, group in trainer.trained_groups().items():
            group.load_checkpoint(trainer.engine_directory(os.path.join(self.record.path, BEFORE), role))
        stateful = {name: one for name, one in trainer.stateful.items() if name in self.record.state["states"]}
        load_states(stateful, self.record.state["states"], self.record.path)
        trainer.begin()
        for role, group in trainer.groups.items():
            ranks = self.record.state["ranks"].get(role, 1)
            group.repeat_ranks(ranks, report=self._report, stop_at=self._stop_at)

    def run(self, trainer: Any) -> None:
        """Repeat the stages, and compare them, the metrics and the weights."""
        run_stages(
            trainer.stages(),
            max_step=1,
            first_step=self.step,
            change=functools.partial(apply_middleware, trainer=trainer),
            wrappers=[functools.partial(self._repeated, trainer)],
        )
        if self._only is None:
            self._add("metrics", compare_metrics(self._metrics, self.record.state["metrics"]))
        if self._only is None or self._only.startswith("update"):
            for role, group in trainer.trained_groups().items():
                directory = trainer.engine_directory(os.path.join(self.record.path, AFTER), role)
                self._add(f"weights of {role}", [compare_weights(group, directory)])
        if self._nan_at:
            self.lines.append(f"the first NaN is written by {self._nan_at}")

    def _report(self, line: str) -> None:
        self._nan_at = self._nan_at or self._stage
        self.lines.append(f"{self._stage}: {line}")

    def _repeated(self, trainer: Any, fn: StageFn) -> StageFn:
        name = spec_of(fn).name

        @functools.wraps(fn)
        def repeated(ctx: Any) -> None:
            before, kept, reason = self._input, self._kept.get(name), self._skipped(name)
            self._stage = name
            if reason is None:
                if self._stop_at is not None and name not in GENERATION:
                    pdb.set_trace()  # the user asked for it: the stage `name` begins
                run_once([fn], ctx)
                self._compare(name, before, kept, StageOutput(name, ctx.batch))
            elif reason:
                self._add(name, [f"not repeated: {reason}"])
            self._input, self._metrics = kept or before, ctx.metrics
            trainer.global_steps = self.step
            if kept is not None:  # for the next stage
                ctx.batch = kept.copy()

        return repeated

    def _skipped(self, name: str) -> str | None:
        """Return why a stage is not repeated; None repeats it.

        An empty reason is not worth a line.
        """
        if name in NO_USE or (self._only is not None and name != self._only and (name, self._only) != GENERATION[:2]):
            return ""
        if name not in self._kept:
            return "the run ended before it"
        return _reason_not_to_repeat(self._config, name)

    def _compare(self, name: str, before: StageOutput | None, kept: StageOutput | None, found: StageOutput) -> None:
        old = {} if before is None else before.columns()
        new = found.columns()
        assert kept is not None, "`_skipped` checks it"
        lines = compare_columns(new, changed_columns(old, kept.columns()))
        nans = nan_lines(changed_columns(old, new))
        self._nan_at = self._nan_at or (name if nans else "")
        self._add(name, lines + nans)

    def _add(self, what: str, lines: list[str]) -> None:
        self.lines += [f"{what}: {line}" for line in lines]


def _reason_not_to_repeat(config: PPOConfig, stage: str) -> str | None:
    if stage not in GENERATION:
        return None
    rollout = config.actor_rollout_ref.rollout
    for depends, reason in (
        (config.trainer.rollout_lag > 0, f"trainer.lag={config.trainer.lag}, so it began in an earlier step"),
        (rollout.mode != "sync", f"actor_rollout_ref.rollout.mode={rollout.mode}"),
        (rollout.name != "hf", f"actor_rollout_ref.rollout.name={rollout.name}, and one process on a CPU has no such"),
        (stage == "filter_groups" or config.algorithm.filter_groups.enable, "algorithm.filter_groups draws again"),
    ):
        if depends:
            return reason
    return None


def compare_weights(group: Any, directory: str) -> str:
    """Return how the group's weights differ from those in a checkpoint, which it has afterwards."""
    found = {name: tensor.clone() for name, tensor in group.worker.trained_engine.weights()}
    group.load_checkpoint(directory)
    worst = max(_deviations(found, dict(group.worker.trained_engine.weights())), default=(0.0, "", ""))
    return f"bit-equal ({len(found)} tensors)" if not worst[2] else f"{worst[2]} of {worst[1]}"


def _deviations(
    found: Mapping[str, torch.Tensor], kept: Mapping[str, torch.Tensor]
) -> Iterator[tuple[float, str, str]]:
    for name, tensor in kept.items():
        if difference := column_difference(found[name], tensor):
            yield (found[name].double() - tensor.double()).abs().max().item(), name, difference
