"""Tail batching: prompts with long responses wait, and are generated together (RollPacker, arXiv 2509.21009).

With `algorithm.filter_groups.order=tail_batching`, a step is one of two rounds of P = `data.train_batch_size` prompts:

    short   starts more prompts (`data.gen_batch_size`), trains the P whose groups are complete after the fewest tokens,
            and defers the others: what they have generated is dropped
    long    takes the P oldest deferred prompts, as soon as there are so many, and generates them whole

A deferred prompt keeps its seed. Its long round draws the same random numbers, so it generates the long responses that
the short round has ended, except for what training has changed meanwhile. No prompt is drawn until it is short. The
paper also starts more responses per prompt and keeps those that end first. That prefers short ones within a prompt, and
is left out here.

The last steps of a run start fewer prompts, and the last one trains all that wait. So a run trains every prompt that it
has drawn, exactly once per epoch, and every step has P prompts. A long round may belong to a later epoch than its
prompts.

What a round defers depends on tokens and not on the clock (`serving/agent_loop/short_round.py`). The waiting prompts
belong to snapshot and checkpoint. So a resumed run and a step that runs again defer the same ones.

Lives in the driver.
"""

import logging
from collections.abc import Callable, Iterable
from dataclasses import astuple, dataclass, replace
from typing import Any, cast

import numpy as np
import torch

from hybridrl.protocol import DataProto
from hybridrl.trainer.checkpoint.step_ledger import DEFERRED, TRAINED, Outcomes
from hybridrl.trainer.data.prompt_loader import DEFERRED as STATE
from hybridrl.trainer.data.prompt_loader import EPOCH, ROW, NoPrompts, PromptLoader, StepPrompts, assign_uids_and_seeds
from hybridrl.trainer.data.seeds import Purpose
from hybridrl.trainer.run.middleware import BatchContext

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Prompt:
    """A drawn prompt.

    Attributes:
        epoch: In which it was drawn.
        row: Of the training data.
        seed: Of its responses.
        step: Step that deferred it; 0 for a new one.
    """

    epoch: int
    row: int
    seed: int = 0
    step: int = 0


