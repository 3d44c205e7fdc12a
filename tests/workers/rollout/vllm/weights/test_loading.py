"""Pushes of a mixture of experts to the `vllm` rollout, whose kernels need the experts' weights in another layout.

The fingerprint does not detect a wrong layout, so every test compares log-probs with a plain forward pass. All tests
share one engine.
"""

from importlib.util import find_spec

import pytest
import torch

from hybridrl.errors import StaleWeightsError
from hybridrl.workers.rollout import make_rollout
from hybridrl.workers.weight_transfer.base import GrowableBuffer
from hybridrl.workers.weight_transfer.buckets import OutgoingWeights, fill_buckets, unpack
from tests.support.workers.expert_cases import changed_model, log_prob_differences, save_experts, setup_of

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(240),
    pytest.mark.skipif(find_spec("vllm") is None, reason="the module vllm is not installed"),
]
ADAPTED = ("q_proj", "v_proj")  # of q, k and v, which vLLM keeps in one matrix


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> str:
    return save_experts(tmp_path_factory.mktemp("experts"))


@pytest.fixture(scope="module")
def rollout(path):
    torch.set_num_threads(1)
    return make_rollout("vllm", setup_of(path))


def adapters(model: torch.nn.Module, *, seed: int) -> list[tuple[str, torch.Tensor]]:
    """Return adapters of rank 2 on two of the three attention projections."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for name, weight in model.named_parameters():
        if name.endswith(tuple(f"{projection}.weight" for projection in ADAPTED)):
            layer = name.removesuffix(".weight")
            found.append((f"{layer}.lora_A", torch.randn(2, weight.shape[1], generator=generator)))
            found.append((f"{layer}.lora_B", torch.randn(weight.shape[0], 2, generator=generator)))
    return found


def merge(model: torch.nn.Module, matrices: dict[str, torch.Tensor]) -> torch.nn.Module:
    with torch.no_grad():
        for name, weight in model.named_parameters():
            layer = name.removesuffix(".weight")
            if f"{layer}.lora_A" in matrices:
                weight.add_(matrices[f"{layer}.lora_B"] @ matrices[f"{layer}.lora_A"])
    return model


def test_experts_compute_with_the_weights_of_every_push(path, rollout):
    for version in (1, 2):
        model = changed_model(path, seed=version)
        sent = OutgoingWeights(model.named_parameters(), torch.float32)
        buckets = fill_buckets(sent, num_bytes=20_000, buffer=GrowableBuffer())  # each overwrites the one before
        arriving = (pair for bucket in buckets for pair in unpack(bucket))
        rollout.load_weights(version, arriving, sent=lambda sent=sent: sent.fingerprint)
        assert rollout.health().version == version
        assert log_prob_differences(rollout, model).abs().max() < 1e-4


def test_a_push_of_attention_adapters_leaves_the_experts_as_they_are(path, rollout):
    model = changed_model(path, seed=3)
    rollout.load_weights(3, [*adapters(model, seed=3), *model.named_parameters()])
    alone = adapters(model, seed=4)
    rollout.load_weights(4, alone, adapters=True)
    assert log_prob_differences(rollout, model).abs().max() > 1e-2  # or else the adapters have no effect
    assert log_prob_differences(rollout, merge(model, dict(alone))).abs().max() < 1e-4


def test_after_a_push_that_broke_off_among_the_experts_a_complete_one_is_loaded(path, rollout):
    model, other = changed_model(path, seed=5), list(changed_model(path, seed=6).named_parameters())
    cut = next(number for number, (name, _) in enumerate(other) if ".experts." in name) + 1

    def broken():
        yield from other[:cut]
        raise ConnectionError("the sender is gone")

    with pytest.raises(ConnectionError):
        rollout.load_weights(5, broken())
    with pytest.raises(StaleWeightsError):
        log_prob_differences(rollout, model)
    rollout.load_weights(6, model.named_parameters())
    assert log_prob_differences(rollout, model).abs().max() < 1e-4
