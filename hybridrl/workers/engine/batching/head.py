"""Statistics of tokens computed in the head of a Hugging Face causal model, instead of logits.

The model's own forward runs. While it does, its head computes the statistics from the states that it gets, where FSDP
has gathered the head's weight. They become the output of the model's call, so that FSDP gathers the weight again when
their gradient arrives. What the model would do with logits behind its head (a scale, a soft cap) is read from its
config and compared with what it does to two tokens in the first call.

Shapes: N states, H hidden size, V vocabulary.
"""

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from hybridrl.algos.token_stats.from_states import FinalLogits, TokenStats, token_stats_of_states
from hybridrl.workers.engine.batching.layout import TokenLayout

logger = logging.getLogger(__name__)

PROBE = 2
"""States whose logits the head returns to the model, so that its forward runs to the end."""
TOLERANCE = 16
"""Allowed difference between the model's final logits and `FinalLogits`, in units of the dtype's precision."""


def final_logits_of(config: Any) -> FinalLogits:
    """Return what a model with this config does with the output of its head."""
    text = config.get_text_config()
    scale = 1.0
    for name in ("logit_scale", "lm_head_multiplier"):
        scale *= getattr(text, name, None) or 1.0
    scale /= getattr(text, "logits_scaling", None) or 1.0
    return FinalLogits(scale=scale, soft_cap=getattr(text, "final_logit_softcapping", None))


class TokenStatsHead:
    """Make a causal model return statistics of tokens, where its head allows it.

    Args:
        model: The model, sharded if it is to be. Its head's forward and its own output are replaced during calls of
            this object, and only then.
        head: Its output embedding.
        temperature: Final logits are divided by it.
        chunk: See `token_stats_of_states`.
    """

    def __init__(self, model: nn.Module, head: nn.Module, *, temperature: float, chunk: int | None):
        self._head, self._chunk, self._temperature = head, chunk, temperature
        self._final = final_logits_of(model.config)
        self._compute: Callable[..., TokenStats] | None = None
        self._states: torch.Tensor | None = None  # indices of the states whose statistics are wanted
        self._found: TokenStats | None = None
        self._probe: torch.Tensor | None = None
        self._is_checked = False
        self.is_usable = type(head) is nn.Linear
        if self.is_usable:
            head.forward = self._head_forward  # transformers calls the module
            model.register_forward_hook(self._replace_output, prepend=True)  # before FSDP's hook sees the output
        else:
            self._say(type(head).__name__, f"its head is a {type(head).__name__}")

    def __call__(
        self, run: Callable[[TokenLayout], Any], layout: TokenLayout, *, outputs: tuple[str, ...]
    ) -> TokenStats | None:
        """Return the statistics of a layout's response tokens, or None if this model needs its logits.

        Args:
            run: Calls the model.
            layout: The tokens.
            outputs: Which of "log_probs", "entropy" and "sum_pi_squared" are wanted.
        """
        if not self.is_usable:
            return None
        self._states = layout.state
        self._compute = partial(
            token_stats_of_states,
            labels_N=layout.labels,
            final=self._final,
            temperature=self._temperature,
            with_entropy="entropy" in outputs,
            with_sum_pi_squared="sum_pi_squared" in outputs,
            chunk=self._chunk,
        )
        try:
            output = run(layout)
        finally:
            self._compute = self._found = self._probe = self._states = None
        return output if isinstance(output, TokenStats) else None

    def _head_forward(self, states: torch.Tensor) -> torch.Tensor:
        """Return logits of the states, of the first two of them while statistics are computed."""
        head: Any = self._head
        if self._compute is None or self._states is None:
            return nn.functional.linear(states, head.weight, head.bias)
        flat_H = states.flatten(0, -2)
        self._found = self._compute(flat_H[self._states], head.weight, bias_V=head.bias)
        with torch.no_grad():
            self._probe = nn.functional.linear(flat_H[:PROBE], head.weight, head.bias)[None]
            return self._probe.clone()

    def _replace_output(self, model: nn.Module, args: Any, output: Any) -> TokenStats | None:
        """Return the statistics instead of the model's output."""
        if self._compute is None:
            return None
        if not self._is_checked:
            self._is_checked, reason = True, self._problem(output.logits)
            self.is_usable = reason is None
            if reason:
                self._say(type(model).__name__, reason)
        return self._found if self.is_usable else None

    def _problem(self, logits: torch.Tensor) -> str | None:
        """Return why the statistics are not those of the model's logits, or None if they are."""
        if self._probe is None:
            return "it does not call its head as a module"
        expected = self._final(self._probe.float())
        tolerance = TOLERANCE * torch.finfo(self._probe.dtype).eps
        if logits.shape == expected.shape and torch.allclose(
            logits.float(), expected, rtol=tolerance, atol=tolerance, equal_nan=True
        ):
            return None
        return "it changes the output of its head in a way that is not known here"

    @staticmethod
    def _say(model: str, reason: str) -> None:
        if not dist.is_initialized() or dist.get_rank() == 0:
            logger.warning(
                "%s: log-probs are computed from whole logits, because %s. Long micro-batches need more memory.",
                model,
                reason,
            )
