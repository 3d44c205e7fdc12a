"""Starts and ends of vLLM's engine."""

from importlib.util import find_spec

import pytest
import torch.distributed as dist

from hybridrl.workers.rollout import make_rollout
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
