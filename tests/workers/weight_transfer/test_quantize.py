"""Quantised weights: bits against a quantiser written out here, and pushes whose bits the rollout verifies."""

from importlib.util import find_spec

import pytest
import torch

from hybridrl.config.schema.rollout import RolloutConfig
from hybridrl.errors import ConfigError, NonFiniteError, StaleWeightsError
from hybridrl.protocol import DataProto
from hybridrl.workers.rollout import HFRollout, RolloutSetup, SamplingParams
from hybridrl.workers.weight_transfer import OutgoingWeights
from hybridrl.workers.weight_transfer.buckets import fill_buckets, unpack
from hybridrl.workers.weight_transfer.disk import DiskReceiver, DiskSender
from hybridrl.workers.weight_transfer.quantize import (
    GRIDS,
    MIN_SCALE,
    dequantize_blocks,
    is_quantizable,
    quantize_blocks,
    quantized_weights,
)
from tests.support.workers.engine_cases import PROMPT, RESPONSE, make_batch, plain_outputs, save_tiny_qwen2

SHAPES = [(128, 128), (256, 384), (1, 1), (130, 7), (129, 257), (3, 140, 130)]
GREEDY = SamplingParams(RESPONSE, n=1, do_sample=False)
MODEL = {"hidden_size": 160, "intermediate_size": 200, "num_attention_heads": 4}  # ragged blocks


