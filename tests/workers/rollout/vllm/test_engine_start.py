"""Starts and ends of vLLM's engine."""

from dataclasses import replace
from importlib.util import find_spec

import pytest
import torch.distributed as dist

from hybridrl.workers.rollout import make_rollout
from hybridrl.workers.rollout.vllm import engine_start
from tests.support.workers.expert_cases import save_experts, setup_of

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(240),
    pytest.mark.skipif(find_spec("vllm") is None, reason="the module vllm is not installed"),
]


def test_the_end_of_an_engine_leaves_the_process_group_of_a_trainer_beside_it(tmp_path):
    mine = not dist.is_initialized()
    if mine:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    rollout = make_rollout("vllm", setup_of(save_experts(tmp_path)))
    rollout.engine.engine_core.shutdown()  # as at the end of an engine that nobody holds
    assert dist.is_initialized()
    if mine:
        dist.destroy_process_group()


def test_the_kernel_of_the_trainer_is_no_entry_of_vllms_config(tmp_path):
    chosen = {"attn_implementation": "eager", "rms_norm_eps": 1e-5}
    setup = replace(setup_of(save_experts(tmp_path)), override_config=chosen)
    found = engine_start._overrides(setup, {})
    assert found["rms_norm_eps"] == 1e-5 and "attn_implementation" not in found
