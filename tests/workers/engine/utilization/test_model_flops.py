"""FLOPs of the formula against torch's own count of the operations that Hugging Face models run."""

from dataclasses import replace

import pytest
import torch
import transformers
from torch.utils.flop_counter import FlopCounterMode

from hybridrl.workers.engine.base import COMPUTED_PAIRS, COMPUTED_TOKENS, LoRA
from hybridrl.workers.engine.model_shape import ModelShape
from hybridrl.workers.engine.utilization.model_flops import ADAPTER_UPDATE, FORWARD, MODEL_TYPES, UPDATE, ModelFlops
from tests.support.workers.engine_cases import (
    WHOLE,
    make_batch,
    make_engine,
    num_response_tokens,
    policy_loss,
    save_tiny_qwen2,
)
from tests.support.workers.prefix_cases import grouped_batch

B, T = 2, 24
SIZES = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 56,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
MORE = {
    "gemma": {"head_dim": 16},
    "mistral": {"sliding_window": None},
    "mixtral": {"sliding_window": None, "num_local_experts": 4, "num_experts_per_tok": 2},
    "phi3": {"sliding_window": None},
    "qwen2_moe": {**EXPERTS, "shared_expert_intermediate_size": 40, "mlp_only_layers": [0]},
    "qwen3": {"head_dim": 12},
    "qwen3_moe": {**EXPERTS, "head_dim": 12, "decoder_sparse_step": 2},
}


def config_of(model_type: str, **more):
    return transformers.AutoConfig.for_model(model_type, **SIZES | MORE.get(model_type, {}) | more)


def counted(config) -> tuple[float, float]:
    """Return FLOPs of a forward pass and of an update of B rows of T tokens, with attention as the causal mask has it.

    Eager attention multiplies all T * T pairs of a row and masks them afterwards. T (T + 1) / 2 of them are needed.
    """
    torch.manual_seed(0)
    config._experts_implementation = "eager"  # one product for each expert, which torch can count
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    ids = torch.randint(1, 96, (B, T))
    found = []
    for backward in (False, True):
        with FlopCounterMode(display=False) as counter, torch.set_grad_enabled(backward):
            logits = model(input_ids=ids, use_cache=False).logits
            if backward:
                logits.sum().backward()
        by_operation = counter.get_flop_counts()["Global"]
        pairs = by_operation[torch.ops.aten.bmm]
        found.append(sum(by_operation.values()) - pairs * (1 - (T + 1) / (2 * T)))
    return found[0], found[1]


@pytest.mark.parametrize("model_type", sorted(MODEL_TYPES))
def test_forward_and_update_have_the_flops_that_torch_counts(model_type):
    config = config_of(model_type)
    flops, lengths = ModelFlops.of(config), torch.full((B,), T)
    forward, update = counted(config)
    assert flops.of_rows(lengths, B * T, FORWARD) == pytest.approx(forward, rel=0.02)
    assert flops.of_rows(lengths, B * T, UPDATE) == pytest.approx(update, rel=0.02)


@pytest.fixture(scope="module")
def qwen2(tmp_path_factory) -> str:
    return save_tiny_qwen2(tmp_path_factory.mktemp("qwen2"))


def products_of(act) -> float:
    """Return the FLOPs of products with weights, the head's among them, while `act` runs."""
    with FlopCounterMode(display=False) as counter:
        act()
    counts = counter.get_flop_counts()["Global"]
    return counts.get(torch.ops.aten.mm, 0) + counts.get(torch.ops.aten.addmm, 0)


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("rank", [None, 2])
def test_an_engine_without_padding_computes_what_is_counted_for_real_tokens_and_responses(qwen2, rank):
    engine = make_engine(qwen2, packed=True, whole_logits=True, lora=None if rank is None else LoRA(rank, 4))
    config, batch = transformers.AutoConfig.from_pretrained(qwen2), make_batch()
    flops = replace(ModelFlops.of(config), pair=0.0)
    lengths, num_outputs = batch.batch["attention_mask"].sum(-1), int(batch.batch["response_mask"].sum())
    loss, tokens = policy_loss(num_outputs), int(lengths.sum())
    outputs = ("log_probs", "entropy")
    forward = products_of(lambda: engine.forward(batch, WHOLE, outputs=outputs))
    update = products_of(lambda: engine.forward_backward(batch, WHOLE, loss, outputs=outputs))
    shape = ModelShape.of(config)
    adapters = 2 * shape.lora_params(rank or 0) * tokens
    # Adapters of the first layer's queries, keys and values need no gradient of their input, the frozen embedding.
    unused = 2 * tokens * shape.hidden * (shape.attention_width + 2 * shape.kv_width) if rank else 0
    unused += 2 * tokens * 3 * shape.hidden * (rank or 0)
    assert forward == pytest.approx(flops.of_rows(lengths, num_outputs, FORWARD) + adapters, rel=0.001)
    passes = ADAPTER_UPDATE if rank else UPDATE
    assert update == pytest.approx(flops.of_rows(lengths, num_outputs, passes) + 3 * adapters - unused, rel=0.001)


