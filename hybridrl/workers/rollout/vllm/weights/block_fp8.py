"""Layers that vLLM holds in fp8, and what its configuration says: `rollout.quantization=fp8`.

vLLM gets the values and scales that the sender has quantised, as from a checkpoint in fp8 (DeepSeek-V3's format). Some
weights are in the rollout's dtype there, the products of values and scales where the sender has quantised them:

  - those of `weight_transfer.quantize.HIGH_PRECISION`
  - experts, which transformers holds in one tensor
  - those that vLLM joins (q, k and v), unless each ends at a block: vLLM 0.32 would take one block's scale for two of
    them, without a word. The parts of several ranks must end at blocks, too.

Mamba's layers are refused: vLLM loads their `in_proj` in parts that are not blocks.
"""

import logging
from collections import defaultdict
from collections.abc import Collection
from typing import Any

from torch import nn

from hybridrl.errors import ConfigError
from hybridrl.workers.weight_transfer.quantize import BLOCK, is_quantizable

logger = logging.getLogger(__name__)
KEY, FIX = "actor_rollout_ref.rollout.quantization=fp8", "actor_rollout_ref.rollout.name=hf, or leave it out"


def fp8_weights(model: nn.Module, *, num_ranks: int) -> frozenset[str]:
    """Return the names of the weights that vLLM holds in fp8.

    Args:
        model: The Hugging Face class, possibly empty.
        num_ranks: Of vLLM's tensor parallelism.

    Raises:
        ConfigError: There is none, or vLLM loads some of them in another way.
    """
    found: list[str] = []
    num_quantized = 0
    for name, module in model.named_modules():
        joinable: defaultdict[int, dict[str, nn.Linear]] = defaultdict(dict)  # vLLM joins layers with the same input
        if hasattr(module, "A_log") and hasattr(module, "in_proj"):
            raise ConfigError(f"{KEY}: {type(model).__name__} has layers of Mamba ({name}); use {FIX}")
        for own, layer in module.named_children():
            weight = f"{name}.{own}.weight".removeprefix(".")
            if isinstance(layer, nn.Linear) and is_quantizable(weight, layer.weight):
                num_quantized += 1
                joinable[layer.in_features][weight] = layer
        for layers in joinable.values():
            found += layers if _end_at_blocks(layers.values(), num_ranks) else ()
    if not found:
        raise ConfigError(
            f"{KEY}: vLLM can hold none of the {num_quantized} matrices of {type(model).__name__} in fp8: their sizes "
            f"on {num_ranks} ranks are not multiples of {BLOCK}; use {FIX}"
        )
    if len(found) < num_quantized:
        logger.info("vLLM holds %d of %d quantised matrices in fp8, the others dequantised.", len(found), num_quantized)
    return frozenset(found)


def quantization_config(model: nn.Module, fp8: Collection[str]) -> dict[str, Any]:
    """Return what `config.json` of a checkpoint in fp8 says of the weights of this model.

    Args:
        model: The Hugging Face class, possibly empty.
        fp8: Names of the weights in fp8.
    """
    own = [name for name, layer in model.named_modules() if [*layer.parameters(recurse=False)]]
    return {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [BLOCK, BLOCK],
        "modules_to_not_convert": [name for name in own if f"{name}.weight" not in fp8],
    }


def _end_at_blocks(layers: Collection[nn.Linear], num_ranks: int) -> bool:
    if num_ranks == len(layers) == 1:
        return True
    sizes = [size for layer in layers for size in (layer.out_features, layer.in_features * (num_ranks > 1))]
    return not any(size % (BLOCK * num_ranks) for size in sizes)
