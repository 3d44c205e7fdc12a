"""Agent loop with tools: run the policy's calls until a turn has none.

Calls are written as Hermes and Qwen models do, `<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>`.
Answers are a turn of the chat template. For another format, subclass and override `parse_tool_calls` and
`render_messages`.
"""

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hybridrl.errors import ConfigError
from hybridrl.serving.agent_loop.base import AgentLoop, AgentLoopContext, AgentLoopOutput, register_agent_loop
from hybridrl.serving.agent_loop.tools.function_tools import MAX_ANSWER_CHARACTERS, call_tool, row_arguments
from hybridrl.workers import images
from hybridrl.workers.rollout.sampling.sampler import SamplingParams

CALL_START, CALL_END = "<tool_call>", "</tool_call>"
MAX_CALLS = 128  # of one turn


@dataclass(frozen=True)
class ToolCall:
    """A call of a tool. error: why the policy's text is not a valid call; it becomes the answer."""

    name: str
    arguments: dict[str, Any]
    error: str | None = None


@register_agent_loop("tool_agent")
class ToolAgentLoop(AgentLoop):
    """At most `max_turns` turns of the policy, with `MAX_CALLS` each.

    A response ends where answers do not fit any more.
    """

    def __init__(self, context: AgentLoopContext):
        super().__init__(context)
        if not self.tools:
            raise ConfigError(
                "the agent loop tool_agent needs tools: set "
                "actor_rollout_ref.rollout.multi_turn.function_tool_path to a Python file with functions that are "
                "marked with @function_tool"
            )

    async def run(self, sampling_params: SamplingParams, **row: Any) -> AgentLoopOutput:
        response, turns = self.respond(row), 0
        while response.tokens_left > 0:
            output = await response.sample(self.turn_sampling_params(sampling_params, turns))
            turns += 1
            if output.finish_reason != "stop" or turns == self.context.max_turns:
                break
            calls = self.parse_tool_calls(self.tokenizer.decode(output.token_ids, skip_special_tokens=True))
            if not calls or len(calls) > MAX_CALLS:
                break
            answers = await asyncio.gather(*(self._answer(call, row) for call in calls))
            contents = [self.text_of(answer) for answer in answers]
            if sum(len(text) for text, _ in contents) > MAX_ANSWER_CHARACTERS:
                break  # before the event loop waits for its tokens
            tokens = self.render_messages(calls, [text for text, _ in contents])
            encoded = [image for _, own in contents for image in own]
            if not response.observe(*images.with_images(tokens, encoded, self.context.processor)):
                break
        return response.output()

    def turn_sampling_params(self, sampling_params: SamplingParams, turn: int) -> SamplingParams:
        """Return the sampling of turn number `turn`. Override it where a format has its own end of a turn."""
        return sampling_params

    def parse_tool_calls(self, text: str) -> list[ToolCall]:
        """Return the calls in the policy's text."""
        calls, start = [], text.find(CALL_START)
        while start >= 0 and (end := text.find(CALL_END, start)) >= 0:
            calls.append(_call(text[start + len(CALL_START) : end].strip()))
            start = text.find(CALL_START, end)
        return calls

    def render_messages(self, calls: list[ToolCall], answers: list[str]) -> list[int]:
        """Return the tokens that answer these calls, with one placeholder per image.

        A turn for each, and the start of the policy's next turn.

        Only text that the chat template puts after the end of a conversation is used. Sampled tokens stay as they are.
        """
        before = [{"role": "user", "content": "."}, {"role": "assistant", "content": "."}]
        turns = [{"role": "tool", "content": answer} for answer in answers]
        options = {**self.context.template_options, "tokenize": False}
        head = self.tokenizer.apply_chat_template(before, **options)
        whole = self.tokenizer.apply_chat_template([*before, *turns], **options, add_generation_prompt=True)
        if not whole.startswith(head):
            raise ConfigError(
                "the chat template renders earlier turns differently once a tool answers; override `render_messages`"
            )
        # The policy's turn ended with its end token. Text that the template puts after that token comes first.
        end = (
            head.rindex(self.tokenizer.eos_token) + len(self.tokenizer.eos_token)
            if self.tokenizer.eos_token in head
            else len(head)
        )
        return self.tokenizer.encode(whole[end:], add_special_tokens=False)

    async def _answer(self, call: ToolCall, row: Mapping[str, Any]) -> Any:
        given = row_arguments(row, call.name)
        return call.error or await call_tool(dict(self.tools), call.name, call.arguments, given=given)


def _call(body: str) -> ToolCall:
    try:
        parsed = json.loads(body)
        name, arguments = parsed["name"], parsed.get("arguments", {})
        if not isinstance(name, str) or not isinstance(arguments, dict):
            raise TypeError("name must be text and arguments a JSON object")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        return ToolCall("", {}, error=f"Error: this is no tool call ({type(error).__name__}: {error})")
    return ToolCall(name, arguments)
