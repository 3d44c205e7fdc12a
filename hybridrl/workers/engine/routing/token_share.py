"""`TokenShare`: the tokens of a layout that this process computes, and its peers'.

Shapes: T tokens of a layout, t tokens of this process.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist

from hybridrl.workers.engine.routing.routes import MISSING


class TokenShare:
    """Cuts values down to the tokens of this process, and joins those of peers.

    Args:
        places: (t,) int64, place of each token of this process in the layout, -1 for a fill.
        num_tokens: T.
        peers: Groups of processes that have the other tokens.
    """

    def __init__(self, places: torch.Tensor, num_tokens: int, peers: Sequence[dist.ProcessGroup]):
        self.places, self._num_tokens, self._peers = places, num_tokens, peers

    def cut(self, routes: torch.Tensor) -> torch.Tensor:
        """Return the routes (t, L, K) of this process's tokens, -1 for a fill.

        Args:
            routes: (T, L, K), of all tokens.
        """
        local = routes[self.places.clamp(min=0)]
        local[self.places < 0] = MISSING
        return local

    def join(self, local: torch.Tensor) -> torch.Tensor:
        """Return the values (T, ...) of all peers' tokens, given this process's (t, ...). Collective."""
        is_real = self.places >= 0
        whole = local.new_zeros(self._num_tokens, *local.shape[1:])
        whole[self.places[is_real]] = local[is_real]
        for group in self._peers:
            dist.all_reduce(whole, group=group)
        return whole
