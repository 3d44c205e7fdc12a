"""Hooks on the routers of a transformers model.

They record the experts of each token, or replay given ones.

A router returns logits, weights and experts. A hook replaces the experts, and computes their weights from the logits by
the model's own rule, so that gradients reach the router. What is chosen anew is only which experts, as in the GSPO
paper (2507.18071) and R3 (2510.11370). The balancing loss stays off, and the bias that balances experts stays as it is:
both would change the choice that is replayed, and NeMo-RL reports that the loss "severely degrades accuracy"
(docs/guides/models/qwen/qwen3-5.md, issue 3169).

A hook knows its layer by its module and not by the order of calls: recomputation in the backward pass runs a router
again, and must find the same experts. They stay until the next micro-batch.

Shapes: T tokens of a layout, t of them in this process's passes, E experts of a layer, L layers with experts, K experts
of a token.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from hybridrl.errors import ConfigError
from hybridrl.workers.engine.hf_model import overridden_config
from hybridrl.workers.engine.routing.routes import RoutingShape
from hybridrl.workers.engine.routing.token_share import TokenShare

Rule = Callable[[Any, torch.Tensor, torch.Tensor], torch.Tensor]
"""Router, logits (T, E) and experts (T, K) -> weights (T, K), equal to the router's own where the experts are."""


def softmax_then_top_k(
    router: Any, logits: torch.Tensor, experts: torch.Tensor, *, norm: bool | None = None, cast: bool = True
) -> torch.Tensor:
    """Return softmax(logits) at the experts, divided by its sum if the model does (`norm_topk_prob`)."""
    weights = torch.softmax(logits, dim=-1, dtype=torch.float32).gather(1, experts)
    if router.norm_topk_prob if norm is None else norm:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    return weights.to(logits.dtype) if cast else weights


def top_k_then_softmax(router: Any, logits: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
    """Return the softmax over the logits of the experts alone."""
    return torch.softmax(logits.gather(1, experts), dim=1, dtype=logits.dtype)


def sigmoid_with_bias(router: Any, logits: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
    """Return sigmoid(logits) at the experts, normalised and scaled. The bias and the groups only choose."""
    weights = logits.sigmoid().gather(1, experts)
    if router.norm_topk_prob:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
    return weights * router.routed_scaling_factor


RULES: Mapping[str, Rule] = {  # model_type -> rule
    **dict.fromkeys(("qwen2_moe", "qwen3_moe", "qwen3_next", "olmoe"), softmax_then_top_k),
    "qwen3_5_moe_text": partial(softmax_then_top_k, norm=True),
    "mixtral": partial(softmax_then_top_k, norm=True, cast=False),
    "gpt_oss": top_k_then_softmax,
    **dict.fromkeys(("deepseek_v3", "glm4_moe", "glm4_moe_lite", "dots1", "exaone_moe"), sigmoid_with_bias),
}


def check_family(config: Any, *, key: str) -> None:
    """Raise ConfigError unless the experts of a model with this `PretrainedConfig` can be replayed.

    Args:
        config: Of the model.
        key: Setting that asks for it, with its value.
    """
    text = config.get_text_config()
    if text.model_type in RULES:
        return
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    if not any(getattr(text, name, None) for name in names):
        raise ConfigError(f"{key}: {text.model_type} has no experts whose choice could be replayed; leave it out")
    raise ConfigError(
        f"{key}: how {text.model_type} weighs its experts is not known here, only for {', '.join(RULES)}; set disabled"
    )


def check_routing(path: str, *, key: str, trust_remote_code: bool) -> None:
    """Raise ConfigError unless the experts of the model at `path` can be replayed. Reads its config.json only."""
    check_family(overridden_config(path, {}, trust_remote_code=trust_remote_code), key=key)


class RouterHooks:
    """The routers of one model.

    They hold what was chosen in the last forward pass, or is to be chosen in the next.

    Args:
        model: A transformers model whose `check_family` passed.
        peers: Groups of processes that share the tokens of a row.

    Attributes:
        shape: Sizes of its routing.
    """

    def __init__(self, model: Any, *, peers: Sequence[dist.ProcessGroup] = ()):
        self._peers = peers
        self._rule = RULES[model.config.get_text_config().model_type]
        routers = [module for module in model.modules() if type(module).__name__.lower().endswith("topkrouter")]
        if not routers:
            raise ConfigError(f"{type(model).__name__} has no layer with experts; set router_replay.mode=disabled")
        self.shape = RoutingShape(len(routers), routers[0].top_k, routers[0].num_experts)
        self._experts: list[torch.Tensor | None] = [None] * len(routers)
        self._own: list[torch.Tensor | None] = [None] * len(routers)
        self._given: torch.Tensor | None = None
        self._share: TokenShare | None = None
        self._verified: set[int] = set()
        for layer, router in enumerate(routers):
            router.register_forward_hook(partial(self._route, layer))

    def arrange(self, places: torch.Tensor, num_tokens: int) -> None:
        """Say which tokens the next passes have; default: those of the layout.

        Args:
            places: (t,) int64, place of each token in the layout, -1 for a fill.
            num_tokens: T.
        """
        self._share = TokenShare(places, num_tokens, self._peers)

    def give(self, routes: torch.Tensor | None) -> None:
        """Let the next passes use these experts (T, L, K); None: the routers' own.

        -1 is the router's own choice.
        """
        self._given = routes if routes is None or self._share is None else self._share.cut(routes)

    def taken(self) -> torch.Tensor:
        """Return the experts (T, L, K) of the last forward pass. Collective."""
        return self._of_layout(torch.stack([experts for experts in self._experts if experts is not None], dim=1))

    def differs(self) -> torch.Tensor:
        """Return for each token (T,) whether some router would have chosen others. Collective."""
        pairs = zip(self._experts, self._own, strict=True)
        found = [(_sorted(used) != _sorted(own)).any(-1) for used, own in pairs]
        return self._of_layout(torch.stack(found, dim=1).any(-1).long()).bool()

    def _of_layout(self, local: torch.Tensor) -> torch.Tensor:
        return local if self._share is None else self._share.join(local)

    def _route(self, layer: int, router: nn.Module, args: Any, output: Any) -> Any:
        logits, weights, own = output
        if layer not in self._verified:
            self._verify(layer, router, logits, weights=weights, experts=own)
        experts = own
        if self._given is not None:
            given = self._given[:, layer]
            experts = torch.where(given < 0, own, given)
            weights = self._rule(router, logits, experts)
        self._experts[layer], self._own[layer] = experts.detach(), own.detach()
        return logits, weights, experts

    def _verify(
        self, layer: int, router: nn.Module, logits: torch.Tensor, *, weights: torch.Tensor, experts: torch.Tensor
    ) -> None:
        """Raise RuntimeError unless the rule gives the router's own weights, bit for bit."""
        if not torch.equal(self._rule(router, logits, experts), weights):
            raise RuntimeError(
                f"{type(router).__name__} of the installed transformers weighs experts in another way than its rule in "
                "workers/engine/routing/routers.py; set router_replay.mode=disabled"
            )
        self._verified.add(layer)


def _sorted(experts: torch.Tensor | None) -> torch.Tensor:
    assert experts is not None, "every router runs in a forward pass"
    return experts.sort(dim=-1).values
