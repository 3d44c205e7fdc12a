"""Tensors that stay float32 in a bfloat16 rollout: pushed, held and hashed without losing bits."""

import pytest
import torch

from hybridrl.config.schema.rollout import RolloutConfig
from hybridrl.workers.rollout import RolloutSetup, SamplingParams, make_rollout
from hybridrl.workers.weight_transfer.buckets import OutgoingWeights
from hybridrl.workers.weight_transfer.fingerprint import FLOAT32, HeldDtypes, pushed_dtype
from hybridrl.workers.weight_transfer.quantize import GRIDS, quantized_weights
from tests.families.configurations import EOS, save_family
from tests.families.measure import prompts
from tests.support.workers.engine_cases import make_engine

pytestmark = pytest.mark.usefixtures("process_group")
CASES = {
    "DeepSeek-V3": (".e_score_correction_bias", ".gate.weight"),
    "GLM-4-MoE": (".gate.weight",),
    "Qwen3.5": (".A_log", ".dt_bias"),
    "Bamba": (".A_log", ".dt_bias"),
    "gpt-oss": (".sinks",),
}


def bfloat16_rollout(path, **settings):
    config = RolloutConfig(dtype="bfloat16", **settings)
    return make_rollout("hf", RolloutSetup(path, config, EOS, 0, 12, 12, load_format="dummy"))


@pytest.mark.parametrize("family", CASES)
def test_a_bfloat16_rollout_holds_every_bit_and_a_lost_bit_changes_its_fingerprint(family, tmp_path):
    path = save_family(family, tmp_path)
    rollout, engine = bfloat16_rollout(path), make_engine(path)
    weights = OutgoingWeights(engine.weights(), rollout.held)
    health = rollout.load_weights(1, weights, sent=lambda: weights.fingerprint)
    held = rollout._model.state_dict()
    for ending in CASES[family]:
        trained = {name: tensor.clone() for name, tensor in engine.weights() if name.endswith(ending)}
        assert trained, ending
        for name, tensor in trained.items():
            assert not torch.equal(tensor, tensor.bfloat16().float()), "the test needs bits that bfloat16 loses"
            assert torch.equal(held[name], tensor), name
        held[name].copy_(held[name].bfloat16())
        assert rollout.health().fingerprint != health.fingerprint, ending
        held[name].copy_(trained[name])
    rollout.load_weights(2, engine.weights())
    assert rollout.generate(prompts(), SamplingParams(4)).batch["rollout_log_probs"].isfinite().all()


def test_every_row_of_the_table_is_tested():
    assert {row.ending for row in FLOAT32} == {ending for endings in CASES.values() for ending in endings}


@pytest.mark.parametrize("grid", GRIDS)
def test_a_quantised_push_keeps_them_too(grid, tmp_path):
    path = save_family("Qwen3.5", tmp_path)
    rollout, engine = bfloat16_rollout(path, quantization=grid), make_engine(path)
    weights = OutgoingWeights(quantized_weights(engine.weights(), GRIDS[grid]), rollout.held)
    rollout.load_weights(1, weights, sent=lambda: weights.fingerprint)
    held = rollout._model.state_dict()
    kept = {name: tensor for name, tensor in engine.weights() if name.endswith((".A_log", ".dt_bias"))}
    assert all(torch.equal(held[name], tensor) for name, tensor in kept.items())


def test_an_engine_that_rounds_some_is_sent_rounded_ones():
    router, bias = "model.layers.1.mlp.gate.weight", "model.layers.1.linear_attn.dt_bias"
    for model_type, expected in {"glm4_moe": torch.float32, "deepseek_v3": torch.bfloat16}.items():
        held = HeldDtypes.of(torch.bfloat16, model_type=model_type)
        assert (pushed_dtype(router, held), pushed_dtype(bias, held)) == (expected, torch.bfloat16)
    for model_type, expected in {"deepseek_v3": torch.float32, "qwen3_moe": torch.bfloat16}.items():
        held = HeldDtypes.of(torch.bfloat16, model_type=model_type, float32_weights=True)
        assert (pushed_dtype(router, held), pushed_dtype(bias, held)) == (expected, torch.float32)
