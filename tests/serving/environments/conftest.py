"""A function that plays one row with a scripted policy."""

import asyncio
import json
from types import MappingProxyType

import pytest

from hybridrl.serving.agent_loop.base import AgentLoopContext, lookup_agent_loop
from hybridrl.serving.environments import pool
from hybridrl.workers.rollout.requests import Request
from hybridrl.workers.rollout.sampling.sampler import SamplingParams
from tests.support.serving.scripted_policy import PROMPT, RESPONSE, ScriptedTurns

ASKED = [{"role": "system", "content": "Guess."}]


@pytest.fixture(autouse=True)
def no_process_is_left():
    yield
    for found in pool._pools.values():
        found.close()
    pool._pools.clear()


@pytest.fixture
def play(tmp_path, tiny_tokenizer):
    """Return a function that plays episodes of one environment, one after the other, and returns their responses."""

    def play(
        entry: dict,
        *rows: tuple[dict, list[str]],
        max_turns: int | None = None,
        length: int = RESPONSE,
        reader=(tiny_tokenizer, None),  # tokenizer, and image processor
        options=MappingProxyType({}),  # of the chat template
        **more,
    ):
        tokenizer, processor = reader
        path = tmp_path / "environments.json"
        path.write_text(json.dumps({"interaction": [{"name": "it", **entry}]}))
        context = AgentLoopContext(
            tokenizer,
            length,
            max_turns=max_turns,
            max_prompt_length=PROMPT,
            environments=str(path),
            processor=processor,
            template_options=options,
        )
        loop, outputs = lookup_agent_loop("environment_agent")(context), []
        sampling = SamplingParams(length)
        for kwargs, turns in rows:
            columns = {"extra_info": {"index": 4, "interaction_kwargs": {"name": "it", **kwargs}}, "raw_prompt": ASKED}
            prompt = tuple(tokenizer.encode("given"))
            row = columns | {
                "request": Request("r", prompt, sampling, 5),
                "client": ScriptedTurns(tokenizer, turns),
            }
            outputs.append(asyncio.run(loop.run(sampling, **row, **more)))
        return outputs

    return play
