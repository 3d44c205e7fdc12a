"""The column `routed_experts`: which experts each token of a row went to, in each layer with experts.

An entry is an array (N, L, K) for the first N real tokens of its row, uint8 up to 256 experts, else int16. Its layers
are those with experts, in order. The last sampled token has no routes, because nothing was computed of it. A token
whose routes are unknown has -1 everywhere (255 in uint8). Rollouts and the engine of the actor write entries in worker
processes; the engine reads them. Rows are anywhere in a batch, so that an entry is not padded.

Shapes: T tokens of a micro-batch's layout, L layers with experts, K experts of a token.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from hybridrl.data_plane.columns import one_object_per_row
from hybridrl.data_plane.futures import stored
from hybridrl.errors import DataError
from hybridrl.workers.engine.base import ROUTED_EXPERTS

MISSING = -1


@dataclass(frozen=True)
class RoutingShape:
    """Sizes of a model's routing: layers with experts, experts of a token, experts of a layer."""

    num_layers: int
    top_k: int
    num_experts: int

    @property
    def dtype(self) -> type[np.generic]:
        """Return the dtype of entries.

        One expert of 256 needs int16, where 255 is an expert and -1 is none.
        """
        fits = self.num_experts < 256 or (self.num_experts == 256 and self.top_k > 1)
        return np.uint8 if fits else np.int16


def pack(experts: torch.Tensor, shape: RoutingShape) -> np.ndarray:
    """Return an entry of the column: experts (N, L, K) of the first N tokens of a row."""
    return experts.cpu().numpy().astype(shape.dtype)


def unpack(entry: np.ndarray) -> torch.Tensor:
    """Return an entry as (N, L, K) int64.

    Tokens whose routes are unknown have `MISSING` in all places.
    """
    experts = torch.from_numpy(entry.astype(np.int64))
    if entry.dtype == np.uint8:  # 255 may be an expert, but not all of a token's
        experts[(experts == 255).all(-1)] = MISSING
    return experts


def column_of(entries: Sequence[np.ndarray]) -> np.ndarray:
    """Return entries as a column of objects, stored where the process has a store."""
    return one_object_per_row(stored(entries))


def check_routes(
    column: Sequence[Any], shape: RoutingShape, *, lengths: Sequence[int], is_trained: Sequence[bool]
) -> None:
    """Raise DataError for the first entry that is none of this model's.

    Args:
        column: Entries.
        shape: Of the model.
        lengths: Real tokens of each row.
        is_trained: Whether a row has a token that the policy sampled. Only rows without one may have no routes.
    """
    for row, (entry, length, trained) in enumerate(zip(column, lengths, is_trained, strict=True)):
        if entry is None and not trained:
            continue
        if problem := _problem(entry, shape, length=length):
            raise DataError(f"{ROUTED_EXPERTS} of row {row} {problem}")


def _problem(entry: Any, shape: RoutingShape, *, length: int) -> str:
    if not isinstance(entry, np.ndarray):
        return "is empty: the rollout or agent returned no routes; use another one, or router_replay.mode=R2"
    if entry.ndim != 3 or entry.shape[1:] != (shape.num_layers, shape.top_k):
        expected = f"(tokens, {shape.num_layers} layers with experts, {shape.top_k} experts)"
        return f"has the shape {entry.shape}, and the model's routes are {expected}: they are of another model"
    if not 0 < len(entry) <= length:
        return f"has routes of {len(entry)} tokens, and the row has {length}"
    experts = unpack(entry)
    if (is_wrong := (experts < MISSING) | (experts >= shape.num_experts)).any():
        return f"names expert {experts[is_wrong][0]}, and a layer has {shape.num_experts}: they are of another model"
    if shape.top_k > 1 and (empty := (experts == 0).all(-1).all(0)).any():
        layer = int(empty.nonzero()[0])
        return f"has only zeros in layer {layer}: the engine that generated did not record it"
    return ""


def routes_of_tokens(
    column: Sequence[np.ndarray | None], places: torch.Tensor, num_tokens: int, shape: RoutingShape
) -> tuple[torch.Tensor, int]:
    """Return the routes (T, L, K) int64 of a layout's tokens, and how many rows' tokens have others.

    Rows with a common prefix share its tokens. A token has the routes of the first row that has it.

    Args:
        column: Entries of the rows.
        places: (b, columns) int64, place of each real token among the layout's, -1 elsewhere.
        num_tokens: T.
        shape: Of the model.
    """
    routes = torch.full((num_tokens, shape.num_layers, shape.top_k), MISSING)
    found = zip(column, places, strict=True)
    rows = [(unpack(entry), row[row >= 0]) for entry, row in found if entry is not None]
    for experts, place in reversed(rows):
        routes[place[: len(experts)]] = experts
    others = sum(int((routes[place[: len(experts)]] != experts).any(-1).any(-1).sum()) for experts, place in rows)
    return routes, others
