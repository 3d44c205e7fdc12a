"""Dynamic sampling: only groups whose samples have different rewards are trained on (DAPO, arXiv 2503.14476, 3.2).

A group whose samples all have the same reward has no advantage. `GroupFilter` drops it, and the trainer's stage
`filter_groups` generates further batches until `data.train_batch_size` groups are there:

    groups = group_filter.begin(version=7)          the groups that the step before has kept
    while not groups.add(batch, extra, epoch=0):    batch after batch, until the step has enough groups
        ...
    batch = groups.take()

With `order=shortest` a step trains on the groups whose longest response is the shortest, which were complete first:
over-sampling, as tail batching does (RollPacker, arXiv 2509.21009). The choice reads lengths, not the clock, so a
repeated step makes the same one. All responses are generated to their end.

Groups beyond the batch are kept for the next step if they are not too old for it then (`trainer.staleness`, by default
`trainer.lag`). So a synchronous run keeps none and stays on-policy. Kept groups belong to snapshot and checkpoint. What
became of every prompt is in `StepGroups.outcomes`, for the step ledger.

Lives in the driver. Shapes: S rows, n of them per group, G groups, R response tokens.
"""

import logging
import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from hybridrl.config.schema.ppo import FilterGroupsConfig
from hybridrl.errors import CheckpointError, DataError
from hybridrl.protocol import DataProto
from hybridrl.rewards.manager import response_lengths
from hybridrl.trainer.checkpoint.step_ledger import KEPT, TRAINED
from hybridrl.trainer.data.prompt_loader import EPOCH, ROW
from hybridrl.trainer.ppo.sampling.off_policy import token_ages
from hybridrl.trainer.ppo.sampling.replay_buffer import concat_padded

logger = logging.getLogger(__name__)
FILE = "groups"
DEFAULT_METRIC = "seq_reward"
WARN_EVERY = 10  # generation batches of one step, if their number is not limited
FILTERED, SURPLUS = "filtered", "surplus"  # outcomes of a prompt, in the ledger: a format on disk


def differs_in_group(values_S: torch.Tensor, valid_S: torch.Tensor, *, n: int) -> torch.Tensor:
    """Return whether the valid values of each group of `n` adjacent rows differ, (G,) bool.

    A group with fewer than two valid values does not differ. Values are compared exactly: a standard deviation of equal
    numbers can be above 0 by rounding.

    Args:
        values_S: Finite where valid, (S,) float.
        valid_S: Rows to compare, (S,) bool.
        n: Rows of a group.
    """
    values, valid = values_S.reshape(-1, n), valid_S.reshape(-1, n)
    highest = values.masked_fill(~valid, -torch.inf).amax(-1)
    lowest = values.masked_fill(~valid, torch.inf).amin(-1)
    return highest > lowest