def one_block(block: torch.Tensor, grid: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise one block with torch's own casts."""
    largest = {"fp8": torch.finfo(torch.float8_e4m3fn).max, "int8": 127, "int4": 7}[grid]
    scale = max(block.abs().max() / largest, torch.tensor(MIN_SCALE))
    if grid == "fp8":
        return (block / scale).to(torch.float8_e4m3fn), scale
    return torch.round(block / scale).to(torch.int8), scale


def weight_of(shape: tuple[int, ...]) -> torch.Tensor:
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    return weight * torch.logspace(-6, 3, shape[-1])  # blocks of very different sizes


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_values_and_scales_are_those_of_each_block_alone(grid, shape):
    weight = weight_of(shape)
    values, scales = quantize_blocks(weight, GRIDS[grid])
    assert values.shape == weight.shape and values.dtype == GRIDS[grid].dtype and values.is_contiguous()
    for matrix, (found, its_scales) in zip(
        weight.reshape(-1, *shape[-2:]),
        zip(values.reshape(-1, *shape[-2:]), scales.reshape(-1, *scales.shape[-2:]), strict=True),
        strict=True,
    ):
        for row in range(its_scales.shape[0]):
            for column in range(its_scales.shape[1]):
                cells = slice(row * 128, (row + 1) * 128), slice(column * 128, (column + 1) * 128)
                wanted, scale = one_block(matrix[cells], grid)
                assert torch.equal(its_scales[row, column], scale)
                assert torch.equal(found[cells].view(torch.int8), wanted.view(torch.int8))


@pytest.mark.parametrize("grid", GRIDS)
def test_the_error_is_at_most_half_a_step_of_the_grid(grid):
    weight = weight_of((200, 300))
    values, scales = quantize_blocks(weight, GRIDS[grid])
    error = (dequantize_blocks(values, scales, torch.float32) - weight).abs()
    step = dequantize_blocks(torch.ones_like(weight), scales, torch.float32)  # the scale of each value
    if grid == "fp8":  # 3 bits behind the leading one; below 2^-6 steps of 2^-9
        assert (error <= torch.maximum(weight.abs() / 16, step * 2**-10) * 1.0001).all()
    else:
        assert (error <= step * 0.5001).all()


@pytest.mark.parametrize("grid", GRIDS)
def test_a_block_of_zeros_stays_zero_and_tiny_values_do_not_overflow(grid):
    weight = torch.zeros(128, 256)
    weight[:, 128:] = 1e-44  # denormal
    values, scales = quantize_blocks(weight, GRIDS[grid])
    found = dequantize_blocks(values, scales, torch.float32)
    assert torch.equal(found[:, :128], weight[:, :128]) and bool(found.isfinite().all())
    assert (scales >= MIN_SCALE).all()


@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
def test_a_weight_that_is_not_finite_is_refused_with_its_name(bad):
    weight = torch.ones(4, 4)
    weight[1, 2] = bad
    with pytest.raises(NonFiniteError, match=r"'model.layers.0.mlp.up_proj.weight' is not finite"):
        list(quantized_weights([("model.layers.0.mlp.up_proj.weight", weight)], GRIDS["fp8"]))


@pytest.mark.parametrize(
    ("name", "quantised"),
    [
        ("model.layers.3.self_attn.q_proj.weight", True),
        ("model.layers.3.mlp.gate_proj.weight", True),
        ("model.layers.3.mlp.experts.gate_up_proj", True),
        ("model.layers.3.mlp.experts.7.down_proj.weight", True),
        ("transformer.h.0.attn.c_attn.weight", True),
        ("model.embed_tokens.weight", False),
        ("lm_head.weight", False),
        ("model.layers.3.mlp.gate.weight", False),
        ("model.layers.3.mlp.shared_expert_gate.weight", False),
        ("model.layers.3.mlp.router.weight", False),
        ("model.layers.3.linear_attn.in_proj_a.weight", False),
        ("model.layers.3.linear_attn.conv1d.weight", False),
        ("model.layers.3.linear_attn.in_proj_qkv.weight", True),
        ("model.visual.blocks.0.attn.qkv.weight", False),
        ("transformer.wte.weight", False),
    ],
)
def test_head_embeddings_routers_and_recurrent_gates_stay_as_they_are(name, quantised):
    assert is_quantizable(name, torch.ones(4, 4)) == quantised
    assert not is_quantizable(name, torch.ones(4))  # norms and biases


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.skipif(find_spec("vllm") is None, reason="no vllm")
def test_bits_are_vllms_but_for_values_between_two_of_the_grid():
    from vllm.utils.deep_gemm import per_block_cast_to_fp8

    weight = torch.randn(300, 500)
    values, scales = quantize_blocks(weight, GRIDS["fp8"])
    theirs, their_scales = per_block_cast_to_fp8(weight)
    assert torch.equal(scales, their_scales)
    same = (values.view(torch.int8) == theirs.view(torch.int8)).float().mean()  # they multiply by 1 / scale
    assert same > 0.9999


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> str:
    return save_tiny_qwen2(tmp_path_factory.mktemp("qwen2"), **MODEL)


def plain_model(path: str):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


def rollout_of(path: str, grid: str, dtype: str = "float32") -> HFRollout:
    config = RolloutConfig(name="hf", dtype=dtype, max_num_seqs=16, quantization=grid)
    return HFRollout(RolloutSetup(path, config, (5, 9), 0, PROMPT, RESPONSE, load_format="dummy"))


def own_weights(model) -> list[tuple[str, torch.Tensor]]:
    return [(name, tensor) for name, tensor in model.state_dict().items() if name != "lm_head.weight"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("grid", GRIDS)
def test_a_rollout_generates_with_what_the_sender_quantised(path, tmp_path, grid, dtype):
    model, rollout = plain_model(path), rollout_of(path, grid, dtype)
    sent = OutgoingWeights(quantized_weights(own_weights(model), GRIDS[grid]), rollout.setup.dtype)
    receipt = DiskSender(str(tmp_path), bucket_bytes=20_000).send(1, sent)
    incoming = DiskReceiver().receive(1, receipt)
    health = rollout.load_weights(1, incoming, sent=incoming.fingerprint)
    assert health.version == 1 and health.received == receipt.fingerprint == rollout.health().received
    changed = 0
    for name, tensor in own_weights(model):
        found = rollout._model.state_dict()[name]
        if is_quantizable(name, tensor):
            tensor.copy_(dequantize_blocks(*quantize_blocks(tensor, GRIDS[grid]), rollout.setup.dtype))
            changed += 1
        assert torch.equal(found, tensor.to(rollout.setup.dtype)), name
    assert changed == 2 * 7  # q, k, v, o, gate, up, down of both layers
    batch = make_batch(6)
    mask = batch.batch["attention_mask"][:, :PROMPT]
    prompts = {"input_ids": batch.batch["input_ids"][:, :PROMPT], "attention_mask": mask}
    prompts["position_ids"] = (mask.cumsum(-1) - 1).clamp(min=0)
    out = rollout.generate(DataProto.from_dict(tensors=prompts), SamplingParams(RESPONSE, n=1))
    with torch.no_grad():
        expected = plain_outputs(model, out)["log_probs"]
    atol = 1e-5 if dtype == "float32" else 0.1
    torch.testing.assert_close(out.batch["rollout_log_probs"] * out.batch["response_mask"], expected, atol=atol, rtol=0)


def test_a_flipped_bit_of_a_quantised_weight_is_found_on_arrival_and_in_the_engine(path):
    model, rollout = plain_model(path), rollout_of(path, "fp8")
    sent = [(name, tensor.clone()) for name, tensor in quantized_weights(own_weights(model), GRIDS["fp8"])]
    outgoing = OutgoingWeights(iter(sent), torch.float32)
    for _ in outgoing:
        pass
    position = next(i for i, (name, _) in enumerate(sent) if name.endswith("q_proj.weight"))
    damaged = sent[position][1].view(torch.int8).clone()
    damaged[0, 0] ^= 1
    sent[position] = sent[position][0], damaged.view(torch.float8_e4m3fn)
    with pytest.raises(StaleWeightsError, match="was pushed with fingerprint"):
        rollout.load_weights(1, iter(sent), sent=lambda: outgoing.fingerprint)
    rollout.load_weights(2, quantized_weights(own_weights(model), GRIDS["fp8"]))
    rollout._model.model.layers[0].self_attn.q_proj.weight.data[0, 0] += 1e-3
    assert rollout.health().version is None


def test_quantised_weights_without_their_scales_and_scales_alone_are_refused(path):
    weights = dict(quantized_weights(own_weights(plain_model(path)), GRIDS["int8"]))
    name = "model.layers.1.mlp.up_proj.weight"
    rollout = rollout_of(path, "int8")
    with pytest.raises(StaleWeightsError, match="up_proj.weight: a quantised weight and its scales"):
        rollout.load_weights(1, ((n, t) for n, t in weights.items() if n != name + "_scale_inv"))
    with pytest.raises(StaleWeightsError, match="up_proj.weight_scale_inv: a quantised weight and its scales"):
        rollout.load_weights(1, ((n, t) for n, t in weights.items() if n != name))
    with pytest.raises(ConfigError, match="adapters cannot be pushed alone"):
        rollout.load_weights(1, iter(()), adapters=True)


def test_a_bucket_carries_bits_of_every_grid_unchanged():
    for grid in GRIDS.values():
        sent = dict(quantized_weights([("a.weight", weight_of((130, 140)))], grid))
        bytes_of_scales = sent["a.weight_scale_inv"].nbytes
        outgoing = OutgoingWeights(sent.items(), torch.bfloat16)
        found = {}
        for bucket in fill_buckets(outgoing, num_bytes=64, buffer=lambda size: torch.empty(size, dtype=torch.uint8)):
            found |= {name: tensor.clone() for name, tensor in unpack(bucket)}
        assert outgoing.num_bytes == 130 * 140 + bytes_of_scales
        assert found["a.weight_scale_inv"].dtype is torch.float32
        for name, tensor in sent.items():
            assert torch.equal(found[name].view(torch.uint8), tensor.view(torch.uint8))
