"""LoRA on the Megatron engine: layouts, adapters, and what the FSDP engine computes; imports no megatron-core.

Not a test file.
"""

from pathlib import Path

import pytest
import torch
from torch import nn

from hybridrl.workers.engine.base import LoRA
from hybridrl.workers.engine.hf_model import empty_model, hf_config
from hybridrl.workers.engine.lora import WEIGHTS, chosen_layers
from hybridrl.workers.engine.peft_format import write_adapter
from tests.support.workers.engine_cases import (
    gradients,
    make_batch,
    make_engine,
    num_response_tokens,
    policy_loss,
    train,
    unset_engine,
    whole_weights,
)
from tests.support.workers.megatron_models import CP, EP, MICRO, POLICY, PP, SP, STEPS, TP, VPP
from tests.support.workers.megatron_parity import difference

# name: (model, Megatron's layout, other engine settings)
LAYOUTS = {
    "TP2": ("qwen2", TP, {}),
    "TP2+SP, packed, recomputed": ("untied", SP, {"packed": True, "gradient_checkpointing": True}),
    "DP2": ("qwen2", {}, {}),
    "PP2": ("qwen2", PP, {}),
    "PP2, interleaved": ("four layers", VPP, {}),
    "CP2": ("qwen2", CP, {}),
    "llama, TP2": ("llama", TP, {}),
    "qwen3, TP2": ("qwen3", TP, {}),
    "qwen3_moe, EP2": ("qwen3_moe", EP, {}),
}
MOVED = "TP2 to PP2"
ATOL = 1e-5
RANK, ALPHA = 4, 8.0


def few_adapters(model: str) -> LoRA:
    """Return new adapters of some layers, of which Megatron joins others with them."""
    dense = () if model == "qwen3_moe" else ("up_proj",)
    return LoRA(2, 2.0, ("q_proj", "v_proj", "o_proj", *dense))


def write_trained_adapter(folder: Path, model: str) -> LoRA:
    """Write an adapter of all linear layers with random A and B; return the settings that continue it."""
    path = folder / f"{model} adapter"
    lora = LoRA(RANK, ALPHA)
    setup = unset_engine(str(folder / model)).config
    layers = chosen_layers(empty_model(setup, hf_config(setup), dtype=torch.float32), lora, None)
    draw, tensors = torch.Generator().manual_seed(3), {}
    for name, layer in layers.items():
        tensors[f"{name}.lora_A"] = torch.randn(RANK, layer.in_features, generator=draw) * 0.1
        tensors[f"{name}.lora_B"] = torch.randn(layer.out_features, RANK, generator=draw) * 0.1
    path.mkdir()
    write_adapter(tensors, str(path), lora=lora, base=str(folder / model))
    return saved_lora(folder, model)


def saved_lora(folder: Path, model: str) -> LoRA:
    """Return the settings that continue the adapter of `write_trained_adapter`."""
    return LoRA(RANK, ALPHA, path=str(folder / f"{model} adapter"))


def count(module: nn.Module) -> int:
    """Return how many numbers of a module are trained."""
    return sum(parameter.numel() for parameter in module.parameters() if parameter.requires_grad)


def adapters_by_fsdp(folder: Path, model: str) -> dict:
    """Return what the FSDP engine computes in one process, as `megatron_lora_rank` does."""
    path, saved, batch = str(folder / model), saved_lora(folder, model), make_batch()
    num_tokens = num_response_tokens(batch)
    engine, plain, few = (make_engine(path, lora=lora) for lora in (saved, saved, few_adapters(model)))
    found: dict = {"outputs": engine.forward(batch, MICRO, outputs=POLICY)}
    with engine.adapters_off():
        found["off"] = engine.forward(batch, MICRO, outputs=POLICY)
    plain.forward_backward(batch, MICRO, policy_loss(num_tokens), outputs=POLICY)
    found["gradients"] = gradients(plain)
    found["norms"] = [step["grad_norm"] for step in train(engine, batch, MICRO, num_tokens=num_tokens, steps=STEPS)]
    found["weights"] = whole_weights(engine)
    found |= {kind: {name: t.clone() for name, t in engine.weights(lora=kind)} for kind in WEIGHTS if kind != "merged"}
    found["new"] = {name: t.clone() for name, t in few.weights(lora="unscaled_adapters")}
    train(few, batch, MICRO, num_tokens=num_tokens, steps=STEPS)
    return found | {"few": whole_weights(few)}


def assert_adapters_equal(found: dict, expected: dict) -> None:
    """Compare what the engines compute and become; new adapters are equal bit for bit."""
    for kind in ("outputs", "off"):
        for name in POLICY:
            assert (found[kind][name] - expected[kind][name][found["number"]]).abs().max() < ATOL, (kind, name)
    # The adapters matter, and a gradient of A that is not summed rightly over peers would differ by more than ATOL.
    assert (found["outputs"]["log_probs"] - found["off"]["log_probs"]).abs().max() > 1e-3
    assert max(tensor.abs().max() for name, tensor in found["gradients"].items() if name.endswith("lora_A")) > 1e-3
    for kind in ("gradients", "weights", "adapters", "unscaled_adapters", "base_and_adapters", "few"):
        assert difference(found[kind], expected[kind]) < ATOL, kind
    assert found["norms"] == pytest.approx(expected["norms"], rel=1e-4)
    assert found["new"].keys() == expected["new"].keys()
    assert all(torch.equal(found["new"][name], tensor) for name, tensor in expected["new"].items())
