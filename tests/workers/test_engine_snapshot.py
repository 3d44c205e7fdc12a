"""A rank's state in memory: an engine goes on from it bit for bit, whatever it or another one has done since."""

import numpy as np
import pytest
import torch

from hybridrl.errors import CheckpointError
from hybridrl.workers.engine.lora import LoRA
from hybridrl.workers.engine_snapshot import part_of, put_back
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


def go_on(engine):
    """A step, and what it leads to: its figures, all weights, the next random numbers."""
    engine.forward_backward(make_batch(), WHOLE, policy_loss(100.0), outputs=("log_probs", "entropy"))
    return engine.optimizer_step(), whole_weights(engine), torch.rand(3)


def assert_same(found, wanted):
    assert found[0] == wanted[0]
    assert found[1].keys() == wanted[1].keys()
    assert all(torch.equal(found[1][name], wanted[1][name]) for name in wanted[1])
    assert torch.equal(found[2], wanted[2])


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
@pytest.mark.parametrize("num_steps", [0, 2])
def test_an_engine_and_a_new_one_go_on_from_a_snapshot_as_the_first_did(model, settings, num_steps):
    engine = make_engine(model, **settings)
    for _ in range(num_steps):
        go_on(engine)
    part = part_of(engine)
    kept = part["tensors"].copy()
    wanted = go_on(engine)
    go_on(engine)
    for again in (engine, make_engine(model, **settings)):
        part["tensors"].flags.writeable = False  # as the object store gives it back
        put_back(again, part)
        assert_same(go_on(again), wanted)
    assert again.num_updates == num_steps + 1
    assert np.array_equal(part["tensors"], kept)


def test_taking_a_snapshot_changes_nothing(model):
    one, other = make_engine(model), make_engine(model)
    part_of(one)
    torch.manual_seed(0)
    found = go_on(one)
    torch.manual_seed(0)
    assert_same(found, go_on(other))


def test_a_snapshot_of_another_model_is_refused(model, tmp_path):
    other = make_engine(save_tiny_qwen2(tmp_path, num_hidden_layers=1))
    with pytest.raises(CheckpointError, match="does not fit this rank's part"):
        put_back(make_engine(model), part_of(other))
