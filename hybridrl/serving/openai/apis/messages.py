"""`/v1/messages`: Anthropic's Messages API, for text and tools.

A message has blocks: texts, calls of the policy (`tool_use`), and their results (`tool_result`), which a user's message
brings. Calls and texts of one message become one chat message, each result one of the role tool.
"""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from hybridrl.serving.openai.apis import api
from hybridrl.serving.openai.apis.api import Api, Event, StreamWriter, oldest_version
from hybridrl.serving.openai.chat import joined_text, text_or_parts
from hybridrl.serving.openai.choice import Choice
from hybridrl.serving.openai.parameters import OWN_SAMPLING, ParameterNames, RequestError, get_typed, no_format, shorten
from hybridrl.serving.sessions.message_keys import parsed_arguments


def automatic_type(choice: Any) -> Any:
    """Return a `tool_choice` without a demand for a call; it may say how many calls there are."""
    return {**choice, "type": "auto"} if isinstance(choice, dict) and choice.get("type") in ("any", "tool") else choice


DEMANDS = {"tool_choice": automatic_type, "output_config": no_format, "output_format": no_format}
PASSED_ON = ("model", "max_tokens", "temperature", "top_p", "stream", *OWN_SAMPLING)
NAMES = ParameterNames(
    supported={*PASSED_ON, "messages", "system", "tools", "tool_choice", "stop_sequences"},
    unsupported={
        "container": (None,),
        "context_management": (None,),
        "diagnostics": (None,),
        "mcp_servers": (None, []),
        "output_config": (None, {}),
        "output_format": (None,),
        "speed": (None, "standard"),
        "thinking": (None, {"type": "disabled"}),
    },
    ignored={"metadata", "service_tier", "cache_control", "inference_geo", "user_profile_id", "workspace_id"},
    demands=DEMANDS,
)
COUNTED_NAMES = ParameterNames(
    {"model", "messages", "system", "tools", "tool_choice"}, NAMES.unsupported, NAMES.ignored, DEMANDS
)
ERROR_TYPES = api.ERROR_TYPES | {404: "not_found_error", 413: "request_too_large", 503: "overloaded_error"}
STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


class MessagesWriter(StreamWriter):
    """Events of a streamed answer: a block for its text, and one for each call."""

    has_text = False

    def begin(self) -> Iterator[Event]:
        yield _event("message_start", message=message_body(self.choice, content=[]))

    def add(self, choice: Choice, content: Mapping[str, Any]) -> Iterator[Event]:
        added = content["delta"]["content"]
        if not added:
            return
        if not self.has_text:
            self.has_text = True
            yield _event("content_block_start", index=0, content_block={"type": "text", "text": ""})
        yield _event("content_block_delta", index=0, delta={"type": "text_delta", "text": added})

    def end(self) -> Iterator[Event]:
        if self.has_text:
            yield _event("content_block_stop", index=0)
        for index, call in enumerate(self.choice.tool_calls, start=int(self.has_text)):
            yield _event("content_block_start", index=index, content_block=_call_block(call) | {"input": {}})
            delta = {"type": "input_json_delta", "partial_json": call["function"]["arguments"]}
            yield _event("content_block_delta", index=index, delta=delta)
            yield _event("content_block_stop", index=index)
        usage = {"output_tokens": len(self.choice.token_ids)}
        version = oldest_version([self.choice])
        yield _event("message_delta", delta=stop_of(self.choice), usage=usage, weights_version=version)
        yield _event("message_stop")

    def fail(self, error: RequestError) -> Iterator[Event]:
        yield Event(MessagesApi.error_body(error), "error")


class MessagesApi(Api):
    """The API. names: its parameters; those of counting tokens are fewer."""

    id_prefix, renamed, writer = "msg_", {"stop": "stop_sequences"}, MessagesWriter

    def __init__(self, names: ParameterNames = NAMES):
        self.names = names

    def to_chat(self, body: dict[str, Any]) -> dict[str, Any]:
        if "max_tokens" in self.names.supported and body.get("max_tokens") is None:
            raise RequestError("max_tokens is missing; it is required", param="max_tokens")
        text = None if body.get("system") is None else joined_text(body["system"], ("text",), param="system")
        system = [] if text is None else [{"role": "system", "content": text}]
        given = get_typed(body, "messages", list, [])
        messages = [message for one in given for message in _messages_of(one)]
        if messages and messages[-1]["role"] == "assistant":
            raise RequestError("messages: the last one is the assistant's; an answer cannot be begun", param="messages")
        chat = {name: body[name] for name in PASSED_ON if name in body} | {"messages": [*system, *messages]}
        chat |= {"stop": body["stop_sequences"]} if body.get("stop_sequences") else {}
        return chat | _tools_of(body)

    def answer(self, choices: list[Choice]) -> dict[str, Any]:
        [choice] = choices
        text = [{"type": "text", "text": choice.text}] if choice.text else []
        return message_body(choice, content=[*text, *map(_call_block, choice.tool_calls)])

    @staticmethod
    def error_body(error: RequestError) -> dict[str, Any]:
        kind = ERROR_TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
        return {"type": "error", "error": {"type": kind, "message": error.message}}


