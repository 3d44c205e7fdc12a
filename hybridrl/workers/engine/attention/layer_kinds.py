"""Kinds of layers, and how an engine computes each of them exactly.

`LAYERS` is the only list of such decisions. Its keys are kinds of layers, not names of models: a configuration's
`layer_types`, and what else a configuration or a module says about its attention. `python -m tests.families` measures
what follows for families of models.
"""

import inspect
import logging
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import nn

from hybridrl.errors import ConfigError

logger = logging.getLogger(__name__)

KERNEL = "torch's kernels"
MASKS = "plain torch, a mask per sequence"
SEGMENTS = "a call per segment"
ALONE = "each token alone"


@dataclass(frozen=True)
class LayerKind:
    """How layers of one kind are computed.

    Attributes:
        words: What a model with such layers has, for messages.
        packed: How sequences of a packed row are computed.
        shared: How rows that share prefixes are computed.
        kernels: Attention implementations of transformers that leave something out for this kind.
    """

    words: str
    packed: str
    shared: str
    kernels: frozenset[str] = frozenset()


LAYERS = {
    "full_attention": LayerKind("attention", KERNEL, KERNEL),
    "sliding_attention": LayerKind("sliding windows", KERNEL, MASKS),
    "latent_attention": LayerKind("values of another size than keys", KERNEL, MASKS),
    "attention_sinks": LayerKind("attention sinks", MASKS, MASKS, frozenset({"sdpa", "flash_attention_2"})),
    "soft_caps": LayerKind("soft caps of attention weights", MASKS, MASKS, frozenset({"sdpa"})),
    "linear_attention": LayerKind("recurrent layers", SEGMENTS, SEGMENTS),
    "mamba": LayerKind("recurrent layers", SEGMENTS, SEGMENTS),
    "conv": LayerKind("convolutions over tokens", SEGMENTS, SEGMENTS),
    "hybrid": LayerKind("attention beside recurrent layers", SEGMENTS, SEGMENTS),
    "moe": LayerKind("experts", ALONE, ALONE),
    "mlp": LayerKind("layers without attention", ALONE, ALONE),
}
"""What is not here is computed with padding only, and never with shared prefixes."""

RECURRENT = {kind for kind, layer in LAYERS.items() if layer.packed == SEGMENTS}
REPLACED = {"sdpa", "eager", "flash_attention_2"}
"""Attention implementations of transformers in whose place an engine's own attention may stand."""
CACHES = ("cache", "cache_params", "past_key_values")
"""Names by which layers and models take a cache: the first from transformers 5.24 on."""
OWN = {
    "attention_of_its_own": "attention that does not go through transformers' interface",
    "state_of_its_own": "recurrent layers that do not keep their state in transformers' cache",
    "recurrent": "recurrent layers that its configuration does not name",
}


def layer_kinds(model: Any) -> frozenset[str]:
    """Return the kinds of a transformers model's layers; some may be missing in `LAYERS`."""
    settings = model.config.get_text_config()
    types = getattr(settings, "layer_types", None) or ()
    kinds = set(types)
    if not kinds:
        has_window = getattr(settings, "sliding_window", None) and getattr(settings, "use_sliding_window", True)
        kinds = {"sliding_attention" if has_window else "full_attention"}
        kinds = {"recurrent"} if getattr(model, "_is_stateful", False) else kinds
    if getattr(settings, "v_head_dim", None):
        kinds.add("latent_attention")
    if getattr(settings, "attn_logit_softcapping", None):
        kinds.add("soft_caps")
    if any(getattr(module, "sinks", None) is not None for module in model.modules()):
        kinds.add("attention_sinks")
    if kinds - RECURRENT and not _uses_interface(model):
        kinds.add("attention_of_its_own")
    if sum(kind in RECURRENT for kind in types) != sum(1 for _ in recurrent_modules(model)):
        kinds.add("state_of_its_own")
    return frozenset(kinds)


def _uses_interface(model: Any) -> bool:
    """Return whether the model's module calls attention through transformers' interface, which can be replaced."""
    names = {parent.__module__ for parent in type(model).__mro__} - {"transformers.modeling_utils"}
    return any(hasattr(sys.modules.get(name), "ALL_ATTENTION_FUNCTIONS") for name in names)


def recurrent_modules(model: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    """Yield the layers that convolve over tokens and take a cache, with the name of that argument."""
    for module in model.modules():
        convolves = any(isinstance(child, nn.Conv1d) for child in module.children())
        if convolves and (cache := cache_argument(module)):
            yield module, cache


def cache_argument(module: nn.Module) -> str | None:
    """Return the name by which the module's forward takes a cache."""
    names = inspect.signature(module.forward).parameters
    return next((name for name in CACHES if name in names), None)


def words(kinds: frozenset[str]) -> str:
    """Return kinds of layers as words of a message."""
    return ", ".join(
        sorted({LAYERS[kind].words if kind in LAYERS else OWN.get(kind, f"layers of type {kind}") for kind in kinds})
    )


def obstacle(model: Any) -> str | None:
    """Return why an engine cannot compute a model's rows in one packed row, or None."""
    unknown = layer_kinds(model) - LAYERS.keys()
    if unknown:
        return f"has {words(unknown)}"
    chosen = model.config.get_text_config()._attn_implementation
    return None if chosen in REPLACED else f"runs with attn_implementation={chosen}"


def check_packable(model: Any) -> None:
    """Raise ConfigError for a model with layers that would mix packed sequences."""
    if unknown := layer_kinds(model) - LAYERS.keys():
        raise ConfigError(
            f"model.use_remove_padding=True: {type(model).__name__} has {words(unknown)}, which may mix packed "
            "sequences; set it to False"
        )


def use_exact_attention(model: Any, chosen: str | None) -> None:
    """Let a model compute attention by its own plain code if transformers' kernel leaves something out.

    Args:
        model: A model of transformers, whole or on the meta device.
        chosen: The user's `attn_implementation`.

    Raises:
        ConfigError: The user has chosen a kernel that leaves something out.
    """
    kinds, name = layer_kinds(model), model.config.get_text_config()._attn_implementation
    lost = frozenset(kind for kind in kinds & LAYERS.keys() if name in LAYERS[kind].kernels)
    if not lost:
        return
    what = f"{type(model).__name__} has {words(lost)}, which {name} leaves out"
    if chosen is not None:
        raise ConfigError(f"model.override_config.attn_implementation={chosen}: {what}; leave it out or set eager")
    model.set_attn_implementation("eager")
    if not dist.is_initialized() or dist.get_rank() == 0:
        logger.warning("%s: attention is computed by the model's plain code (eager).", what)


def set_text_attention(model: Any, name: str, attend: Callable[..., Any]) -> None:
    """Replace the attention of a model's decoder by a function, under a name in transformers.

    A vision tower keeps its own.
    """
    from transformers import AttentionInterface

    AttentionInterface.register(name, attend)
    is_composite = model.config.get_text_config() is not model.config
    model.set_attn_implementation({"text_config": name} if is_composite else name)
