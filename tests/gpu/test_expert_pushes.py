"""Pushes of a mixture of experts to vLLM on the device, in bfloat16, for which vLLM may choose FlashInfer's kernels.

Skipped without vLLM. GPU_TESTS_ON=cpu needs its CPU build.
"""

import pytest
import torch

from hybridrl.workers.rollout import make_rollout
from tests.support.workers.expert_cases import changed_model, log_prob_differences, save_experts, setup_of

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]


def test_experts_compute_with_the_weights_of_every_push(device, tmp_path, record_figure):
    pytest.importorskip("vllm", reason="vLLM is not installed")
    path = save_experts(tmp_path)
    rollout = make_rollout("vllm", setup_of(path, dtype="bfloat16", device=device))
    for version in (1, 2):
        model = changed_model(path, seed=version, dtype=torch.bfloat16)
        rollout.load_weights(version, ((name, weight.to(device)) for name, weight in model.named_parameters()))
        difference = log_prob_differences(rollout, model.float()).abs().mean().item()
        assert difference < 0.2  # wrong experts: above 1
    record_figure("bfloat16 log-probs of vLLM's experts after a push, mean difference to float32", f"{difference:.3f}")
