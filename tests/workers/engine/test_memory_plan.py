"""Memory of an engine: numbers worked out by hand, savings, and budgets."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from hybridrl.workers.engine.base import LoRA
from hybridrl.workers.engine.lora import add_adapters
from hybridrl.workers.engine.memory_plan import EngineMemory, EngineSizes, choose, chunk_for
from hybridrl.workers.engine.model_shape import ModelShape

SHAPE = ModelShape(hidden=8, intermediate=16, layers=2, heads=2, kv_heads=1, head_dim=4, vocab=100)
LARGE = ModelShape(hidden=4096, intermediate=12288, layers=36, heads=32, kv_heads=8, head_dim=128, vocab=151_936)
GIB = 2**30


def test_parameters_are_those_of_the_real_model():
    from transformers import Qwen3Config, Qwen3ForCausalLM

    sizes = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 4, "num_hidden_layers": 2}
    for tied in (True, False):
        config = Qwen3Config(vocab_size=100, hidden_size=8, intermediate_size=16, **sizes, tie_word_embeddings=tied)
        shape = ModelShape.of(config)
        model = Qwen3ForCausalLM(config)
        norms_of_heads = 2 * 2 * 4  # of queries and keys, which the shape leaves out
        assert shape.params == sum(tensor.numel() for tensor in model.parameters()) - norms_of_heads
        assert replace(shape, tied=False) == SHAPE


def test_a_config_without_layers_is_refused_by_name():
    with pytest.raises(ValueError, match="SimpleNamespace has no num_hidden_layers"):
        ModelShape.of(SimpleNamespace(hidden_size=8, intermediate_size=16))


def test_numbers_worked_out_by_hand():
    # a layer: 8 (16 + 8) + 3 * 8 * 16 + 16 = 592 parameters; all: 2 * 592 + 2 * 800 + 8 = 2792
    memory = EngineMemory(SHAPE, EngineSizes(dtype="float32", tokens=10, chunk=1, processes=4))
    assert (SHAPE.layer_params, SHAPE.params) == (592, 2792)
    assert (memory.weights, memory.gradients, memory.optimizer) == (2792, 2792, 5584)
    # a token in a layer: two norms 2 * 3 * 8, attention 2 * 8 + 2 * 4, feed-forward 4 * 16: 136 numbers; at the end
    # three of 8 for the last norm
    assert memory.activations == 10 * 4 * (2 * 136 + 24)
    # a token's logits, and the states with their gradient
    assert memory.by_phase()["backward_start"].logits == 100 * 4 + 10 * 8 * 8


def test_experts_are_sharded_over_their_own_processes_and_never_over_tensor_parallel_ones():
    moe = replace(SHAPE, experts=4, active_experts=2)
    # a layer: 8 (16 + 8) + 8 * 4 + 16 = 240 parameters and 4 * 3 * 8 * 16 = 1536 of experts
    # all: 2 * 240 + 2 * 800 + 8 = 2088 and 3072 of experts
    assert (moe.params, moe.expert_params, moe.inactive_params) == (2088 + 3072, 3072, 3072 // 2)
    assert (SHAPE.expert_params, SHAPE.inactive_params) == (0, 0)
    found = {}
    for tensor, pipeline, expert in ((2, 1, 1), (2, 1, 4), (2, 2, 2)):
        sizes = EngineSizes(strategy="megatron", processes=8, tensor=tensor, pipeline=pipeline, expert=expert)
        memory = EngineMemory(moe, sizes)
        found[tensor, pipeline, expert] = (memory.weights / 2, memory.gradients / 4)
        assert memory.optimizer == 12 * 5160 / 8  # each process has a part of what its group holds
    own = {(2, 1, 1): 1044 + 3072, (2, 1, 4): 1044 + 768, (2, 2, 2): 522 + 768}
    assert found == {layout: (number, number) for layout, number in own.items()}
    unsharded = EngineSizes(strategy="megatron", processes=8, tensor=2, expert=4, distributed_optimizer=False)
    assert EngineMemory(moe, unsharded).optimizer == 12 * (1044 + 768)


def test_adapters_are_those_of_the_real_model():
    import transformers

    sizes = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 4, "num_hidden_layers": 2}
    sizes |= {"vocab_size": 100, "hidden_size": 8, "intermediate_size": 16}
    sparse = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    for config in (transformers.Qwen3Config(**sizes), transformers.Qwen3MoeConfig(**sizes, **sparse)):
        model = transformers.AutoModelForCausalLM.from_config(config)
        add_adapters(model, LoRA(rank=2, alpha=4), seed=0)
        trained = sum(tensor.numel() for tensor in model.parameters() if tensor.requires_grad)
        assert ModelShape.of(config).lora_params(2) == trained


@pytest.mark.parametrize(
    ("change", "phase", "part"),
    [
        ({"gradient_checkpointing": True}, "backward_start", "activations"),
        ({"chunk": 256}, "backward_start", "logits"),
        ({"processes": 16}, "optimizer_step", "optimizer"),
        ({"lora_rank": 8}, "optimizer_step", "gradients"),
        ({"optimizer_offload": True}, "rest", "optimizer"),
        ({"param_offload": True}, "rest", "weights"),
        ({"strategy": "megatron", "processes": 8, "tensor": 2}, "rest", "weights"),
        ({"strategy": "megatron", "processes": 8, "context": 2}, "backward_start", "activations"),
    ],
    ids=str,
)
def test_a_setting_saves_what_it_is_for(change, phase, part):
    sizes = EngineSizes(strategy=change.get("strategy", "fsdp"), processes=8)
    before, after = EngineMemory(LARGE, sizes).by_phase(), EngineMemory(LARGE, replace(sizes, **change)).by_phase()
    assert getattr(after[phase], part) < getattr(before[phase], part)


def test_whole_logits_of_a_large_vocabulary_would_be_the_largest_part():
    parts = EngineMemory(LARGE, EngineSizes(processes=8, whole_logits=True, gradient_checkpointing=True)).by_phase()
    start = parts["backward_start"]
    assert start.logits == 16384 * 151_936 * 2 * 2
    assert start.logits > max(start.weights, start.gradients, start.optimizer, start.activations)


def test_a_choice_fits_its_budget_and_takes_the_cheapest_savings_that_do():
    sizes = EngineSizes(processes=8)
    found = {gib: choose(LARGE, sizes, budget=gib * GIB, min_tokens=4096) for gib in (16, 32, 48, 80, 140)}
    assert not found[16].fits
    assert all(found[gib].fits and found[gib].bytes <= gib * GIB for gib in (32, 48, 80, 140))
    assert found[32].sizes.gradient_checkpointing
    assert not found[140].sizes.gradient_checkpointing
    for gib in (32, 48, 80, 140):
        chosen = found[gib].sizes
        assert not chosen.optimizer_offload, "nobody else needs the device between calls"
        assert (
            chosen.tokens == 65536 or EngineMemory(LARGE, replace(chosen, tokens=chosen.tokens + 256)).peak > gib * GIB
        )
    assert found[32].sizes.tokens < found[48].sizes.tokens


def test_a_rollout_on_the_same_device_makes_room_for_itself_by_offload():
    sizes = EngineSizes(processes=8)
    alone = choose(LARGE, sizes, budget=80 * GIB, min_tokens=4096, beside=60 * GIB)
    shared = choose(LARGE, sizes, budget=80 * GIB, min_tokens=4096, beside=75 * GIB)
    assert not alone.sizes.optimizer_offload
    assert shared.sizes.optimizer_offload
    assert shared.fits


def test_a_chunk_takes_a_small_share_of_the_budget_and_at_least_a_token():
    assert chunk_for(LARGE, EngineSizes(), budget=40 * GIB) == int(0.05 * 40 * GIB // (151_936 * 6))
    assert chunk_for(LARGE, EngineSizes(), budget=1) == 1


def test_a_sequence_longer_than_the_largest_budget_is_refused():
    with pytest.raises(ValueError, match="min_tokens=10 is above max_tokens=5"):
        choose(LARGE, EngineSizes(), budget=GIB, min_tokens=10, max_tokens=5)
