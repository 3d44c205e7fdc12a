"""Adapters as files in the format of `peft`: names, reading, writing.

    adapter_config.json          rank, alpha, adapted layers
    adapter_model.safetensors    base_model.model.{layer}.lora_A.weight (r, in) and ...lora_B.weight (out, r)

The change of a layer is alpha / rank times B A; B is stored without that scale. Called in worker processes. What
`adapter_config.json` says is read and checked in `config/checks/adapters.py`.
"""

import json
import os
from collections.abc import Iterable, Mapping

import torch

from hybridrl.config.checks.adapters import ADAPTER_CONFIG, ADAPTER_WEIGHTS, saved_adapter_config
from hybridrl.errors import CheckpointError
from hybridrl.workers.engine.base import LoRA

PREFIX, SUFFIX = "base_model.model.", ".weight"


def peft_name(name: str) -> str:
    """Return peft's name of `{layer}.lora_A` or `{layer}.lora_B`."""
    return f"{PREFIX}{name}{SUFFIX}"


def read_adapter(path: str) -> dict[str, torch.Tensor]:
    """Return the tensors of a saved adapter as `{layer}.lora_A` and `{layer}.lora_B`, float32.

    Raises:
        CheckpointError: A tensor is not of a LoRA layer, or a layer lacks A or B.
    """
    from safetensors.torch import load_file

    found: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(os.path.join(path, ADAPTER_WEIGHTS)).items():
        ours = name.removeprefix(PREFIX).removesuffix(SUFFIX)
        if name != peft_name(ours) or ours.rpartition(".")[2] not in ("lora_A", "lora_B"):
            raise CheckpointError(f"{path}: {name} is no A or B of a linear layer; export the adapter with peft again")
        found[ours] = tensor.float()
    layers = adapted_layers(found)
    missing = [f"{layer}.{part}" for layer in layers for part in ("lora_A", "lora_B") if f"{layer}.{part}" not in found]
    if missing or not layers:
        raise CheckpointError(f"{path}: {ADAPTER_WEIGHTS} lacks {missing[0] if missing else 'all adapters'}")
    return found


def adapted_layers(tensors: Iterable[str]) -> list[str]:
    """Return the names of the layers that these names of `{layer}.lora_A` and `{layer}.lora_B` belong to."""
    return sorted({name.rpartition(".")[0] for name in tensors})


def write_adapter(tensors: Mapping[str, torch.Tensor], directory: str, *, lora: LoRA, base: str) -> None:
    """Write the two files into a directory that exists.

    Args:
        tensors: A and B by the names of `adapter_weights`, without scale.
        directory: Where the files go.
        lora: Rank and alpha.
        base: Path of the model that the adapter changes.
    """
    from safetensors.torch import save_file

    targets = sorted({layer.rpartition(".")[2] for layer in adapted_layers(tensors)})
    settings = saved_adapter_config(rank=lora.rank, alpha=lora.alpha, target_modules=targets, base=base)
    with open(os.path.join(directory, ADAPTER_CONFIG), "w", encoding="utf-8") as file:
        json.dump(settings, file, indent=2)
    weights = os.path.join(directory, ADAPTER_WEIGHTS)
    save_file({peft_name(name): tensor for name, tensor in tensors.items()}, weights, metadata={"format": "pt"})
    os.chmod(weights, 0o644)  # save_file makes it readable for its owner only
