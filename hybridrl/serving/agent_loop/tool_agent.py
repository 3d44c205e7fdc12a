"""The loop with tools: the policy speaks, its calls are carried out, the answers are said to it, until it calls
nothing.

Calls are written as Hermes and Qwen models write them, `<tool_call>{"name": "add", "arguments": {"a": 1, "b":
2}}</tool_call>`, and answers come as a turn of the chat template. Another form is a subclass that overrides `calls_in`
and `say`.
"""

import asyncio
import json
import re
from dataclasses import dataclass
from typing import Any

from hybridrl.errors import ConfigError
from hybridrl.serving.agent_loop.base import AgentLoop, AgentLoopOutput, AgentSetting, register_agent_loop
from hybridrl.serving.agent_loop.tools import call_tool
from hybridrl.workers.rollout.sampling.sampler import SamplingParams

CALL = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)


@dataclass(frozen=True)
class ToolCall:
    """A call of a tool. error: why what the policy wrote is none, which is then the answer to it."""

    name: str
    arguments: dict[str, Any]
    error: str | None = None


@register_agent_loop("tool_agent")
class ToolAgentLoop(AgentLoop):
    """At most `max_turns` turns of the policy; a response without room for an answer ends where it is."""

    def __init__(self, setting: AgentSetting):
        super().__init__(setting)
        if not self.tools:
            raise ConfigError(
                "the agent loop tool_agent needs tools: set "
                "actor_rollout_ref.rollout.multi_turn.function_tool_path to a Python file "
                "whose functions are marked with @function_tool"
            )

    async def run(self, sampling_params: SamplingParams, **row: Any) -> AgentLoopOutput:
        response, turns = self.respond(row), 0
        while response.room > 0:
            said = await response.sample(self.sampling_of_turn(sampling_params, turns))
            turns += 1
            if said.finish_reason != "stop" or turns == self.setting.max_turns:
                break
            calls = self.calls_in(self.tokenizer.decode(said.token_ids, skip_special_tokens=True))
            if not calls:
                break
            answers = await asyncio.gather(*(self._answer(call) for call in calls))
            if not response.observe(self.say(calls, list(answers))):
                break
        return response.output()

    def sampling_of_turn(self, sampling_params: SamplingParams, turn: int) -> SamplingParams:
        """Return how turn number `turn` is sampled; for forms in which something of their own ends a turn."""
        return sampling_params

    def calls_in(self, text: str) -> list[ToolCall]:
        """Return the calls in what the policy wrote."""
        return [_call(body) for body in CALL.findall(text)]

    def say(self, calls: list[ToolCall], answers: list[str]) -> list[int]:
        """Return the tokens that answer these calls: a turn for each, and the beginning of the policy's next one.

        The chat template is asked for the text after a conversation's end, so what was sampled is not touched.
        """
        before = [{"role": "user", "content": "."}, {"role": "assistant", "content": "."}]
        turns = [{"role": "tool", "content": answer} for answer in answers]
        head = self.tokenizer.apply_chat_template(before, tokenize=False)
        whole = self.tokenizer.apply_chat_template([*before, *turns], tokenize=False, add_generation_prompt=True)
        if not whole.startswith(head):
            raise ConfigError(
                "the chat template writes an earlier turn in another way when a tool answers; override `say`"
            )
        # The policy's turn ended with its end token; what the template puts between that and the next turn comes first.
        end = (
            head.rindex(self.tokenizer.eos_token) + len(self.tokenizer.eos_token)
            if self.tokenizer.eos_token in head
            else len(head)
        )
        return self.tokenizer.encode(whole[end:], add_special_tokens=False)

    async def _answer(self, call: ToolCall) -> str:
        return call.error or await call_tool(dict(self.tools), call.name, call.arguments)


def _call(body: str) -> ToolCall:
    try:
        parsed = json.loads(body)
        name, arguments = parsed["name"], parsed.get("arguments", {})
        if not isinstance(name, str) or not isinstance(arguments, dict):
            raise TypeError("name must be text and arguments a JSON object")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        return ToolCall("", {}, error=f"Error: this is no tool call ({type(error).__name__}: {error})")
    return ToolCall(name, arguments)