class TailPrompts(StepPrompts):
    """Draws the prompts of short and long rounds, and keeps those that wait.

    Args:
        loader: Draws new prompts.
        seed: Of the run.
        batch_size: Prompts that a step trains on.
        gen_batch_size: New prompts that a short round starts.
        step: Returns the step in progress.
        total_steps: Steps of the run.

    Attributes:
        waiting: Deferred prompts, oldest first.
    """

    def __init__(
        self,
        loader: PromptLoader | NoPrompts,
        *,
        seed: int,
        batch_size: int,
        gen_batch_size: int,
        step: Callable[[], int],
        total_steps: int,
    ):
        super().__init__(loader, seed=seed)
        self.batch_size, self.gen_batch_size = batch_size, gen_batch_size
        self.waiting: list[Prompt] = []
        self._step, self._total_steps = step, total_steps
        self._drawn: list[Prompt] = []  # of the round in progress
        self._ages: dict[int, list[int]] = {}  # step in progress -> steps for which its prompts have waited

    def next_batch(self) -> DataProto:
        """Return the prompts of the next round.

        `meta_info` has its `number`, the newest `epoch` of its prompts, and for a short round `num_prompts` to train.
        """
        number, step, size = self.num_drawn + 1, self._step(), self.batch_size
        left = (self._total_steps - step + 1) * size  # prompts that the run still trains
        is_long = len(self.waiting) >= size or left <= size
        taken = self.waiting[:size] if is_long else []
        num_new = size - len(taken) if is_long else min(self.gen_batch_size, left - len(self.waiting))
        prompts = [*taken, *self._draw(num_new)]
        batch = self._collate(prompts, number=number, num_taken=len(taken))
        self.waiting, self.num_drawn = self.waiting[len(taken) :], number
        self._ages = {step: [*self._ages.get(step, ()), *(step - prompt.step for prompt in taken)]}
        return batch

    def _draw(self, num_rows: int) -> list[Prompt]:
        """Return new prompts, of the next epoch too where one ends."""
        loader, drawn = cast(PromptLoader, self.loader), list[Prompt]()
        while len(drawn) < num_rows:
            epoch = loader.epoch
            drawn += [Prompt(epoch, row) for row in loader.next_rows(num_rows - len(drawn))]
        return drawn

    def _collate(self, prompts: list[Prompt], *, number: int, num_taken: int) -> DataProto:
        loader = cast(PromptLoader, self.loader)
        batch = loader.collate([loader.dataset[prompt.row] for prompt in prompts])
        assign_uids_and_seeds(batch, seed=self.seed, purpose=Purpose.TRAIN_ROLLOUT, step=number)
        seeds = batch.batch["seeds"]
        seeds[:num_taken] = torch.tensor([prompt.seed for prompt in prompts[:num_taken]], dtype=seeds.dtype)
        self._drawn = [replace(p, seed=int(seed)) for p, seed in zip(prompts, seeds.tolist(), strict=True)]
        batch.non_tensor_batch[ROW] = np.array([prompt.row for prompt in prompts], dtype=object)
        batch.non_tensor_batch[EPOCH] = np.array([prompt.epoch for prompt in prompts], dtype=object)
        batch.meta_info = {"number": number, "epoch": max(prompt.epoch for prompt in prompts)}
        if len(prompts) > self.batch_size:
            batch.meta_info["num_prompts"] = self.batch_size
        return batch

    def defer_others(self, chosen: Iterable[int] | None, ctx: BatchContext) -> None:
        """Let the prompts of the round wait that are not chosen: their responses were ended.

        Args:
            chosen: Places of the prompts with complete responses; None after a round that generated all.
            ctx: Gets what became of the prompts, and metrics.
        """
        self.defer(chosen)
        ctx.group_outcomes = self.trained()
        self.add_deferred(ctx)

    def add_deferred(self, ctx: BatchContext) -> None:
        """Add the step's deferred prompts to the outcomes of its prompts, and to its metrics."""
        outcomes: Outcomes = ctx.group_outcomes
        deferred = self.outcomes()
        ctx.group_outcomes = {
            epoch: {**outcomes.get(epoch, {}), **deferred.get(epoch, {})} for epoch in {**outcomes, **deferred}
        }
        ctx.metrics |= self.metrics()

    def defer(self, chosen: Iterable[int] | None) -> None:
        """Let the prompts of the round wait that are not at the places `chosen`; None lets none wait."""
        places = list(range(len(self._drawn)) if chosen is None else chosen)
        left = {*range(len(self._drawn))} - {*places}
        self.waiting += [replace(self._drawn[place], step=self._step()) for place in sorted(left)]
        self._drawn = [self._drawn[place] for place in places]
        if self.waiting and self._step() == self._total_steps:
            logger.warning(
                "the run ends, and %d deferred prompts were not trained: trainer.total_training_steps is lower than in "
                "the run that deferred them",
                len(self.waiting),
            )

    def outcomes(self) -> dict[str, dict[str, list[int]]]:
        """Return the deferred prompts of this step: epoch -> outcome -> rows."""
        return _by_epoch(DEFERRED, [prompt for prompt in self.waiting if prompt.step == self._step()])

    def trained(self) -> dict[str, dict[str, list[int]]]:
        """Return the prompts of the round that were not deferred, as `outcomes` does."""
        return _by_epoch(TRAINED, self._drawn)

    def metrics(self) -> dict[str, float]:
        """Return how many prompts this step has deferred, how many wait, and how long its own ones have waited."""
        step = self._step()
        ages = self._ages.get(step, [])
        return {
            "rollout/deferred": float(sum(prompt.step == step for prompt in self.waiting)),
            "rollout/deferred_waiting": float(len(self.waiting)),
            "rollout/deferred_trained": float(len(ages)),
            "rollout/deferred_age_mean": float(np.mean(ages)) if ages else 0.0,
            "rollout/deferred_age_max": float(max(ages, default=0)),
        }

    # -- snapshot and checkpoint

    def state_dict(self) -> dict[str, Any]:
        """Return how many batches were drawn, and the waiting prompts."""
        return super().state_dict() | {STATE: [list(astuple(prompt)) for prompt in self.waiting]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue after a `state_dict`, also one of `StepPrompts`."""
        super().load_state_dict({name: value for name, value in state.items() if name != STATE})
        self.waiting, self._drawn, self._ages = [Prompt(*entry) for entry in state.get(STATE, ())], [], {}


def _by_epoch(outcome: str, prompts: list[Prompt]) -> dict[str, dict[str, list[int]]]:
    found: dict[str, dict[str, list[int]]] = {}
    for prompt in prompts:
        found.setdefault(str(prompt.epoch), {outcome: []})[outcome].append(prompt.row)
    return found
