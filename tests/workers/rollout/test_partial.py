"""Responses generated in chunks: equal to one call while the weights stay, with the version of every token."""

import pytest
import torch

from hybridrl.config.schema.workers import RolloutConfig
from hybridrl.protocol import DataProto
from hybridrl.workers.rollout import RolloutSetup, SamplingParams, make_rollout
from hybridrl.workers.rollout.partial import NO_VERSION, begin_partial, continue_partial
from tests.workers.rollout.test_hf import PAD, PROMPT, RESPONSE, model_paths, plain_model, prompts_of  # noqa: F401

EOS = tuple(range(5, 11))  # a tenth of the vocabulary, so that many responses end


@pytest.fixture(scope="module")
def rollout(model_paths):  # noqa: F811
    return make_rollout("hf", RolloutSetup(model_paths["qwen2"], RolloutConfig(), EOS, PAD, PROMPT, RESPONSE))


def in_chunks(rollout, prompts: DataProto, widths: list[int], sampling: SamplingParams) -> DataProto:
    batch = begin_partial(rollout, prompts, SamplingParams(**{**vars(sampling), "max_new_tokens": widths[0]}))
    for width in widths[1:]:
        batch = continue_partial(rollout, batch, SamplingParams(**{**vars(sampling), "max_new_tokens": width}))
    return batch


@pytest.mark.parametrize("widths", [[16], [5, 11], [1, 1, 14], [4, 4, 4, 4]])
@pytest.mark.parametrize("do_sample", [True, False])
def test_chunks_equal_one_call(rollout, widths, do_sample):
    sampling = SamplingParams(RESPONSE, n=3, do_sample=do_sample, temperature=0.8, top_p=0.9)
    whole, chunked = rollout.generate(prompts_of(6), sampling), in_chunks(rollout, prompts_of(6), widths, sampling)
    assert 0.1 < float((whole.batch["response_mask"].sum(-1) < RESPONSE).float().mean()) < 1  # some ended, some did not
    for name in (
        "responses",
        "response_mask",
        "input_ids",
        "attention_mask",
        "position_ids",
        "prompts",
        "weights_version",
        "seeds",
    ):
        assert torch.equal(whole.batch[name], chunked.batch[name]), name
    torch.testing.assert_close(whole.batch["rollout_log_probs"], chunked.batch["rollout_log_probs"], atol=1e-5, rtol=0)
    assert whole.non_tensor_batch["uid"].tolist() == chunked.non_tensor_batch["uid"].tolist()


def test_token_versions_name_the_weights_that_produced_each_token(model_paths):  # noqa: F811
    rollout = make_rollout("hf", RolloutSetup(model_paths["qwen2"], RolloutConfig(), EOS, PAD, PROMPT, RESPONSE))
    sampling = SamplingParams(4, n=2)
    batch = begin_partial(rollout, prompts_of(8), sampling)
    first = batch.batch["responses"].clone()
    rollout.load_weights(7, plain_model(model_paths["qwen2"]).state_dict().items())
    batch = continue_partial(rollout, batch, sampling)
    versions, mask = batch.batch["token_versions"], batch.batch["response_mask"].bool()
    assert torch.equal(batch.batch["responses"][:, :4], first)
    assert set(versions[:, :4][mask[:, :4]].tolist()) == {0} and set(versions[:, 4:][mask[:, 4:]].tolist()) == {7}
    assert set(versions[~mask].tolist()) == {NO_VERSION}
    assert batch.batch["weights_version"].tolist() == [0] * 16


def test_a_batch_without_open_rows_and_an_empty_one_only_grow_wider(rollout):
    sampling = SamplingParams(4, n=2)
    batch = begin_partial(rollout, prompts_of(3), sampling)
    batch.batch["responses"][:, -1] = EOS[0]
    wider = continue_partial(rollout, batch, sampling)
    assert (
        torch.equal(wider.batch["response_mask"][:, :4], batch.batch["response_mask"])
        and not wider.batch["response_mask"][:, 4:].any()
    )
    assert continue_partial(rollout, batch.slice(0, 0), sampling).batch["responses"].shape == (0, 8)
