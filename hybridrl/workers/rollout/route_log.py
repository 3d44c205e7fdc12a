"""`RouteLog`: the experts of each token that the `hf` rollout computes, step by step.

Only with `rollout.enable_rollout_routing_replay`. The hooks are those of the training engine.

Shapes: S sequences, P width of their prompts, N computed tokens, L layers with experts, K experts of a token.
"""

import numpy as np
import torch

from hybridrl.workers import engine
from hybridrl.workers.engine.routing.routes import pack


class RouteLog:
    """What the routers of a model chose for each sequence of a call.

    Args:
        model: A transformers model.
    """

    def __init__(self, model: torch.nn.Module):
        engine.check_family(model.config, key="actor_rollout_ref.rollout.enable_rollout_routing_replay=true")
        self._routers = engine.RouterHooks(model)
        self._parts: list[list[np.ndarray]] = []

    def start(self, num_sequences: int) -> None:
        """Forget the sequences before."""
        self._parts = [[] for _ in range(num_sequences)]

    def add_prompts(self, rows: torch.Tensor, mask: torch.Tensor, prompt_rows: torch.Tensor) -> None:
        """Take the routes of the prompts that were computed last.

        Args:
            rows: (S,) int64, sequences of the call.
            mask: (B, P) int64, 1 on the prompts' tokens.
            prompt_rows: (S,) int64, the prompt of each sequence.
        """
        experts = pack(self._routers.taken(), self._routers.shape).reshape(*mask.shape, *self._sizes)
        prompts = [experts[number, kept] for number, kept in enumerate(mask.bool().cpu().numpy())]
        for row, prompt in zip(rows.tolist(), prompt_rows.tolist(), strict=True):
            self._parts[row].append(prompts[prompt])

    def add_tokens(self, rows: torch.Tensor) -> None:
        """Take the routes of the tokens that were computed last, one of each of these sequences."""
        experts = pack(self._routers.taken(), self._routers.shape)
        for row, token in zip(rows.tolist(), experts, strict=True):
            self._parts[row].append(token[None])

    def entries(self, lengths: torch.Tensor, prompt_lengths: list[int]) -> list[np.ndarray]:
        """Return an entry of the column for each sequence, without what was computed after its end.

        Args:
            lengths: (S,) int64, sampled tokens.
            prompt_lengths: Tokens of each sequence's prompt.
        """
        ends = [prompt + length - 1 for prompt, length in zip(prompt_lengths, lengths.tolist(), strict=True)]
        return [np.concatenate(parts)[:end] for parts, end in zip(self._parts, ends, strict=True)]

    @property
    def _sizes(self) -> tuple[int, int]:
        return self._routers.shape.num_layers, self._routers.shape.top_k
