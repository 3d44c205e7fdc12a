"""Generation ahead of training: `lag` batches are on their way while one is trained on. With lag 0 this is the
synchronous run.

Rollout processes do what they are told in the order in which they were told, so nothing here needs a thread or a lock.
In step t the driver tells them to begin batch t + lag, trains on batch t, and tells them to take the new weights t.
Batch t + lag is therefore made by weights t - 1 exactly, `lag` versions older than those it will train, whatever is
fast and whatever is slow. If the rollout is late the trainer waits for it, and the other way round: a sample is never
older than `lag`.

With partial rollouts a batch is begun as before, but gets only a share of its tokens from each weights: one share per
step, `lag` shares in all, each made by the weights of its step. Its youngest tokens are one version old when they are
trained on, its oldest `lag`.
"""

import os
from collections import deque
from collections.abc import Sequence
from concurrent.futures import CancelledError
from dataclasses import dataclass, field, replace
from typing import Any

from hybridrl.config import PPOConfig
from hybridrl.data_plane.columns import even_bounds
from hybridrl.errors import WorkerLost
from hybridrl.protocol import DataProto, DataProtoFuture
from hybridrl.trainer.ppo.policy import PolicyGroups


@dataclass
class BatchAhead:
    """A batch whose responses are being made. rest: the prompts' other columns; shares: of tokens, begun so far.

    prompts: what the rollout was given, if this process gave it.
    """

    step: int
    epoch: int
    rest: DataProto
    responses: DataProtoFuture | None
    shares: int = 1
    prompts: DataProto | None = None
    pushes: list = field(default_factory=list)  # what the rollout was told to take before, not looked at yet

    def begun_again(self) -> "BatchAhead":
        """Return this batch as another driver can take it: its responses end with this one, and are begun again."""
        return self if self.prompts is None else replace(self, responses=None, pushes=[])


def make_pipeline(policy: PolicyGroups, config: PPOConfig) -> "RolloutPipeline":
    """Return the pipeline that `trainer.lag`, `partial_rollout` and `staleness` ask for."""
    trainer, length = config.trainer, config.data.max_response_length
    lag = (
        trainer.lag
        if trainer.staleness is None or trainer.stale_tokens == "drop"
        else min(trainer.lag, trainer.staleness)
    )
    shares = lag if trainer.partial_rollout and lag > 1 else 1
    return RolloutPipeline(policy, lag=lag, widths=[stop - start for start, stop in even_bounds(length, shares)])


def join_responses(rest: DataProto, responses: DataProto, *, n: int) -> DataProto:
    """Return the batch that training works on: the prompts' other columns `n` times, and what the rollout made."""
    responses.meta_info = {}
    made = responses.select(batch_keys=[name for name in responses.batch.keys() if name != "seeds"])
    return rest.repeat(n, interleave=True).union(made)


class RolloutPipeline:
    """Batches on their way, oldest first. widths: tokens of each share; one share means whole responses."""

    def __init__(self, policy: PolicyGroups, *, lag: int, widths: Sequence[int]):
        self.policy, self.lag, self.widths = policy, lag, list(widths)
        self._ahead: deque[BatchAhead] = deque()
        self._pushes: list = []

    def __len__(self) -> int:
        return len(self._ahead)

    def begin(self, prompts: DataProto, rest: DataProto, *, step: int, epoch: int) -> None:
        """Tell the rollout to make the responses of batch `step`."""
        self._ahead.append(
            BatchAhead(step, epoch, rest, self._begun(prompts), prompts=prompts, pushes=self._take_pushes())
        )

    def _begun(self, prompts: DataProto) -> DataProtoFuture:
        whole = len(self.widths) == 1
        return self.policy.generate_later(prompts) if whole else self.policy.begin_later(prompts, self.widths[0])

    def go_on(self) -> None:
        """Tell the rollout to make the next share of every batch that was begun in an earlier step."""
        for batch in self._ahead:
            if batch.shares < len(self.widths):
                batch.responses = self.policy.continue_later(batch.responses, self.widths[batch.shares])
                batch.shares += 1
                batch.pushes += self._take_pushes()

    def take(self) -> tuple[BatchAhead, DataProto]:
        """Return the oldest batch and its responses, once they are made.

        Raises StaleWeightsError if they are not of the pushed weights.
        """
        batch = self._ahead.popleft()
        while batch.shares < len(self.widths):  # it was begun late: the run has just started
            batch.responses = self.policy.continue_later(batch.responses, self.widths[batch.shares])
            batch.shares += 1
        responses = batch.responses.get()
        for push in batch.pushes:
            push.check()
        return batch, responses

    def push(self, version: int) -> None:
        """Tell the rollout to take the actor's weights as `version`, and do not wait for it if
        generation runs ahead.
        """
        if self.lag == 0:
            self.policy.push_weights(version)
        else:
            self._pushes.append(self.policy.push_weights_later(version))

    def _take_pushes(self) -> list:
        pushes, self._pushes = self._pushes, []
        return pushes

    # -- going back a step

    def remember(self) -> list[BatchAhead]:
        """Return what is on its way now, for `go_back`."""
        return [replace(batch, pushes=[]) for batch in self._ahead]

    def go_back(self, ahead: Sequence[BatchAhead]) -> None:
        """Have on its way what was then.

        Responses that were lost with a process are begun again, by the weights the rollout has now.
        """
        self._pushes = []
        self._ahead = deque(replace(batch) for batch in ahead)
        for batch in self._ahead:
            try:
                if batch.responses is not None:
                    batch.responses.get()
                    continue
            except (WorkerLost, CancelledError):  # the loss itself, or agent loops that ended with it
                if batch.prompts is None:
                    raise
            batch.responses, batch.shares = self._begun(batch.prompts), 1

    # -- durable state

    def save(self, directory: str) -> list[dict[str, Any]]:
        """Wait for what is on its way, write it to `directory`, and return what `restore` needs besides, as JSON-able
        values.
        """
        state = []
        for number, batch in enumerate(self._ahead):
            os.makedirs(directory, exist_ok=True)
            made = batch.responses.get()
            batch.rest.save_to_disk(os.path.join(directory, f"{number}.rest"))
            made.save_to_disk(os.path.join(directory, f"{number}.responses"))
            state.append({"step": batch.step, "epoch": batch.epoch, "shares": batch.shares})
        return state

    def restore(self, directory: str, state: list[dict[str, Any]]) -> None:
        """Go on with what another process had on its way, also if the rollout has another number of processes now."""
        for number, entry in enumerate(state):
            rest = DataProto.load_from_disk(os.path.join(directory, f"{number}.rest"))
            made = DataProto.load_from_disk(os.path.join(directory, f"{number}.responses"))
            self._ahead.append(
                BatchAhead(
                    entry["step"], entry["epoch"], rest, self._as_future(made, groups=len(rest)), entry["shares"]
                )
            )

    def _as_future(self, made: DataProto, *, groups: int) -> DataProtoFuture:
        """The batch as if the rollout's processes had made it: whole groups of samples in each piece."""
        n = len(made) // max(1, groups)
        bounds = even_bounds(groups, self.policy.rollout.world_size)
        return DataProtoFuture(
            collect_fn=DataProto.concat, futures=[made.slice(start * n, stop * n) for start, stop in bounds]
        )
