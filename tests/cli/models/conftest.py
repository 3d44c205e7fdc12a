from collections.abc import Iterator

import pytest

from hybridrl.config.schema.rollout import RolloutConfig
from hybridrl.serving.openai import ServedModel
from hybridrl.workers.rollout import RolloutSetup, make_rollout
from hybridrl.workers.rollout.base import load_special_tokens

PROMPT, RESPONSE = 128, 64


@pytest.fixture(scope="module")
def tiny_site(tiny_qwen2, tiny_tokenizer) -> Iterator:
    """An endpoint that serves the tiny model."""
    pytest.importorskip("openai", reason="the openai client is not installed; vLLM brings it")
    from tests.support.serving.site import Site

    tokens = load_special_tokens(str(tiny_qwen2))
    config = RolloutConfig(name="hf", dtype="float32")
    setup = RolloutSetup(str(tiny_qwen2), config, tokens.eos_ids, tokens.pad_id, PROMPT, RESPONSE)
    served = ServedModel("tiny", tiny_tokenizer, PROMPT + RESPONSE, RESPONSE, len(tiny_tokenizer))
    site = Site(make_rollout("hf", setup), served)
    yield site
    site.close()
