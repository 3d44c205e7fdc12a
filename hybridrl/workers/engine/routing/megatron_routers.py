"""The routers of a Megatron engine, for `RouteReplay`: megatron-core asks `RouterReplay` which experts to take.

megatron-core keeps its own `RouterReplay` objects in one list of the process, in the order of construction. Here every
router has an object of its own instead, which knows its layer: several models in a process do not mix, and
recomputation finds the same experts. The weights of the experts are megatron-core's, from the present logits.

Shapes: T tokens of a micro-batch's layout, t tokens of this process, L layers with experts, K experts of a token.
"""

from typing import Any

import torch
import torch.distributed as dist

from hybridrl.workers.engine.routing.routes import MISSING, RoutingShape


class GivenExperts:
    """What megatron-core calls instead of top-k, in one router."""

    def __init__(self) -> None:
        self.given: torch.Tensor | None = None  # (t, K)
        self.own: torch.Tensor
        self.used: torch.Tensor

    def get_replay_topk(
        self, scores: torch.Tensor, topk: int, num_groups: int | None, group_topk: int | None, default_compute_topk: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the scores and numbers of the given experts, or of the router's own where none are given."""
        values, own = default_compute_topk(scores, topk, num_groups=num_groups, group_topk=group_topk)
        self.own, self.used = own.detach(), own.detach()
        if self.given is None:
            return values, own
        self.used = torch.where(self.given < 0, own, self.given)
        return scores.gather(1, self.used), self.used


class MegatronRouters:
    """The routers of the layers of one process, which has all of the model's.

    Args:
        model: A model of megatron-core, whose `TopKRouter` modules have `router_replay`.
        shape: Sizes of its routing.
        peers: Ranks that share the tokens of a row (sequence parallelism); None if each has all.
    """

    def __init__(self, model: torch.nn.Module, shape: RoutingShape, *, peers: dist.ProcessGroup | None):
        self.shape, self._peers = shape, peers
        routers: list[Any] = [module for module in model.modules() if hasattr(module, "router_replay")]
        assert len(routers) == shape.num_layers, "without pipeline stages a process has every layer"
        self._layers = [GivenExperts() for _ in routers]
        for router, given in zip(routers, self._layers, strict=True):
            router.router_replay = given
        self._places = torch.zeros(0, dtype=torch.int64)  # (t,) of this process's tokens in the layout, -1 for padding
        self._num_tokens = 0

    def arrange(self, places: torch.Tensor, num_tokens: int) -> None:
        """Say which tokens the next passes have.

        Args:
            places: (b, s) int64, place of each token in the layout, -1 for padding.
            num_tokens: T.
        """
        flat = places.t().flatten()  # megatron-core's rows are columns
        if self._peers is not None:
            flat = flat.chunk(self._peers.size())[self._peers.rank()]
        self._places, self._num_tokens = flat, num_tokens

    def give(self, routes: torch.Tensor | None) -> None:
        """Let the next passes use these experts (T, L, K), -1 for the routers' own. None: their own."""
        local = None if routes is None else routes[self._places.clamp(min=0)]
        if local is not None:
            local[self._places < 0] = MISSING
        for number, layer in enumerate(self._layers):
            layer.given = None if local is None else local[:, number].contiguous()

    def taken(self) -> torch.Tensor:
        """Return the experts (T, L, K) of the last forward pass. Collective among the peers."""
        return self._in_layout(torch.stack([layer.used for layer in self._layers], dim=1))

    def differs(self) -> torch.Tensor:
        """Return for each token (T,) whether the routers would have chosen other experts in some layer. Collective."""
        found = [(_sorted(layer.used) != _sorted(layer.own)).any(-1) for layer in self._layers]
        return self._in_layout(torch.stack(found, dim=1).any(-1).long()).bool()

    def _in_layout(self, local: torch.Tensor) -> torch.Tensor:
        is_real = self._places >= 0
        whole = local.new_zeros(self._num_tokens, *local.shape[1:])
        whole[self._places[is_real]] = local[is_real]
        if self._peers is not None:
            dist.all_reduce(whole, group=self._peers)
        return whole


def _sorted(experts: torch.Tensor) -> torch.Tensor:
    return experts.sort(dim=-1).values
