"""Samples used more than once: groups of earlier steps that fill up a batch, never older than `trainer.staleness`.

A group is the responses to one prompt with their rewards, as they were when they were new. Everything that depends on
the policy (log-probs, values, advantages) is computed again by the same stages that do it for new samples, so a
replayed sample goes through the same loss, and `algorithm.rollout_correction` weighs it by how far the policy has moved
from the weights that made it.

Shapes: S rows, n of them a group, R response tokens.
"""

import os
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from hybridrl.config.schema.trainer import ReplayConfig
from hybridrl.protocol import DataProto
from hybridrl.trainer.ppo.off_policy import token_ages

FILE = "groups"
STARTING_WITH_PROMPT = (
    "prompts",
    "input_ids",
    "attention_mask",
    "position_ids",
)  # columns as wide as the batch's longest prompt and more


@dataclass
class Group:
    """rows: n samples. version: of the weights that made its oldest token. uses: how often it was replayed."""

    rows: DataProto
    version: int
    uses: int = 0


class ReplayBuffer:
    """The newest `config.size` groups.

    staleness: age in versions at which a group is thrown away. n: samples per group.
    """

    def __init__(self, config: ReplayConfig, *, n: int, staleness: int, pad_token_id: int):
        self.config, self.n, self.staleness, self.pad_token_id = config, n, staleness, pad_token_id
        self._groups: deque[Group] = deque(maxlen=config.size)

    def __len__(self) -> int:
        return len(self._groups)

    def filled_up(self, batch: DataProto, *, version: int, seed: int) -> DataProto:
        """Return a batch of new samples with `draw`n ones behind them, and keep the new ones for later."""
        replayed = self.draw(version=version, seed=seed)
        self.add(batch)
        return batch if replayed is None else self.joined([batch.select(meta_info_keys=[]), replayed])

    def add(self, batch: DataProto) -> None:
        """Keep the groups that have a token and a reward; the oldest make room for them."""
        made_by = -token_ages(batch, version=0)  # (S, R); meaningful where a token is
        for start in range(0, len(batch), self.n):
            rows = torch.arange(start, start + self.n)
            tokens = made_by[rows][batch.batch["response_mask"][rows].bool()]
            if len(tokens) and batch.batch["reward_valid"][rows].any():
                self._groups.append(Group(batch.select_idxs(rows).select(meta_info_keys=[]), version=int(tokens.min())))

    def draw(self, *, version: int, seed: int) -> DataProto | None:
        """Return `config.groups` groups, or as many as there are; None if there is none.

        version: of the policy they will train.
        """
        usable = [g for g in self._groups if version - g.version <= self.staleness and g.uses < self.config.max_uses]
        self._groups = deque(usable, maxlen=self.config.size)
        order = np.random.default_rng(seed).permutation(len(usable))[: self.config.groups]
        chosen = [usable[i] for i in sorted(order)]
        for group in chosen:
            group.uses += 1
        return self.joined([group.rows for group in chosen]) if chosen else None

    def joined(self, pieces: Sequence[DataProto]) -> DataProto:
        """Return the rows of all pieces, their prompts padded on the left to one width."""
        width = max(piece.batch["prompts"].shape[1] for piece in pieces)
        return DataProto.concat([_widened(piece, width, self.pad_token_id) for piece in pieces])

    # -- going back a step

    def remember(self) -> list[Group]:
        """Return what is held now, for `go_back`."""
        return [replace(group) for group in self._groups]

    def go_back(self, groups: Sequence[Group]) -> None:
        self._groups = deque((replace(group) for group in groups), maxlen=self.config.size)

    # -- durable state

    def save(self, directory: str) -> list[dict[str, int]]:
        """Write the groups to `directory` and return what `restore` needs besides, as JSON-able values."""
        if self._groups:
            os.makedirs(directory, exist_ok=True)
            self.joined([group.rows for group in self._groups]).save_to_disk(os.path.join(directory, FILE))
        return [{"version": group.version, "uses": group.uses} for group in self._groups]

    def restore(self, directory: str, state: Iterable[dict[str, Any]]) -> None:
        """Hold what was saved."""
        entries = list(state)
        self._groups.clear()
        rows = DataProto.load_from_disk(os.path.join(directory, FILE)) if entries else None
        for i, entry in enumerate(entries):
            own = torch.arange(i * self.n, (i + 1) * self.n)
            self._groups.append(Group(rows.select_idxs(own), entry["version"], entry["uses"]))


def _widened(piece: DataProto, width: int, pad_token_id: int) -> DataProto:
    missing = width - piece.batch["prompts"].shape[1]
    if missing == 0:
        return piece
    wider = piece.select()
    for name in STARTING_WITH_PROMPT:
        fill = pad_token_id if name in ("prompts", "input_ids") else 0
        wider.batch[name] = torch.nn.functional.pad(wider.batch[name], (missing, 0), value=fill)
    return wider