def message_body(choice: Choice, *, content: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the answer with this content."""
    return {
        "id": choice.completion.name,
        "type": "message",
        "role": "assistant",
        "model": choice.completion.policy.name,
        "content": content,
        **stop_of(choice),
        "usage": {
            "input_tokens": len(choice.request.prompt_ids),
            "output_tokens": len(choice.token_ids),
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 0,
        },
        "weights_version": oldest_version([choice]),
    }


def stop_of(choice: Choice) -> dict[str, str | None]:
    """Return why an answer ended; nulls before its end."""
    if choice.finish_reason == "stop" and choice.stop_text is not None:
        return {"stop_reason": "stop_sequence", "stop_sequence": choice.stop_text}
    return {"stop_reason": STOP_REASONS.get(choice.finish_reason or ""), "stop_sequence": None}


def _event(name: str, **data: Any) -> Event:
    return Event({"type": name, **data}, name)


def _call_block(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call["function"]
    arguments = parsed_arguments(function["arguments"])
    return {"type": "tool_use", "id": call["id"], "name": function["name"], "input": arguments}


def _messages_of(message: Any) -> list[dict[str, Any]]:
    """Return the chat messages of one message: the results that it brings, and then its own text and calls."""
    role = message.get("role") if isinstance(message, dict) else None
    if role not in ("user", "assistant", "system"):
        raise RequestError(
            f"messages: {shorten(message)} is not a message; give an object with the role user or assistant",
            param="messages",
        )
    content = message.get("content")
    blocks = content if isinstance(content, list) else []
    special = {"assistant": "tool_use", "user": "tool_result"}.get(role)
    chosen = [block for block in blocks if isinstance(block, dict) and block.get("type") == special]
    texts = [block for block in blocks if block not in chosen]
    text = text_or_parts(texts if isinstance(content, list) else content, ("text",), param="messages")
    if role == "assistant":
        calls = {"tool_calls": [_chat_call(block) for block in chosen]} if chosen else {}
        return [{"role": role, "content": text} | calls]
    own = [{"role": role, "content": text}] if text or not chosen else []
    return [*(_result(block) for block in chosen), *own]


def _chat_call(block: Mapping[str, Any]) -> dict[str, Any]:
    if not isinstance(block.get("input"), dict):
        raise RequestError(f"messages: input of {shorten(block)} must be an object", param="messages")
    function = {"name": block.get("name"), "arguments": json.dumps(block["input"], ensure_ascii=False)}
    return {"id": block.get("id"), "type": "function", "function": function}


def _result(block: Mapping[str, Any]) -> dict[str, Any]:
    content = block.get("content")
    text = "" if content is None else text_or_parts(content, ("text",), param="messages")
    return {"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": text}


def _tools_of(body: dict[str, Any]) -> dict[str, Any]:
    """Return the parameters of a chat request about tools."""
    choice = get_typed(body, "tool_choice", dict, {"type": "auto"})
    tools = [_chat_tool(tool) for tool in get_typed(body, "tools", list, [])]
    is_parallel = not choice.get("disable_parallel_tool_use", False)
    return {"tools": tools, "tool_choice": choice.get("type", ""), "parallel_tool_calls": is_parallel}


def _chat_tool(tool: Any) -> dict[str, Any]:
    is_own = isinstance(tool, dict) and tool.get("type") in (None, "custom") and isinstance(tool.get("name"), str)
    if not is_own or not isinstance(tool.get("input_schema"), dict):
        raise RequestError(
            f'tools: {shorten(tool)} is not supported; give {{"name": ..., "input_schema": {{...}}}}', param="tools"
        )
    described = {"description": tool["description"]} if tool.get("description") else {}
    return {"type": "function", "function": {"name": tool["name"], **described, "parameters": tool["input_schema"]}}
