"""Items of OpenAI's Responses API as chat messages, and answers as items.

An item is a message, a function call, or the output of a function. Items of one turn of the policy become one chat
message: its text, and its calls. Pure functions.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from hybridrl.serving.openai.apis.base import joined_text
from hybridrl.serving.openai.parameters import RequestError, shorten
from hybridrl.serving.openai.responses import Choice

TEXT_PARTS = ("input_text", "output_text", "text")
Item = dict[str, Any]


def messages_of(given: Any) -> list[dict[str, Any]]:
    """Return the messages of `input`. Raises RequestError for anything that is no text, message, call or output."""
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    if not isinstance(given, list) or not given:
        raise RequestError("input is missing: a text, or a list of items", param="input")
    messages: list[dict[str, Any]] = []
    for item in given:
        _append(messages, item)
    return messages


def _append(messages: list[dict[str, Any]], item: Any) -> None:
    """Append an item; a call belongs to the message of the policy before it."""
    kind = item.get("type", "message") if isinstance(item, dict) else None
    if kind == "message" and isinstance(item.get("role"), str):
        content = joined_text(item.get("content"), TEXT_PARTS, param="input")
        messages.append({"role": item["role"], "content": content})
    elif kind == "function_call":
        if not messages or messages[-1]["role"] != "assistant":
            messages.append({"role": "assistant", "content": ""})
        function = {"name": item.get("name"), "arguments": item.get("arguments")}
        call = {"id": item.get("call_id"), "type": "function", "function": function}
        messages[-1]["tool_calls"] = [*messages[-1].get("tool_calls", ()), call]
    elif kind == "function_call_output":
        output = joined_text(item.get("output"), TEXT_PARTS, param="input")
        messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": output})
    else:
        raise RequestError(
            f"input: {shorten(item)} is not supported; items are messages, function_call and function_call_output",
            param="input",
        )


def chat_tools(tools: Any) -> Any:
    """Return the tools as a chat request has them. Raises RequestError for a tool that is no function."""
    if not isinstance(tools, list):
        return tools
    return [_chat_tool(tool) for tool in tools]


def _chat_tool(tool: Any) -> dict[str, Any]:
    if not isinstance(tool, dict) or tool.get("type") != "function" or not isinstance(tool.get("name"), str):
        raise RequestError(
            f'tools: {shorten(tool)} is not supported; give {{"type": "function", "name": ...}}', param="tools"
        )
    names = ("name", "description", "parameters")
    return {"type": "function", "function": {name: tool[name] for name in names if tool.get(name) is not None}}


def message_item(name: str, text: str, *, status: str) -> Item:
    """Return the text of an answer as an item. name: id of the answer."""
    return {
        "id": f"msg_{name}",
        "type": "message",
        "status": status,
        "role": "assistant",
        "content": [text_part(text)] if status != "in_progress" else [],
    }


def text_part(text: str) -> Item:
    """Return a text as the part of an item."""
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def call_items(name: str, calls: Sequence[Mapping[str, Any]]) -> list[Item]:
    """Return the calls of an answer as items."""
    return [
        {
            "id": f"fc_{name}_{number}",
            "type": "function_call",
            "status": "completed",
            "call_id": call["id"],
            "name": call["function"]["name"],
            "arguments": call["function"]["arguments"],
        }
        for number, call in enumerate(calls)
    ]


def output_items(name: str, choice: Choice) -> list[Item]:
    """Return a complete answer as items: its text, unless there are only calls, and its calls."""
    status = "incomplete" if choice.finish_reason == "length" else "completed"
    has_text = bool(choice.text) or not choice.tool_calls
    text = [message_item(name, choice.text, status=status)] if has_text else []
    return [*text, *call_items(name, choice.tool_calls)]
