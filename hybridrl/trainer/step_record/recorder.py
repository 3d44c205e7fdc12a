"""`StepRecorder`: keeps what `hybridrl replay` needs of some steps (`trainer.record_steps`).

It is a wrapper of the loop's stages. After each one it holds the batch, which costs no copy, because stages replace
columns and never write into them. At the end of the step it decides whether to keep the step. The engines' state before
the step is that of the newest snapshot (`StepRetry`); in one process the recorder takes its own. To write it, the
engines load it, save it, and load their present state again.

A step that cannot be kept is logged, and the run goes on. Made by `PPOLoop`; runs in the driver.
"""

import contextlib
import copy
import functools
import logging
import os
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping
from statistics import fmean, pstdev
from types import GeneratorType
from typing import Any

import torch

from hybridrl.config import to_yaml
from hybridrl.errors import (
    CallTimeout,
    CheckpointError,
    DataError,
    HybridRLError,
    NonFiniteError,
    ObjectLost,
    PlacementError,
    WorkerLost,
)
from hybridrl.framework.stage import StageFn, spec_of
from hybridrl.trainer.checkpoint.step_ledger import LEDGER
from hybridrl.trainer.checkpoint.store import directory_bytes, write_run_state
from hybridrl.trainer.recovery.policies import StepSnapshot
from hybridrl.trainer.run.state import load_from_memory, save_states, states_in_memory
from hybridrl.trainer.step_record.files import AFTER, BEFORE, STAGES, StageOutput, record_store, write_stages

logger = logging.getLogger(__name__)
NOT_REPEATED = (LEDGER, "ahead")  # state of which a repetition of one step needs nothing
LOSSES = (WorkerLost, CallTimeout, ObjectLost, PlacementError)  # for which the step runs again, or the job ends
SCORE = "critic/score/mean"
SPIKE_SIGMAS, SPIKE_STEPS = 6.0, 10  # from the mean of so many steps or more
NUM_SCORES = 20  # steps that the mean is of, at most


