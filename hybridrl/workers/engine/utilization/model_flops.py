"""FLOPs that a decoder's mathematics needs for a batch: the numerator of model FLOPs utilization (MFU).

*Model FLOPs* as PaLM (arXiv 2204.02311, appendix B) and Megatron (arXiv 2205.05198) define them. What is done twice
(recomputed activations) counts once. What is done once for several rows (shared prefixes) counts once, too: an engine
that shares prefixes counts the tokens that it computed. Padding does not count.

Counted are matrix products, 2 FLOPs per multiply-add. Not counted: norms, activations, softmax, rotary embeddings,
biases, the embedding's lookup, the optimizer. Shapes: B rows.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import torch

from hybridrl.errors import ConfigError
from hybridrl.workers.engine.hf_model import overridden_config
from hybridrl.workers.engine.model_shape import ModelShape

MULTIPLY_ADD = 2  # FLOPs
MODEL_TYPES = frozenset(
    {"gemma", "llama", "mistral", "mixtral", "olmo2", "phi3", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "smollm3"}
)
"""Decoders with gated feed-forward layers and plain attention, each compared with torch's count by a test."""


class Passes(NamedTuple):
    """How often a stage computes what a forward pass computes: layers with weights, and attention."""

    weights: int
    attention: int


FORWARD = Passes(1, 1)
UPDATE = Passes(3, 3)  # the backward pass has gradients of inputs and of weights
ADAPTER_UPDATE = Passes(2, 3)  # frozen weights have no gradient; the adapters' own products, under 1 %, are left out


@dataclass(frozen=True, kw_only=True)
class ModelFlops:
    """FLOPs of a forward pass.

    Attributes:
        token: Of all decoder layers for one token, without attention between tokens.
        pair: Of attention in all layers, for a token and one that it sees.
        output: Of the head, for one token whose output is read.
    """

    token: float
    pair: float
    output: float

    @classmethod
    def read(
        cls, path: str | None, *, override_config: dict, trust_remote_code: bool, outputs: int | None = None
    ) -> Self | None:
        """Return the FLOPs of the model at `path`, see `of`. None if it cannot be read."""
        if path is None:
            return None
        try:
            config = overridden_config(path, override_config, trust_remote_code=trust_remote_code)
        except ConfigError:  # the workers raise it, with the setting's name
            return None
        return cls.of(config, outputs=outputs)

    @classmethod
    def of(cls, config: Any, *, outputs: int | None = None) -> Self | None:
        """Return the FLOPs of the model that a Hugging Face config describes, None if this formula does not fit it.

        Args:
            config: The config.
            outputs: Width of the head. None: one logit per token of the vocabulary.
        """
        if getattr(config, "model_type", None) not in MODEL_TYPES or not _has_full_attention(config):
            return None
        shape = ModelShape.of(config)
        attention = shape.hidden * (2 * shape.attention_width + 2 * shape.kv_width)
        layers = shape.layers * attention + _feed_forward(config, shape)
        return cls(
            token=MULTIPLY_ADD * layers,
            pair=MULTIPLY_ADD * 2 * shape.layers * shape.attention_width,  # queries by keys, weights by values
            output=MULTIPLY_ADD * shape.hidden * (outputs or shape.vocab),
        )

    def of_rows(self, lengths_B: torch.Tensor, num_outputs: int, passes: Passes = FORWARD) -> float:
        """Return the FLOPs of rows.

        Args:
            lengths_B: Tokens of each row. Token i of a row sees i tokens, itself among them: s (s + 1) / 2 pairs.
            num_outputs: Tokens of all rows whose output is read: those of the responses.
            passes: What the stage computes.
        """
        lengths = lengths_B.double()
        pairs = float((lengths * (lengths + 1) / 2).sum())
        return self.of_tokens(float(lengths.sum()), pairs, num_outputs, passes)

    def of_tokens(self, tokens: float, pairs: float, num_outputs: float, passes: Passes = FORWARD) -> float:
        """Return the FLOPs of computed tokens, of their attention to `pairs` tokens, and of outputs that are read."""
        weights = self.token * tokens + self.output * num_outputs
        return passes.weights * weights + passes.attention * self.pair * pairs


def _has_full_attention(config: Any) -> bool:
    """Return whether every token sees all tokens before it."""
    kinds = getattr(config, "layer_types", None)
    if kinds:
        return {*kinds} == {"full_attention"}
    return getattr(config, "sliding_window", None) is None


def _feed_forward(config: Any, shape: ModelShape) -> int:
    """Return the multiply-adds of the feed-forward layers for one token: gate, up and down of what is active."""
    sparse = _num_sparse_layers(config, shape)
    shared = getattr(config, "shared_expert_intermediate_size", None) or 0
    expert = shape.hidden * (3 * (shape.active_experts * shape.intermediate + shared) + shape.experts + bool(shared))
    return sparse * expert + (shape.layers - sparse) * 3 * shape.hidden * config.intermediate_size


def _num_sparse_layers(config: Any, shape: ModelShape) -> int:
    """Return the number of layers with several experts."""
    if shape.experts == 1:
        return 0
    step, dense = getattr(config, "decoder_sparse_step", 1), getattr(config, "mlp_only_layers", None) or ()
    return sum(layer not in dense and (layer + 1) % step == 0 for layer in range(shape.layers))