SHARED = grouped_batch([(16, [4, 9, 2]), (9, [3, 3]), (10, [5])])


def tokens_of(batch) -> list[list[tuple[int, ...]]]:
    """Return, for each row, the tokens up to and with each of its tokens."""
    rows = [
        ids[real.bool()].tolist()
        for ids, real in zip(batch.batch["input_ids"], batch.batch["attention_mask"], strict=True)
    ]
    return [[tuple(row[: end + 1]) for end in range(len(row))] for row in rows]


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("model_type", sorted(MODEL_TYPES))
def test_with_shared_prefixes_the_flops_that_torch_counts_are_those_of_the_computed_tokens(model_type, tmp_path):
    config, num_outputs = config_of(model_type), num_response_tokens(SHARED)
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    engine = make_engine(str(tmp_path), share_prefixes=True, whole_logits=True)
    for module in engine.model.modules():  # one product for each expert, which torch can count
        if hasattr(module, "config"):
            module.config._experts_implementation = "eager"
    flops, loss = replace(ModelFlops.of(config), pair=0.0), policy_loss(num_outputs)
    outputs = ("log_probs", "entropy")
    distinct = {tokens for row in tokens_of(SHARED) for tokens in row}
    for passes, act in (
        (FORWARD, lambda: engine.forward(SHARED, WHOLE, outputs=outputs)),
        (UPDATE, lambda: engine.forward_backward(SHARED, WHOLE, loss, outputs=outputs)),
    ):
        counted = products_of(act)
        computed = engine.take_computed()
        # The prompts are drawn at random, so tokens are shared only where all before them are equal, too.
        assert computed == {COMPUTED_TOKENS: len(distinct), COMPUTED_PAIRS: sum(map(len, distinct))}
        assert counted == pytest.approx(flops.of_tokens(*computed.values(), num_outputs, passes), rel=0.02)
        assert counted < 0.75 * flops.of_rows(SHARED.batch["attention_mask"].sum(-1), num_outputs, passes)
    assert engine.take_computed() == {}


def test_flops_of_a_layer_worked_out_by_hand():
    # Queries 4x4, keys and values 4x2 each, output 4x4: 48. Gate, up and down of 4x6: 72. Two FLOPs for each: 240.
    sizes = {"hidden_size": 4, "intermediate_size": 6, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.LlamaConfig(**sizes, num_key_value_heads=1, vocab_size=10)
    flops = ModelFlops.of(config)
    assert (flops.token, flops.pair, flops.output) == (240, 16, 80)
    # 3 and 2 tokens, 6 and 3 pairs, 4 outputs: 5 * 240 + 9 * 16 + 4 * 80
    assert flops.of_rows(torch.tensor([3, 2]), 4) == 1664
    assert flops.of_rows(torch.tensor([3, 2]), 4, ADAPTER_UPDATE) == 2 * (5 * 240 + 4 * 80) + 3 * 9 * 16


@pytest.mark.parametrize(
    "config",
    [
        transformers.GPT2Config(),
        config_of("qwen2", use_sliding_window=True, sliding_window=4, max_window_layers=0),
        config_of("mistral", sliding_window=4),
        transformers.Gemma2Config(),
    ],
)
def test_a_model_that_the_formula_does_not_fit_has_no_count(config):
    assert ModelFlops.of(config) is None


def test_a_model_that_cannot_be_read_has_no_count(tmp_path):
    settings = {"override_config": {}, "trust_remote_code": False}
    assert ModelFlops.read(str(tmp_path), **settings) is None
    assert ModelFlops.read(None, **settings) is None
