"""The routers of a Megatron engine, for `RouteReplay`: megatron-core asks `RouterReplay` which experts to take.

megatron-core keeps its own `RouterReplay` objects in one list of the process, in the order of construction. Here every
router has an object of its own instead, which knows its layer: several models in a process do not mix, and
recomputation finds the same experts. The weights of the experts are megatron-core's, from the present logits.

A pipeline stage begins other micro-batches before it comes back to one. So what the routers of a stage chose is kept
for each micro-batch, and put together over the stages when all have run.

Shapes: T tokens of a micro-batch's layout, t tokens of this process, L layers with experts, K experts of a token.
"""

from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from hybridrl.workers.engine.routing.routes import RoutingShape
from hybridrl.workers.engine.routing.token_share import TokenShare


class GivenExperts:
    """What megatron-core calls instead of top-k, in one router.

    Attributes:
        layer: Number of its layer.
        given: (t, K) experts of the next forward pass; None: the router's own.
        own, used: (t, K) what it would have chosen in the last forward pass, and what it took; None: it has not run.
    """

    def __init__(self, layer: int) -> None:
        self.layer = layer
        self.given: torch.Tensor | None = None
        self.own: torch.Tensor | None = None
        self.used: torch.Tensor | None = None
        self.to_recompute: deque[torch.Tensor] = deque()

    def get_replay_topk(
        self, scores: torch.Tensor, topk: int, num_groups: int | None, group_topk: int | None, default_compute_topk: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return scores and numbers of the given experts; where none are, the router's own.

        A pass that the backward pass recomputes runs twice: without gradients, and later, in the same order of
        micro-batches, with them. The second time it takes what it took the first time.
        """
        values, own = default_compute_topk(scores, topk, num_groups=num_groups, group_topk=group_topk)
        if torch.is_grad_enabled() and self.to_recompute:
            used = self.to_recompute.popleft()
            return scores.gather(1, used), used
        given, self.own = self.given, own.detach()
        self.used = self.own if given is None else torch.where(given < 0, self.own, given)
        if not torch.is_grad_enabled():
            self.to_recompute.append(self.used)
        return (values, own) if given is None else (scores.gather(1, self.used), self.used)


class MegatronRouters:
    """The routers of the layers of one process.

    Args:
        chunks: Its parts of a model of megatron-core, whose `TopKRouter` modules have `router_replay`.
        shape: Sizes of the whole model's routing.
        sequence_peers, context_peers: Processes that share the tokens of a row; None: this one has all.
        stages: Processes with the other layers; None: this one has all.
    """

    def __init__(
        self,
        chunks: Sequence[torch.nn.Module],
        shape: RoutingShape,
        *,
        sequence_peers: dist.ProcessGroup | None,
        context_peers: dist.ProcessGroup | None,
        stages: dist.ProcessGroup | None,
    ):
        self.shape, self._stages = shape, stages
        self._sequence_peers = sequence_peers
        self._peers = [group for group in (sequence_peers, context_peers) if group is not None]
        routers: list[Any] = [part for chunk in chunks for part in chunk.modules() if hasattr(part, "router_replay")]
        self._layers = [GivenExperts(router.layer_number - 1) for router in routers]  # megatron-core counts from 1
        for router, given in zip(routers, self._layers, strict=True):
            router.router_replay = given
        self._share = TokenShare(torch.zeros(0, dtype=torch.int64), 0, self._peers)
        self._kept: dict[int, torch.Tensor] = {}  # number of a micro-batch -> (2, t, L, K), used and own
        self._found = torch.zeros(0)  # that of the micro-batch which is read now, of all layers

    def restart(self) -> None:
        """Forget what passes kept that came to no end."""
        self._kept.clear()
        for layer in self._layers:
            layer.to_recompute.clear()

    def arrange(self, places: torch.Tensor, num_tokens: int) -> None:
        """Say which tokens the next passes have.

        Args:
            places: (b, s) int64, place of each token in the layout, -1 for padding.
            num_tokens: T.
        """
        flat = places.t().flatten()  # megatron-core's rows are columns
        if self._sequence_peers is not None:
            flat = flat.chunk(self._sequence_peers.size())[self._sequence_peers.rank()]
        self._share = TokenShare(flat, num_tokens, self._peers)

    def give(self, routes: torch.Tensor | None) -> None:
        """Let the next passes use these experts (T, L, K), -1 for the routers' own. None: their own."""
        local = None if routes is None else self._share.cut(routes)
        for layer in self._layers:
            layer.given = None if local is None else local[:, layer.layer].contiguous()

    def keep(self, number: int) -> None:
        """Keep what the routers chose that have just run for the micro-batch with this number."""
        size = 2, len(self._share.places), self.shape.num_layers, self.shape.top_k
        kept = self._kept.setdefault(number, self._share.places.new_zeros(size))
        for layer in self._layers:
            if layer.used is not None and layer.own is not None:
                kept[0, :, layer.layer], kept[1, :, layer.layer] = layer.used, layer.own
                layer.used = layer.own = None

    def recall(self, number: int) -> None:
        """Let `taken` and `differs` be those of this micro-batch. Collective among the stages."""
        self._found = self._kept.pop(number)
        if self._stages is not None:
            dist.all_reduce(self._found, group=self._stages)

    def taken(self) -> torch.Tensor:
        """Return the experts (T, L, K) of the recalled micro-batch. Collective among the peers."""
        return self._share.join(self._found[0])

    def differs(self) -> torch.Tensor:
        """Return for each token (T,) whether the routers would have chosen other experts in some layer. Collective."""
        used, own = self._found.sort(dim=-1).values
        return self._share.join((used != own).any(-1).any(-1).long()).bool()
