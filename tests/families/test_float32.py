"""Tensors that stay float32 in a bfloat16 rollout: pushed, held and hashed without losing bits."""

import pytest
import torch

from hybridrl.config.schema.rollout import RolloutConfig
from hybridrl.workers.rollout import RolloutSetup, make_rollout
from hybridrl.workers.weight_transfer.buckets import OutgoingWeights
from hybridrl.workers.weight_transfer.fingerprint import FLOAT32
from tests.families.configurations import EOS, save_family
from tests.support.workers.engine_cases import make_engine

pytestmark = pytest.mark.usefixtures("process_group")


@pytest.mark.parametrize(
    ("family", "ending"), [("DeepSeek-V3", ".e_score_correction_bias"), ("Qwen3.5", ".A_log"), ("Bamba", ".A_log")]
)
def test_a_bfloat16_rollout_holds_every_bit_and_a_lost_bit_changes_its_fingerprint(family, ending, tmp_path):
    assert ending in FLOAT32
    path = save_family(family, tmp_path)
    setup = RolloutSetup(path, RolloutConfig(dtype="bfloat16"), EOS, 0, 12, 12, load_format="dummy")
    rollout, engine = make_rollout("hf", setup), make_engine(path)
    weights = OutgoingWeights(engine.weights(), torch.bfloat16)
    health = rollout.load_weights(1, weights, sent=lambda: weights.fingerprint)
    trained = {name: tensor.clone() for name, tensor in engine.weights() if name.endswith(ending)}
    held = rollout._model.state_dict()
    assert trained
    for name, tensor in trained.items():
        assert not torch.equal(tensor, tensor.bfloat16().float()), "the test needs bits that bfloat16 loses"
        assert torch.equal(held[name], tensor)
    held[name].copy_(held[name].bfloat16())
    assert rollout.health().fingerprint != health.fingerprint
