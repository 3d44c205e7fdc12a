"""Sizes of a model: parameters, and what a layer keeps of a token.

Decoders with gated feed-forward layers, as Llama, Qwen and Mistral.
"""

from dataclasses import dataclass
from typing import Any, Self

FLOAT32 = 4  # bytes


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """Sizes of a decoder.

    Attributes:
        hidden: Hidden size.
        intermediate: Width of a feed-forward layer, of one expert if there are several.
        layers: Decoder layers.
        heads: Attention heads.
        kv_heads: Heads of keys and values.
        head_dim: Size of a head.
        vocab: Tokens.
        tied: Head and embedding are one matrix.
        experts: Feed-forward layers of a decoder layer.
        active_experts: Those that compute a token.
        tower: Parameters of the part that computes images.
    """

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    tied: bool = False
    experts: int = 1
    active_experts: int = 1
    tower: int = 0

    @classmethod
    def of(cls, config: Any) -> Self:
        """Return the shape that a Hugging Face config describes.

        Raises:
            ValueError: The config lacks an entry.
        """
        text = config.get_text_config() if hasattr(config, "get_text_config") else config
        needed = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
        if missing := [name for name in needed if getattr(text, name, None) is None]:
            raise ValueError(f"{type(text).__name__} has no {missing[0]}: its memory cannot be predicted")
        experts = getattr(text, "num_experts", None) or getattr(text, "num_local_experts", None) or 1
        width = getattr(text, "moe_intermediate_size", None) if experts > 1 else None
        return cls(
            hidden=text.hidden_size,
            intermediate=width or text.intermediate_size,
            layers=text.num_hidden_layers,
            heads=text.num_attention_heads,
            kv_heads=getattr(text, "num_key_value_heads", None) or text.num_attention_heads,
            head_dim=getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads,
            vocab=text.vocab_size,
            tied=bool(getattr(text, "tie_word_embeddings", False)),
            experts=experts,
            active_experts=(getattr(text, "num_experts_per_tok", None) or 1) if experts > 1 else 1,
        )

    @property
    def attention_width(self) -> int:
        """Return the width of all heads."""
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Return the width of all keys of a token."""
        return self.kv_heads * self.head_dim

    @property
    def layer_params(self) -> int:
        """Return the parameters of a decoder layer, without biases."""
        attention = self.hidden * (2 * self.attention_width + 2 * self.kv_width)
        router = self.hidden * self.experts if self.experts > 1 else 0
        return attention + self.experts * 3 * self.hidden * self.intermediate + router + 2 * self.hidden

    @property
    def matrix_params(self) -> int:
        """Return the parameters of the embedding, or of the head."""
        return self.vocab * self.hidden

    @property
    def outer_params(self) -> int:
        """Return the parameters outside of the decoder layers."""
        return self.matrix_params * (1 if self.tied else 2) + self.hidden

    @property
    def params(self) -> int:
        """Return all parameters."""
        return self.layers * self.layer_params + self.outer_params + self.tower

    @property
    def expert_params(self) -> int:
        """Return the parameters of all experts, 0 if there are not several."""
        return 3 * self.layers * self.experts * self.hidden * self.intermediate if self.experts > 1 else 0

    @property
    def inactive_params(self) -> int:
        """Return the parameters of the experts that do not compute a token."""
        return self.expert_params * (self.experts - self.active_experts) // self.experts

    def lora_params(self, rank: int) -> int:
        """Return the parameters of adapters of this rank in all linear layers of the decoder layers.

        Several experts are one tensor, which is no linear layer.
        """
        wide, narrow, inner = self.attention_width, self.kv_width, self.intermediate
        forward = 3 * (self.hidden + inner) if self.experts == 1 else 0
        return self.layers * rank * (2 * (self.hidden + wide) + 2 * (self.hidden + narrow) + forward)

    def layer_working(self, element: int) -> int:
        """Return the bytes of a token that exist at a time while a decoder layer computes without gradient."""
        return (2 * self.hidden + 3 * self.active_experts * self.intermediate) * element

    def layer_activations(self, *, element: int, tensor_parallel: int = 1, sequence_parallel: bool = False) -> float:
        """Return the bytes that a decoder layer keeps of a token for the backward pass.

        Residual stream and norms: the input of each norm, what it normalizes and its result. Attention: queries, keys,
        values and result. Feed-forward: gate, its activation, the other branch, and their product.
        """
        norm = 3 * element if element == FLOAT32 else FLOAT32 + 3 * element  # bfloat16 models normalize in float32
        residual = 2 * self.hidden * norm
        attention = (2 * self.attention_width + 2 * self.kv_width) * element
        forward = 4 * self.active_experts * self.intermediate * element
        return residual / (tensor_parallel if sequence_parallel else 1) + (attention + forward) / tensor_parallel