class StepRecorder:
    """Keeps steps of a trainer's run.

    Args:
        trainer: A `PPOLoop`.
    """

    def __init__(self, trainer: Any):
        self._trainer, settings = trainer, trainer.config.trainer
        self._kinds, self._limit = frozenset(settings.recorded_kinds), settings.record_max_gb * 1e9
        self._store = record_store(trainer.store.root)
        self._is_local = settings.backend == "local"
        self._scores: deque[float] = deque(maxlen=NUM_SCORES)
        self.reset()

    def reset(self) -> None:
        """Forget the step in progress: the next stage begins a step."""
        self._step = -1
        self._outputs: list[StageOutput] = []
        self._before: StepSnapshot | None = None

    # ---- during a step

    def __call__(self, fn: StageFn) -> StageFn:
        """Return `fn` as a stage after which the batch is held.

        It keeps the step if a check refuses to go on.
        """
        name = spec_of(fn).name

        @functools.wraps(fn)
        def recorded(ctx: Any) -> Any:
            self._begin(ctx.step_number)
            with _on_refusal(functools.partial(self._refuse, ctx, name)):
                result = fn(ctx)
            if isinstance(result, GeneratorType):
                return self._halves(result, ctx, name)
            self._add(ctx, name)
            return result

        return recorded

    def _halves(self, halves: GeneratorType, ctx: Any, name: str) -> Generator[Any, None, None]:
        with _on_refusal(functools.partial(self._refuse, ctx, name)):
            yield from halves
        self._add(ctx, name)

    def _begin(self, step: int) -> None:
        if step == self._step:
            return
        self.reset()
        retry = self._trainer.step_retry
        self._step, newest = step, retry.pending or retry.snapshot
        if newest is not None and newest.step == step - 1:
            self._before = newest
        elif self._is_local or [*self._planned(step)]:
            self._before = StepSnapshot(step - 1, self._engines(), states_in_memory(self._stateful))

    def _add(self, ctx: Any, name: str) -> None:
        if self._step >= 0:  # not after `end_step`
            self._outputs.append(StageOutput(name, StageOutput(name, ctx.batch).copy()))

    def _refuse(self, ctx: Any, name: str) -> None:
        """Keep a step that a check has ended, with what its last stage has done so far."""
        self._add(ctx, name)
        self.keep(ctx, ["refused"] if "refused" in self._kinds else [])

    # ---- at its end

    def end_step(self, ctx: Any) -> None:
        """Keep the step if there is a reason to. Called before the next snapshot is taken."""
        self.keep(ctx, [*self._planned(self._step), *self._found(ctx)])
        self.reset()

    def _planned(self, step: int) -> Iterator[str]:
        """Yield the kinds of `trainer.record_steps` that this step is, whatever happens in it."""
        ends = {"first": 1, "last": self._trainer.total_training_steps}
        yield from (kind for kind in sorted(self._kinds) if step == ends.get(kind) or kind == str(step))

    def _found(self, ctx: Any) -> Iterator[str]:
        """Yield the kinds that the step's columns and metrics show."""
        score, scores = ctx.metrics.get(SCORE), [*self._scores]
        if score is not None:
            self._scores.append(score)
            far = len(scores) >= SPIKE_STEPS and abs(score - fmean(scores)) > SPIKE_SIGMAS * pstdev(scores) > 0
            if far and "spike" in self._kinds:
                yield "spike"
        skipped = any(value > 0 for name, value in ctx.metrics.items() if name.endswith("/skipped"))
        if "nonfinite" in self._kinds and (skipped or any(map(_has_nan, self._outputs))):
            yield "nonfinite"

    def keep(self, ctx: Any, why: list[str]) -> None:
        """Write the step, for these reasons; without one, do nothing."""
        step = self._step
        if not why or step < 0 or step in self._store.steps():  # it has ended
            return
        reason = self._obstacle()
        if reason is None:
            try:
                self._store.commit(step, functools.partial(self._write, ctx, why))
                words = (step, ", ".join(why), self._trainer.store.root, step)
                logger.info("kept step %d (%s): hybridrl replay %s %d", *words)
                return
            except (CheckpointError, DataError, NonFiniteError) as error:
                reason = str(error)
        logger.warning("step %d is not kept for hybridrl replay (%s): %s", step, why[0], reason)

    def _obstacle(self) -> str | None:
        if self._before is None:
            return f"there is no snapshot of step {self._step - 1}; trainer.snapshot_freq=1 takes one after every step"
        sizes = [directory_bytes(self._store.path(step)) for step in self._store.steps()]
        least = max(sizes, default=2 * self._trainer.saver.min_checkpoint_bytes)
        if sum(sizes) + least > self._limit:
            return (
                f"{self._store.root} has {sum(sizes) / 1e9:.2f} GB, a step takes {least / 1e9:.2f} GB, and "
                f"trainer.record_max_gb is {self._limit / 1e9:g}"
            )
        return None

    # ---- writing

    @property
    def _stateful(self) -> dict[str, Any]:
        return {name: one for name, one in self._trainer.stateful.items() if name not in NOT_REPEATED}

    def _engines(self) -> dict[str, Any]:
        """Return a snapshot of all trained engines."""
        trainer = self._trainer
        found = trainer.resume_state.call_surviving(trainer.trained_groups(), "take_snapshot")
        # In one process what a snapshot has changes with the engine.
        return {role: list(map(copy.deepcopy, parts)) for role, parts in found.items()} if self._is_local else found

    def _load(self, engines: Mapping[str, Any]) -> None:
        for role, group in self._trainer.trained_groups().items():
            group.load_snapshot(engines[role])

    def _write(self, ctx: Any, why: list[str], directory: str) -> None:
        trainer, before = self._trainer, self._before
        assert before is not None, "`keep` checks it"
        trainer.save_engines(os.path.join(directory, AFTER))
        after = self._engines()
        try:
            self._load(before.engine_refs)
            trainer.save_engines(os.path.join(directory, BEFORE))
        finally:
            self._load(after)
        state = {
            "global_steps": self._step,
            "why": why,
            "ranks": {role: group.world_size for role, group in trainer.groups.items()},
            "metrics": {name: float(value) for name, value in ctx.metrics.items()},
            "states": self._save_states(before, directory),
            "stages": write_stages(os.path.join(directory, STAGES), self._outputs),
        }
        write_run_state(directory, state, config_yaml=to_yaml(trainer.config, hide_secrets=True))

    def _save_states(self, before: StepSnapshot, directory: str) -> dict[str, Any]:
        """Write the driver's own state before the step."""
        stateful = self._stateful
        now = states_in_memory(stateful)
        try:
            load_from_memory(stateful, before.states)
            return save_states(stateful, directory)
        finally:
            load_from_memory(stateful, now)


@contextlib.contextmanager
def _on_refusal(keep: Callable[[], None]) -> Iterator[None]:
    """Call `keep` if a check of this library raises in the block.

    After a lost process nothing is kept, because the step runs again.
    """
    try:
        yield
    except LOSSES:
        raise
    except HybridRLError:
        keep()
        raise


def _has_nan(output: StageOutput) -> bool:
    tensors = [column for column in output.columns().values() if isinstance(column, torch.Tensor)]
    return any(bool(column.isnan().any()) for column in tensors if column.is_floating_point() and column.dim() <= 2)
