"""`RouteReplay`: routes of an engine's micro-batches, for any engine that can give them to its routers.

The engine calls `begin` before each pass of a micro-batch, and reads `recorded` or `counts` after the forward pass.

Shapes: as in `routes.py`; b rows of a micro-batch.
"""

from typing import Protocol

import numpy as np
import torch

from hybridrl.data_plane.futures import arrays_of
from hybridrl.protocol import DataProto
from hybridrl.workers.engine.base import ROUTED_EXPERTS, ROUTED_TOKENS
from hybridrl.workers.engine.batching.layout import TokenLayout
from hybridrl.workers.engine.routing.routes import RoutingShape, check_routes, pack, routes_of_tokens

REROUTED, UNROUTED, SHARED_OTHERS = "routing_differ", "routing_missing", "routing_shared"
LOAD = "routing_load"
"""Statistics that an engine which replays routes adds to those of the loss, all of them sums.

ROUTED_TOKENS: tokens with given routes. Those of them for which a router would have chosen others; tokens before the
last trained one without routes; tokens of shared prefixes whose row has other routes; tokens times the largest load.
"""


class Routers(Protocol):
    """The routers of a model, as `RouterHooks` has them."""

    shape: RoutingShape

    def arrange(self, places: torch.Tensor, num_tokens: int) -> None: ...
    def give(self, routes: torch.Tensor | None) -> None: ...
    def taken(self) -> torch.Tensor: ...
    def differs(self) -> torch.Tensor: ...


class RouteReplay:
    """Gives a micro-batch's routes to the routers, and takes what they chose.

    Args:
        routers: Of the engine's model.
    """

    def __init__(self, routers: Routers):
        self.routers = routers
        self._layout: TokenLayout | None = None
        self._routes: torch.Tensor | None = None
        self._shared = 0

    def check(self, batch: DataProto) -> None:
        """Raise DataError if the batch has routes that are none of this model's."""
        column = batch.non_tensor_batch.get(ROUTED_EXPERTS)
        if column is not None:
            lengths, trained = batch.batch["attention_mask"].sum(-1), batch.batch["response_mask"].any(-1)
            check_routes(arrays_of(column), self.routers.shape, lengths=lengths.tolist(), is_trained=trained.tolist())

    def begin(self, batch: DataProto, rows: list[int], layout: TokenLayout) -> None:
        """Let the next pass replay the routes of these rows; without rows or routes, let the routers choose."""
        column, self._layout, self._routes, self._shared = batch.non_tensor_batch.get(ROUTED_EXPERTS), layout, None, 0
        if column is not None and rows:
            entries = arrays_of(column[row] for row in rows)
            routes, self._shared = routes_of_tokens(
                entries, layout.places.cpu(), layout.input_ids.numel(), self.routers.shape
            )
            self._routes = routes.to(layout.input_ids.device)
        self.routers.give(self._routes)

    def recorded(self) -> list[np.ndarray]:
        """Return the routes of all tokens of each row of the last pass, as entries of the column."""
        assert self._layout is not None, "a pass came before"
        experts = self.routers.taken()
        return [pack(experts[place[place >= 0]], self.routers.shape) for place in self._layout.places]

    def counts(self) -> dict[str, float]:
        """Return the statistics of the last pass; empty if it replayed nothing."""
        layout, routes = self._layout, self._routes
        if layout is None or routes is None:
            return {}
        is_given = (routes >= 0).all(-1).all(-1)
        is_needed = torch.zeros_like(is_given)
        is_needed[_before_last_trained(layout)] = True
        is_real = torch.zeros_like(is_given)
        is_real[layout.places[layout.places >= 0]] = True
        differs = self.routers.differs() & is_given & is_real
        return {
            ROUTED_TOKENS: float((is_given & is_real).sum()),
            REROUTED: float(differs.sum()),
            UNROUTED: float((is_needed & ~is_given).sum()),
            SHARED_OTHERS: float(self._shared),
            LOAD: float(is_given.sum()) * largest_load(self.routers.taken()[is_real], self.routers.shape),
        }


def largest_load(experts: torch.Tensor, shape: RoutingShape) -> float:
    """Return the largest load of an expert in any layer, relative to an equal one: 1 is balanced.

    Args:
        experts: (T, L, K).
        shape: Of the model.
    """
    offsets = torch.arange(shape.num_layers, device=experts.device)[:, None] * shape.num_experts
    loads = torch.bincount((experts + offsets).flatten(), minlength=shape.num_layers * shape.num_experts)
    return float(loads.max()) * shape.num_experts / max(1, len(experts) * shape.top_k)


def routing_metrics(total: dict[str, float], prefix: str) -> dict[str, float]:
    """Return an optimizer step's sums with the metrics of routing in place of its sums.

    Args:
        total: Sums over micro-batches and ranks.
        prefix: Of the metrics.
    """
    if ROUTED_TOKENS not in total:
        return total
    sums = {name: total.pop(name) for name in (ROUTED_TOKENS, REROUTED, UNROUTED, SHARED_OTHERS, LOAD)}
    tokens = max(1.0, sums[ROUTED_TOKENS])
    return total | {
        f"{prefix}/routing/differ": sums[REROUTED] / tokens,
        f"{prefix}/routing/missing": sums[UNROUTED] / (tokens + sums[UNROUTED]),
        f"{prefix}/routing/shared_differ": sums[SHARED_OTHERS] / tokens,
        f"{prefix}/routing/load_max": sums[LOAD] / tokens,
    }


def _before_last_trained(layout: TokenLayout) -> torch.Tensor:
    """Return the places of tokens that a row's last response token sees.

    Its log-prob needs their routes.
    """
    b, R = layout.shape
    rows = layout.cell // max(1, R)
    last = torch.full((b,), -1, device=layout.places.device).scatter_reduce(0, rows, layout.state, "amax")
    return layout.places[(layout.places >= 0) & (layout.places <= last[:, None])]
