"""Checkpoints of the Megatron engine in bfloat16, in one process."""

import pytest
import torch

from tests.support.workers.engine_cases import make_batch, whole_weights
from tests.support.workers.megatron_models import MICRO, NEEDS_MEGATRON, PLAIN, save_models, value_loss

pytestmark = NEEDS_MEGATRON


@pytest.fixture(scope="module")
def critic_path(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("checkpoint")
    save_models(folder, ["qwen2"])
    return str(folder / "qwen2 critic")


@pytest.mark.parametrize("layout", [pytest.param({}, id="distributed optimizer"), pytest.param(PLAIN, id="plain")])
def test_a_critic_in_bfloat16_continues_from_its_checkpoint_bit_for_bit(critic_path, tmp_path, layout):
    from hybridrl.workers.engine.megatron.parallel_groups import destroy_model_parallel
    from tests.support.workers.megatron_rank import make_engine

    def step(engine) -> dict[str, float]:
        engine.forward_backward(make_batch(), MICRO, value_loss, outputs=("values",))
        return engine.optimizer_step()

    one, other = (make_engine(critic_path, layout, kind="value", dtype="bfloat16") for _ in range(2))
    step(one)
    one.save(str(tmp_path))
    other.load(str(tmp_path))
    assert step(other) == step(one)
    expected = whole_weights(one)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in whole_weights(other).items())
    destroy_model_parallel()
