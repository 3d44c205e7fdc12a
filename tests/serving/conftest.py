"""An endpoint on a tiny model whose chat template shows tools; rooms with another one have their own."""

from collections.abc import Iterator

import pytest

from tests.support.serving.chat_templates import tokenizer_of
from tests.support.serving.scripted_policy import PROMPT, RESPONSE


@pytest.fixture(scope="module")
def site(tiny_qwen2, tiny_tokenizer) -> Iterator:
    pytest.importorskip("openai", reason="the openai client is not installed; vLLM brings it")
    from hybridrl.config.schema.rollout import RolloutConfig
    from hybridrl.serving.openai import ServedModel
    from hybridrl.workers.rollout import RolloutSetup, make_rollout
    from hybridrl.workers.rollout.base import load_special_tokens
    from tests.support.serving.site import Site

    tokens, tokenizer = load_special_tokens(str(tiny_qwen2)), tokenizer_of("qwen", tiny_tokenizer)
    config = RolloutConfig(name="hf", dtype="float32")
    rollout = make_rollout("hf", RolloutSetup(str(tiny_qwen2), config, tokens.eos_ids, tokens.pad_id, PROMPT, RESPONSE))
    found = Site(rollout, ServedModel("tiny", tokenizer, PROMPT + RESPONSE, RESPONSE, len(tokenizer)))
    yield found
    found.close()
