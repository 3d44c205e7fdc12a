"""Snapshots of an engine's state: an engine continues from one bit for bit, whatever it has done since."""

import numpy as np
import pytest
import torch

from hybridrl.errors import CheckpointError
from hybridrl.workers.engine.base import LoRA
from hybridrl.workers.engine.snapshot import load_engine_state, take_engine_state
from tests.support.workers.engine_cases import (
    WHOLE,
    make_batch,
    make_engine,
    policy_loss,
    save_tiny_qwen2,
    whole_weights,
)

SETTINGS = {
    "plain": {},
    "bfloat16": {"dtype": "bfloat16"},
    "offloaded": {"param_offload": True, "optimizer_offload": True},
}
SETTINGS |= {"adapters": {"lora": LoRA(4, 8)}, "kept gathered": {"reshard_after_forward": False}}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_tiny_qwen2(tmp_path_factory.mktemp("model"))


def take_step(engine):
    """Take a step; return its metrics, all weights and the next random numbers."""
    engine.forward_backward(make_batch(), WHOLE, policy_loss(100.0), outputs=("log_probs", "entropy"))
    return engine.optimizer_step(), whole_weights(engine), torch.rand(3)


def assert_same(found, expected):
    assert found[0] == expected[0]
    assert found[1].keys() == expected[1].keys()
    assert all(torch.equal(found[1][name], expected[1][name]) for name in expected[1])
    assert torch.equal(found[2], expected[2])


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
@pytest.mark.parametrize("num_steps", [0, 2])
def test_an_engine_and_a_new_one_continue_from_a_snapshot_as_the_first_did(model, settings, num_steps):
    engine = make_engine(model, **settings)
    for _ in range(num_steps):
        take_step(engine)
    snapshot = take_engine_state(engine)
    copied = [array.copy() for array in snapshot["tensors"]]
    expected = take_step(engine)
    take_step(engine)
    for restored in (engine, make_engine(model, **settings)):
        for array in snapshot["tensors"]:
            array.flags.writeable = False  # as the object store returns it
        load_engine_state(restored, snapshot)
        assert_same(take_step(restored), expected)
    assert restored.num_updates == num_steps + 1
    assert all(map(np.array_equal, snapshot["tensors"], copied))


def test_a_snapshot_that_is_stored_at_once_needs_no_copy(model):
    engine = make_engine(model)
    take_step(engine)
    shared, copied = take_engine_state(engine, is_copy=False), take_engine_state(engine)
    assert all(map(np.array_equal, shared["tensors"], copied["tensors"]))
    state = engine.state_tensors()
    addresses = {parameter.to_local().data_ptr() for module in state.modules for parameter in module.parameters()}
    assert addresses <= {array.ctypes.data for array in shared["tensors"]}
    assert not addresses & {array.ctypes.data for array in copied["tensors"]}


def test_a_parameter_takes_twelve_bytes_once_trained(model):
    engine = make_engine(model)
    take_step(engine)
    params = [parameter for module in engine.state_tensors().modules for parameter in module.parameters()]
    num_buffers = sum(buffer.nbytes for module in engine.state_tensors().modules for buffer in module.buffers())
    stored = sum(array.nbytes for array in take_engine_state(engine)["tensors"])
    counts = 4 * len(params)  # Adam has a number of steps for each
    assert stored == 12 * sum(parameter.numel() for parameter in params) + num_buffers + counts


def test_taking_a_snapshot_changes_nothing(model):
    one, other = make_engine(model), make_engine(model)
    take_engine_state(one)
    torch.manual_seed(0)
    found = take_step(one)
    torch.manual_seed(0)
    assert_same(found, take_step(other))


def test_a_snapshot_of_another_model_is_refused(model, tmp_path):
    other = make_engine(save_tiny_qwen2(tmp_path, num_hidden_layers=1))
    with pytest.raises(CheckpointError, match="does not fit this rank's share"):
        load_engine_state(make_engine(model), take_engine_state(other))


def test_new_moments_are_on_the_device_of_the_optimizer_and_not_on_that_of_offloaded_parameters(model):
    engine = make_engine(model, param_offload=True)
    engine._optimizer_on = torch.device("meta")  # as another device than the parameters'
    states = [state for optimizer in engine.state_tensors().optimizers for state in optimizer.state.values()]
    assert states and {state[name].device.type for state in states for name in ("exp_avg", "exp_avg_sq")} == {"meta"}
