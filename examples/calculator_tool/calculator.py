"""A calculator for a model that writes `<<3*4=`: the tool computes the expression before `=` and appends `12>>`.

Two extensions in one file: `calculate` is a tool (`rollout.multi_turn.function_tool_path`), `calculator` an agent loop
(`rollout.agent.path`) that finds the calls in the model's text. A turn of the model ends with `=`, the last one with
its end token.
"""

import re
from dataclasses import replace

from hybridrl.serving.agent_loop import ToolAgentLoop, ToolCall, function_tool, register_agent_loop
from hybridrl.workers.rollout import SamplingParams

CALCULATION = re.compile(r"<<\s*([^<>=]*)=$")
TERMS = re.compile(r"(-?\d+)([-+*])(-?\d+)")


@function_tool
def calculate(expression: str) -> str:
    """Return the value of two integers with +, - or * between them; `?` for anything else."""
    match = TERMS.fullmatch(expression.replace(" ", ""))
    if match is None:
        return "?"
    left, sign, right = int(match[1]), match[2], int(match[3])
    return str({"+": left + right, "-": left - right, "*": left * right}[sign])


@register_agent_loop("calculator")
class Calculator(ToolAgentLoop):
    def turn_sampling_params(self, sampling_params: SamplingParams, turn: int) -> SamplingParams:
        [equals] = self.tokenizer.encode("=", add_special_tokens=False)
        return replace(sampling_params, stop_token_ids=(equals,))

    def parse_tool_calls(self, text: str) -> list[ToolCall]:
        return [ToolCall("calculate", {"expression": body}) for body in CALCULATION.findall(text)]

    def render_messages(self, calls: list[ToolCall], answers: list[str]) -> list[int]:
        return self.tokenizer.encode(f"{answers[0]}>>", add_special_tokens=False)
