"""The state of a Megatron engine in one process: checkpoints in bfloat16, and what moves to host memory."""

import pytest
import torch
from torch.overrides import TorchFunctionMode

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


class Moves(TorchFunctionMode):
    """Notes the addresses of the tensors that are moved to a device."""

    def __init__(self) -> None:
        super().__init__()
        self.addresses: set[int] = set()

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.Tensor.to:
            self.addresses.add(args[0].data_ptr())
        return func(*args, **kwargs or {})


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_optimizer_takes_its_float32_copies_along_and_leaves_the_parameters(critic_path, dtype):
    from hybridrl.workers.engine.megatron.parallel_groups import destroy_model_parallel
    from tests.support.workers.megatron_rank import make_engine

    engine = make_engine(critic_path, PLAIN, kind="value", dtype=dtype)
    with Moves() as moves:
        engine.to("cpu", params=False)
    own, [optimizer] = {parameter.data_ptr() for parameter in engine.chunks[0].parameters()}, engine._optimizers
    trained = {parameter.data_ptr() for group in optimizer.param_groups for parameter in group["params"]}
    assert moves.addresses == trained - own
    assert bool(moves.addresses) == (dtype == "bfloat16")
    destroy_model_parallel()
