"""The calculator example: what it computes, how calls and answers enter the response, and that its training runs."""

import asyncio
from pathlib import Path

import pytest

from hybridrl.import_path import load_module
from hybridrl.serving.agent_loop.base import AgentLoopContext, lookup_agent_loop
from hybridrl.workers.rollout.requests import Request, TokenOutput
from hybridrl.workers.rollout.sampling.sampler import SamplingParams
from tests.support.end_to_end.runs import train

FILE = Path(__file__).parents[2] / "examples" / "calculator_tool" / "calculator.py"


@pytest.mark.parametrize(
    ("expression", "value"),
    [("3*4", "12"), ("12 + 5", "17"), ("2-6", "-4"), ("-4*3", "-12"), ("3", "?"), ("3*4*5", "?"), ("import os", "?")],
)
def test_the_calculator_computes_two_numbers_with_one_of_three_signs(expression, value):
    assert load_module(str(FILE)).calculate(expression) == value


class Writer:
    """A policy that generates these turns."""

    def __init__(self, turns: list[list[int]]):
        self.turns = turns

    async def generate(self, request: Request, *, conversation: str | None = None) -> TokenOutput:
        tokens = self.turns.pop(0)
        assert tokens[-1] in (*request.sampling.stop_token_ids, 2)
        return TokenOutput(request.request_id, tokens, [-1.0] * len(tokens), "stop", 3)


def test_the_value_of_the_models_calculation_is_appended_to_the_response(tiny_tokenizer):
    encode, end = tiny_tokenizer.encode, tiny_tokenizer.eos_token_id
    assert end == 2
    tools = {"calculate": load_module(str(FILE)).calculate}
    policy = Writer([encode("<<3*4="), encode(" <<12+5="), [*encode(" #### 17"), end]])
    sampling = SamplingParams(100)
    loop = lookup_agent_loop("calculator")(AgentLoopContext(tiny_tokenizer, 100, tools))
    output = asyncio.run(loop.run(sampling, request=Request("r", (5, 6), sampling, 1), client=policy))
    assert tiny_tokenizer.decode(output.response_ids[:-1]) == "<<3*4=12>> <<12+5=17>> #### 17"
    observed = [token for token, mask in zip(output.response_ids, output.response_mask, strict=True) if not mask]
    assert tiny_tokenizer.decode(observed) == "12>>17>>" and output.num_turns == 6


def test_training_with_the_calculator_runs(tmp_path, tiny_qwen2):
    rollout = "actor_rollout_ref__rollout__"
    changes = {
        f"{rollout}mode": "async",
        f"{rollout}agent__path": FILE,
        f"{rollout}agent__default_agent_loop": "calculator",
        f"{rollout}multi_turn__function_tool_path": FILE,
        f"{rollout}multi_turn__max_assistant_turns": 4,
    }
    rows = train(tmp_path, tiny_qwen2, **changes)
    assert all(row["rollout/num_turns/mean"] >= 2 for row in rows if "rollout/num_turns/mean" in row)
    assert any("rollout/num_turns/mean" in row for row in rows)
