"""Prefix trees on a CUDA device: `python -m pytest -m gpu tests/gpu`. See docs/gpu.md."""

import pytest
import torch

from tests.support.workers.engine_cases import (
    WHOLE,
    gradients,
    make_engine,
    num_response_tokens,
    policy_loss,
    save_tiny_qwen2,
)
from tests.support.workers.prefix_cases import conversation_batch

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]
POLICY = ("log_probs", "entropy")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_shared_prefixes_give_the_outputs_and_gradients_of_separate_rows(tmp_path, device, dtype):
    path = save_tiny_qwen2(tmp_path, hidden_size=64)  # FlexAttention needs heads of 16 and more
    batch, found = conversation_batch(), []
    loss_fn = policy_loss(num_response_tokens(batch))
    for shared in (False, True):
        engine = make_engine(path, device=device, dtype=dtype, share_prefixes=shared)
        outputs = engine.forward(batch, WHOLE, outputs=POLICY)
        engine.forward_backward(batch, WHOLE, loss_fn, outputs=POLICY)
        found.append(outputs | gradients(engine))
    bound = {"float32": 1e-4, "bfloat16": 0.1}[dtype]
    for name, expected in found[0].items():
        torch.testing.assert_close(found[1][name], expected, atol=bound, rtol=0)