def metric_values(
    batch: DataProto, extra: Mapping[str, Sequence[Any]], metric: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the metric that groups are compared by, (S,) float64, and where it is valid, (S,) bool.

    Args:
        batch: Scored samples.
        extra: The reward function's other columns.
        metric: `seq_reward` or `seq_final_reward`: the reward of the response. `score`: the same, unless the reward
            function returns its own. `acc`: as the reward function returns it.

    Raises:
        DataError: The reward function does not return the metric, or returns something else than numbers.
    """
    valid = batch.batch["reward_valid"].bool()
    if metric in ("seq_reward", "seq_final_reward") or (metric == "score" and metric not in extra):
        return batch.batch["token_level_scores"].double().sum(-1), valid
    if metric not in extra:
        raise DataError(
            f"algorithm.filter_groups.metric={metric}: the reward function returns no {metric!r}, only "
            f"{', '.join(['score', *extra])}; return it in the dict, or use algorithm.filter_groups.metric=seq_reward"
        )
    column = [np.nan if value is None else value for value in extra[metric]]
    try:
        values = torch.tensor(np.asarray(column, dtype=np.float64))
    except (TypeError, ValueError) as error:
        raise DataError(
            f"algorithm.filter_groups.metric={metric}: the reward function returns {column[0]!r}, which is no number; "
            "use algorithm.filter_groups.metric=seq_reward"
        ) from error
    return values.nan_to_num(), valid & values.isfinite()


class GroupFilter:
    """Collects the groups of each step, and keeps the surplus between two steps.

    Args:
        config: Settings `algorithm.filter_groups`.
        n: Samples per group.
        batch_size: Groups that a step trains on.
        max_age: Maximum age of a trained token, in weight versions.
        pad_token_id: Token that pads prompts on the left.
    """

    def __init__(self, config: FilterGroupsConfig, *, n: int, batch_size: int, max_age: int, pad_token_id: int):
        self.config, self.n, self.batch_size = config, n, batch_size
        self.max_age, self.pad_token_id = max_age, pad_token_id
        self.kept: DataProto | None = None  # whole groups, oldest first

    def begin(self, *, version: int) -> "StepGroups":
        """Return the collection of the step that trains the weights `version`; it starts with the kept groups."""
        return StepGroups(self, version=version)

    # -- snapshot

    def state_dict(self) -> DataProto | None:
        """Return the kept groups."""
        return None if self.kept is None else self.kept.select()

    def load_state_dict(self, state: DataProto | None) -> None:
        """Replace the kept groups by those of a `state_dict`."""
        self.kept = None if state is None else state.select()

    # -- checkpoint

    def save(self, directory: str) -> dict[str, int]:
        """Write the kept groups to `directory` and return the rest of the state for `load`, JSON-serializable."""
        if self.kept is None:
            return {"rows": 0}
        os.makedirs(directory, exist_ok=True)
        self.kept.save_to_disk(os.path.join(directory, FILE))
        return {"rows": len(self.kept), "n": self.n}

    def load(self, directory: str, state: Mapping[str, int] | None) -> None:
        """Replace the kept groups by those that `save` wrote; without state there are none.

        Raises:
            CheckpointError: They have another number of samples.
        """
        if state and state["rows"] and state.get("n", self.n) != self.n:
            raise CheckpointError(
                f"{directory} has {state['rows'] // state['n']} groups that were kept for the next step, of "
                f"{state['n']} samples each, and actor_rollout_ref.rollout.n={self.n}: set it to {state['n']}, or "
                "resume from a checkpoint without kept groups (training/filter_groups/kept_groups=0)"
            )
        self.kept = DataProto.load_from_disk(os.path.join(directory, FILE)) if state and state["rows"] else None


class StepGroups:
    """The groups of one step while they are collected. Changes its filter only in `take`."""

    def __init__(self, group_filter: GroupFilter, *, version: int):
        self._filter, self._version = group_filter, version
        self._usable = [] if group_filter.kept is None else [group_filter.kept]
        # What became of every prompt: trained, filtered, surplus (dropped), or kept for the next step.
        self.outcomes: dict[str, dict[str, list[int]]] = {}
        self._num_batches = self._num_groups = self._num_filtered = 0
        self._metric_sum, self._num_valid = 0.0, 0

    def __len__(self) -> int:
        return sum(map(len, self._usable)) // self._filter.n

    def add(self, batch: DataProto, extra: Mapping[str, Sequence[Any]], *, epoch: int) -> bool:
        """Add the groups of a generation batch that teach something, with `enable`; return whether the step has enough.

        Args:
            batch: Scored samples, n adjacent rows per prompt.
            extra: The reward function's other columns.
            epoch: Epoch of the prompts, unless the column `EPOCH` has it.

        Raises:
            DataError: See `metric_values`, or the step needs more than `max_num_gen_batches`.
        """
        n, metric = self._filter.n, self._filter.config.metric or DEFAULT_METRIC
        values, valid = metric_values(batch, extra, metric)
        differs = differs_in_group(values, valid, n=n)
        if not self._filter.config.enable:
            differs = torch.ones_like(differs)
        rows = batch.select(meta_info_keys=[])
        rows.non_tensor_batch = {EPOCH: np.full(len(batch), epoch, dtype=object)} | rows.non_tensor_batch
        chosen = differs.repeat_interleave(n)
        self._record(FILTERED, rows.select_idxs(~chosen))
        if chosen.any():
            self._usable.append(rows.select_idxs(chosen))
        self._num_batches += 1
        self._num_groups += len(differs)
        self._num_filtered += int((~differs).sum())
        self._metric_sum += float(values[valid].sum())
        self._num_valid += int(valid.sum())
        return self._is_full()

    def _is_full(self) -> bool:
        size, limit = self._filter.batch_size, self._filter.config.max_num_gen_batches
        if len(self) >= size:
            return True
        metric, mean = self._filter.config.metric or DEFAULT_METRIC, self._metric_sum / max(1, self._num_valid)
        found = (
            f"after {self._num_batches} generation batches the step has {len(self)} of {size} groups "
            f"(data.train_batch_size) with different {metric}; {self._num_filtered} of {self._num_groups} generated "
            f"groups were filtered, and the mean of {metric} is {mean:g}"
        )
        way_out = (
            "use prompts that the policy sometimes solves, or raise actor_rollout_ref.rollout.n or data.gen_batch_size"
        )
        if limit and self._num_batches >= limit:
            raise DataError(
                f"algorithm.filter_groups.max_num_gen_batches={limit}: {found}; {way_out}, or raise the limit (0: none)"
            )
        if self._num_batches % WARN_EVERY == 0:
            logger.warning("step %d: %s; generating more. If this repeats, %s", self._version + 1, found, way_out)
        return False

    def take(self) -> DataProto:
        """Return the step's batch: the oldest groups. Keep the other ones that the next step may train on.

        With `order=shortest`, groups that the step before has kept come first, then the shortest ones.
        """
        size, n = self._filter.batch_size, self._filter.n
        groups = self._in_order(concat_padded(self._usable, pad_token_id=self._filter.pad_token_id))
        batch, rest = groups.slice(0, size * n).select(), groups.slice(size * n)
        fresh = (self._group_ages(rest) <= self._filter.max_age).repeat_interleave(n)
        kept = rest.select_idxs(fresh)
        self._filter.kept = kept.stored_again() if len(kept) else None
        for name, rows in ((TRAINED, batch), (SURPLUS, rest.select_idxs(~fresh)), (KEPT, kept)):
            self._record(name, rows)
        batch.non_tensor_batch = {name: column for name, column in batch.non_tensor_batch.items() if name != EPOCH}
        return batch

    def _in_order(self, groups: DataProto) -> DataProto:
        """Return all groups, those of the step first; both parts in the order in which they were drawn."""
        if self._filter.config.order != "shortest":
            return groups
        n, num_kept = self._filter.n, 0 if self._filter.kept is None else len(self._filter.kept) // self._filter.n
        lengths = response_lengths(groups).reshape(-1, n).amax(-1)
        lengths[:num_kept] = -1
        by_length, size = lengths.argsort(stable=True), self._filter.batch_size
        order = torch.cat([by_length[:size].sort().values, by_length[size:].sort().values])
        return groups.select_idxs((order[:, None] * n + torch.arange(n)).reshape(-1))

    def _group_ages(self, groups: DataProto) -> torch.Tensor:
        """Return the age of each group's oldest token in the next step, (G,) int64."""
        ages = token_ages(groups, version=self._version + 1).where(groups.batch["response_mask"].bool(), 0)
        return ages.amax(-1).reshape(-1, self._filter.n).amax(-1)

    def _record(self, outcome: str, rows: DataProto) -> None:
        columns = rows.non_tensor_batch
        for epoch, row in zip(columns[EPOCH][:: self._filter.n], columns[ROW][:: self._filter.n], strict=True):
            self.outcomes.setdefault(str(epoch), {}).setdefault(outcome, []).append(int(row))

    def metrics(self) -> dict[str, float]:
        """Return the metrics of the collection; those of the batch cover its chosen groups only."""
        count = {name: sum(len(rows.get(name, ())) for rows in self.outcomes.values()) for name in (SURPLUS, KEPT)}
        name, group = self._filter.config.metric or DEFAULT_METRIC, "training/filter_groups"
        return {
            "train/num_gen_batches": float(self._num_batches),
            f"{group}/evicted_samples": float(self._num_filtered * self._filter.n),
            f"{group}/evicted_ratio": self._num_filtered / max(1, self._num_groups),
            f"{group}/surplus_groups": float(count[SURPLUS]),
            f"{group}/kept_groups": float(count[KEPT]),
            f"{group}/{name}_mean": self._metric_sum / self._num_valid if self._num_valid else float("nan"),
        }
