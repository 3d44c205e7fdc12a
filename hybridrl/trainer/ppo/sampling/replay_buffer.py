"""Replay buffer: sample groups of earlier steps that are added to a batch, never older than `trainer.staleness`.

A group is the responses to one prompt with their original rewards. The stages recompute everything that depends on the
policy (log-probs, values, advantages), as for new samples, so a replayed sample goes through the same loss.
`algorithm.rollout_correction` weights it by how far the policy has moved from the weights that generated it.

Lives in the driver. The trainer's stage `replay` calls it. Shapes: S rows, n of them per group, R response tokens.
"""

import os
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch

from hybridrl.config.schema.trainer import ReplayConfig
from hybridrl.protocol import DataProto
from hybridrl.rewards.manager import BRANCHES
from hybridrl.trainer.ppo.sampling.off_policy import token_ages

FILE = "groups"
# As wide as the batch's longest prompt and more.
LEFT_PADDED_COLUMNS = ("prompts", "input_ids", "attention_mask", "position_ids")


@dataclass
class SampleGroup:
    """Responses to one prompt.

    Attributes:
        rows: n samples.
        version: Version of the weights that generated the oldest token.
        uses: How often the group was replayed.
    """

    rows: DataProto
    version: int
    uses: int = 0


class ReplayBuffer:
    """Buffer of the newest `config.size` groups.

    Args:
        config: Settings `trainer.replay`.
        n: Samples per group.
        staleness: Maximum age in versions; older groups are dropped.
        pad_token_id: Token that pads prompts on the left.
    """

    def __init__(self, config: ReplayConfig, *, n: int, staleness: int, pad_token_id: int):
        self.config, self.n, self.staleness = config, n, staleness
        self._concat = partial(concat_padded, pad_token_id=pad_token_id)
        self._groups: deque[SampleGroup] = deque(maxlen=config.size)

    def __len__(self) -> int:
        return len(self._groups)

    def mix_into(self, batch: DataProto, *, version: int, seed: int) -> DataProto:
        """Return the new samples followed by replayed ones, and add the new ones to the buffer."""
        replayed = self.sample(version=version, seed=seed)
        self.add(batch)
        return batch if replayed is None else self._concat([batch.select(meta_info_keys=[]), replayed])

    def add(self, batch: DataProto) -> None:
        """Add the groups that have a token and a reward. A full buffer drops its oldest groups."""
        token_versions = -token_ages(batch, version=0)  # (S, R); meaningful where response_mask is 1
        for start in range(0, len(batch), self.n):
            rows = torch.arange(start, start + self.n)
            versions = token_versions[rows][batch.batch["response_mask"][rows].bool()]
            if len(versions) and batch.batch["reward_valid"][rows].any():
                group = batch.select_idxs(rows).select(meta_info_keys=[]).stored_again()
                self._groups.append(SampleGroup(group, version=int(versions.min())))

    def sample(self, *, version: int, seed: int) -> DataProto | None:
        """Return up to `config.groups` random groups, or None if there is none. Drops unusable groups.

        Args:
            version: Version of the policy that they will train.
            seed: Seed of the random choice.
        """
        usable = [g for g in self._groups if version - g.version <= self.staleness and g.uses < self.config.max_uses]
        self._groups = deque(usable, maxlen=self.config.size)
        order = np.random.default_rng(seed).permutation(len(usable))[: self.config.groups]
        chosen = [usable[i] for i in sorted(order)]
        for group in chosen:
            group.uses += 1
        return self._concat([group.rows for group in chosen]) if chosen else None

    # -- snapshot

    def state_dict(self) -> list[SampleGroup]:
        """Return the present groups."""
        return [replace(group) for group in self._groups]

    def load_state_dict(self, groups: Sequence[SampleGroup]) -> None:
        """Replace the groups by those of a `state_dict`."""
        self._groups = deque((replace(group) for group in groups), maxlen=self.config.size)

    # -- checkpoint

    def save(self, directory: str) -> list[dict[str, int]]:
        """Write the groups to `directory` and return the rest of the state for `load`, JSON-serializable."""
        if self._groups:
            os.makedirs(directory, exist_ok=True)
            self._concat([group.rows for group in self._groups]).save_to_disk(os.path.join(directory, FILE))
        return [{"version": one.version, "uses": one.uses, "rows": len(one.rows)} for one in self._groups]

    def load(self, directory: str, state: Iterable[dict[str, Any]] | None) -> None:
        """Replace the groups by those that `save` wrote; without state the buffer is empty.

        A group keeps the number of samples with which it was saved.
        """
        entries = list(state or ())
        self._groups.clear()
        if not entries:
            return
        rows = DataProto.load_from_disk(os.path.join(directory, FILE))
        start, size = 0, len(rows) // len(entries)  # of all groups, where an older version has written them
        for entry in entries:
            own = torch.arange(start, start := start + entry.get("rows", size))
            self._groups.append(SampleGroup(rows.select_idxs(own), entry["version"], entry["uses"]))


def concat_padded(batches: Sequence[DataProto], *, pad_token_id: int) -> DataProto:
    """Return the rows of all batches, with prompts padded on the left to one width.

    Where only some batches have an object column, the other rows have None (no `branches`): batches without an image,
    or groups of a run with another `agent.train_branches`.
    """
    width = max(batch.batch["prompts"].shape[1] for batch in batches)
    padded = [_pad_to(batch, width, pad_token_id) for batch in batches]
    names = {name for batch in padded for name in batch.non_tensor_batch}
    return DataProto.concat([_with_objects(batch, names) for batch in padded])


def _with_objects(batch: DataProto, names: set[str]) -> DataProto:
    filled = batch.select()
    for name in names - batch.non_tensor_batch.keys():
        values: list[Any] = [[] if name == BRANCHES else None for _ in range(len(batch))]
        filled.non_tensor_batch[name] = np.fromiter(values, dtype=object, count=len(batch))
    return filled


def _pad_to(batch: DataProto, width: int, pad_token_id: int) -> DataProto:
    missing = width - batch.batch["prompts"].shape[1]
    if missing == 0:
        return batch
    wider = batch.select()
    for name in LEFT_PADDED_COLUMNS:
        fill = pad_token_id if name in ("prompts", "input_ids") else 0
        wider.batch[name] = torch.nn.functional.pad(wider.batch[name], (missing, 0), value=fill)
    return wider
