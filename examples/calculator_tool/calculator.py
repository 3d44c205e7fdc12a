"""A calculator for a model that writes `<<3*4=`: what stands before `=` is computed, and `12>>` is said to it.

Two plugs in one file: `calculate` is a tool (`rollout.multi_turn.function_tool_path`), `calculator` an agent loop
(`rollout.agent.path`) that knows where the model calls it. A turn of the model ends with `=`, the last one with its end
token.
"""

import re
from dataclasses import replace

from hybridrl.serving.agent_loop import ToolAgentLoop, ToolCall, function_tool, register_agent_loop
from hybridrl.workers.rollout import SamplingParams

CALCULATION = re.compile(r"<<\s*([^<>=]*)=$")
TERMS = re.compile(r"(-?\d+)([-+*])(-?\d+)")


@function_tool
def calculate(expression: str) -> str:
    """Return the value of two whole numbers with +, - or * between them; `?` for anything else."""
    match = TERMS.fullmatch(expression.replace(" ", ""))
    if match is None:
        return "?"
    left, sign, right = int(match[1]), match[2], int(match[3])
    return str({"+": left + right, "-": left - right, "*": left * right}[sign])


@register_agent_loop("calculator")
class Calculator(ToolAgentLoop):
    def sampling_of_turn(self, sampling_params: SamplingParams, turn: int) -> SamplingParams:
        [equals] = self.tokenizer.encode("=", add_special_tokens=False)
        return replace(sampling_params, stop_token_ids=(equals,))

    def calls_in(self, text: str) -> list[ToolCall]:
        return [ToolCall("calculate", {"expression": body}) for body in CALCULATION.findall(text)]

    def say(self, calls: list[ToolCall], answers: list[str]) -> list[int]:
        return self.tokenizer.encode(f"{answers[0]}>>", add_special_tokens=False)
