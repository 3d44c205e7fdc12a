"""Adapters on the FSDP engine: no effect when new, gradients by the formula, merged in exports."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from hybridrl.errors import ConfigError
from hybridrl.workers.engine.base import LoRA
from tests.support.workers.engine_cases import (
    WHOLE,
    gradients,
    make_batch,
    make_engine,
    num_response_tokens,
    plain_outputs,
    policy_loss,
    save_tiny_qwen2,
    train,
    whole_weights,
)

POLICY = ("log_probs", "entropy")
OURS = LoRA(4, 8)


@pytest.fixture(scope="module")
def qwen2(tmp_path_factory) -> str:
    return save_tiny_qwen2(tmp_path_factory.mktemp("qwen2"))


@pytest.fixture(scope="module")
def batch():
    return make_batch()


def test_a_new_adapter_changes_nothing(qwen2, batch):
    plain, adapted = make_engine(qwen2), make_engine(qwen2, lora=OURS)
    for name in POLICY:
        found, expected = (engine.forward(batch, WHOLE, outputs=POLICY)[name] for engine in (adapted, plain))
        assert torch.equal(found, expected)
    found, expected = whole_weights(adapted), whole_weights(plain)
    assert list(found) == list(expected) and all(torch.equal(found[name], expected[name]) for name in expected)


def test_the_first_gradient_of_b_is_the_weights_gradient_times_a(qwen2, batch):
    # W + s B A with B = 0: dL/dB = s dL/dW A^T, and dL/dA = s B^T dL/dW = 0. s = 8 / 4.
    plain, adapted = make_engine(qwen2), make_engine(qwen2, lora=OURS)
    for engine in (plain, adapted):
        engine.forward_backward(batch, WHOLE, policy_loss(num_response_tokens(batch)), outputs=POLICY)
    whole, low = gradients(plain), gradients(adapted)
    assert len(low) == 2 * 7 * 2, "two blocks, seven linear layers each, A and B"
    parameters = {name: p.detach().full_tensor() for name, p in adapted.model.named_parameters()}
    for name in (name for name in low if name.endswith("lora_B")):
        layer = name.removesuffix("lora_B")
        expected = 2 * whole[f"{layer}weight"] @ parameters[f"{layer}lora_A"].T
        torch.testing.assert_close(low[name], expected, atol=1e-6, rtol=1e-4)
        assert low[f"{layer}lora_A"].eq(0).all()


@pytest.mark.parametrize("settings", [{}, {"packed": True, "gradient_checkpointing": True}], ids=str)
def test_exported_weights_are_a_plain_model_that_computes_the_same(qwen2, batch, settings):
    engine = make_engine(qwen2, lora=OURS, **settings)
    before = whole_weights(engine)
    train(engine, batch, WHOLE, num_tokens=num_response_tokens(batch), steps=8)
    after = whole_weights(engine)
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {name for name in before if name.endswith("proj.weight")}
    plain = AutoModelForCausalLM.from_pretrained(qwen2, dtype=torch.float32).eval()
    missing, unexpected = plain.load_state_dict(after, strict=False)
    assert missing == ["lm_head.weight"] and unexpected == []  # tied to the embedding
    with torch.no_grad():
        expected = plain_outputs(plain, batch)["log_probs"]
    found = engine.forward(batch, WHOLE, outputs=POLICY)["log_probs"]
    assert (found - expected).abs().max() < 1e-4
    assert (found - make_engine(qwen2).forward(batch, WHOLE, outputs=POLICY)["log_probs"]).abs().max() > 1e-3


def test_only_the_chosen_layers_are_trained(qwen2, batch):
    engine = make_engine(qwen2, lora=LoRA(2, 2, ("q_proj", "v_proj")))
    before = whole_weights(engine)
    train(engine, batch, WHOLE, num_tokens=num_response_tokens(batch))
    after = whole_weights(engine)
    changed = {name.split(".")[-2] for name in before if not torch.equal(before[name], after[name])}
    assert changed == {"q_proj", "v_proj"}
    num_trained = sum(p.numel() for p in engine.model.parameters() if p.requires_grad)
    assert num_trained == 2 * (2 * (32 + 32) + 2 * (32 + 16))  # rank * (in + out), q and v, in each of two blocks
    assert num_trained == sum(state["exp_avg"].numel() for state in engine._optimizer.state.values())


def test_a_loaded_engine_continues_bit_by_bit(qwen2, batch, tmp_path):
    num_tokens = num_response_tokens(batch)
    engine, loaded = make_engine(qwen2, lora=OURS), make_engine(qwen2, lora=OURS, seed=5)
    train(engine, batch, WHOLE, num_tokens=num_tokens)
    engine.save(str(tmp_path / "saved"))
    loaded.load(str(tmp_path / "saved"))
    assert train(loaded, batch, WHOLE, num_tokens=num_tokens) == train(engine, batch, WHOLE, num_tokens=num_tokens)
    found, expected = whole_weights(loaded), whole_weights(engine)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_an_unknown_target_module_is_refused_and_the_known_ones_are_listed(qwen2):
    with pytest.raises(ConfigError, match=r"target_modules=\['query'\]: .*down_proj, gate_proj, k_proj"):
        make_engine(qwen2, lora=LoRA(2, 2, ("query",)))


def test_a_rank_above_that_of_every_adapted_layer_is_refused_before_memory_is_taken(qwen2):
    with pytest.raises(ConfigError, match=r"lora_rank=100000: .*rank above \d+"):
        make_engine(qwen2, lora=LoRA(100_000, 8))
