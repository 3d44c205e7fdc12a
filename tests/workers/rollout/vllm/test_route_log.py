"""Experts that the `vllm` rollout returns, against those of the `hf` rollout with the same weights."""

from dataclasses import replace
from importlib.util import find_spec

import numpy as np
import pytest
import torch

from hybridrl.config.schema.rollout import RolloutConfig
from hybridrl.workers.rollout import SamplingParams, make_rollout
from hybridrl.workers.rollout.requests import Request
from hybridrl.workers.rollout.sampling.sampler import sequence_keys
from hybridrl.workers.rollout.vllm.rollout import VLLMRollout
from tests.support.workers.expert_cases import PROMPTS, RESPONSE, changed_model, save_experts, setup_of

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(240),
    pytest.mark.skipif(find_spec("vllm") is None, reason="the module vllm is not installed"),
]
SEED = 7


@pytest.fixture(scope="module")
def rollouts(tmp_path_factory):
    """Return `hf` and `vllm` with equal weights; vLLM computes prompts in parts of 16 tokens."""
    torch.set_num_threads(1)
    path = save_experts(tmp_path_factory.mktemp("experts"))
    setup, weights = setup_of(path), changed_model(path, seed=1)
    config = replace(setup.config, enable_rollout_routing_replay=True, max_num_batched_tokens=16)
    found = {name: make_rollout(name, replace(setup, config=config)) for name in ("hf", "vllm")}
    for rollout in found.values():
        rollout.load_weights(1, weights.named_parameters())
    return found


def generated(rollout):
    sampling = SamplingParams(RESPONSE, n=3)
    return rollout.generate_tokens(PROMPTS, sequence_keys(torch.full((len(PROMPTS),), SEED), 3), sampling)


def test_each_token_has_the_experts_that_hf_computes(rollouts):
    expected, found = generated(rollouts["hf"]), generated(rollouts["vllm"])
    assert torch.equal(found.tokens, expected.tokens)
    lengths = expected.mask.sum(-1).tolist()
    assert len(set(lengths)) > 1, "some responses end early"
    for row, (entry, other) in enumerate(zip(found.routes, expected.routes, strict=True)):
        assert entry.dtype == other.dtype and len(entry) == len(PROMPTS[row // 3]) + lengths[row] - 1
        assert np.array_equal(np.sort(entry), np.sort(other))  # the order of a token's experts is the kernel's


def test_served_requests_return_the_experts_of_prompt_and_response(rollouts):
    expected, engine = generated(rollouts["hf"]), rollouts["vllm"].request_engine()
    for row in range(6):
        prompt = tuple(PROMPTS[row // 3])
        engine.add(Request(str(row), prompt, SamplingParams(RESPONSE), seed=SEED, sample=row % 3))
    done = {}
    for _ in range(60):
        done |= {output.request_id: output for output in engine.step()}
    assert len(done) == 6
    for row in range(6):
        assert done[str(row)].token_ids == expected.tokens[row, : int(expected.mask[row].sum())].tolist()
        assert np.array_equal(np.sort(done[str(row)].routes), np.sort(expected.routes[row]))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"enforce_eager": False}, "set actor_rollout_ref.rollout.enforce_eager=true"),
        ({"engine_kwargs": {"enable_prefix_caching": True}}, "leave engine_kwargs.enable_prefix_caching out"),
    ],
)
def test_settings_with_which_tokens_would_have_no_experts_are_refused(settings, message):
    config = RolloutConfig(name="vllm", enable_rollout_routing_replay=True, **settings)
    [problem] = VLLMRollout.setting_problems(config, max_length=64)
    assert message in problem
