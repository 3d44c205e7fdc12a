"""The messages and tools of a chat request, checked before a chat template sees them.

Called by `requests` and `apis`, in a thread. What a template cannot take is rejected with the parameter's name.
"""

from typing import Any

from hybridrl.errors import DataError
from hybridrl.serving.openai.parameters import RequestError, ServedModel, get_typed, shorten
from hybridrl.workers.images import content_text

MAX_TOOLS = 128
IMAGE_PARTS = ("image", "image_url", "input_image")


def read_messages(body: dict, policy: ServedModel) -> list[dict]:
    """Return the messages, each with its content as one text. Raises RequestError for what is no message."""
    messages = get_typed(body, "messages", list, None)
    if not messages:
        raise RequestError("messages is missing: a list of messages with role and content", param="messages")
    if not getattr(policy.tokenizer, "chat_template", None):
        raise RequestError("this model's tokenizer has no chat template; use /v1/completions", param="messages")
    return [_readable(message, policy) for message in messages]


def read_tools(body: dict, policy: ServedModel) -> list[dict]:
    """Return the tools, in OpenAI's format.

    Raises:
        RequestError: They have another format, the chat template takes none, or a call is demanded: the engine samples
            freely.
    """
    tools = get_typed(body, "tools", list, [])
    choice = body.get("tool_choice")
    if choice not in (None, "none", "auto"):
        raise RequestError(
            f"tool_choice={shorten(choice)}: the policy samples freely and cannot be made to call a tool; use auto",
            param="tool_choice",
        )
    if not tools:
        return []
    if len(tools) > MAX_TOOLS:
        raise RequestError(f"tools: {len(tools)} tools; at most {MAX_TOOLS}", param="tools")
    for tool in tools:
        function = tool.get("function") if isinstance(tool, dict) and tool.get("type") == "function" else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise RequestError(
                f'tools: {shorten(tool)} is no tool; give {{"type": "function", "function": {{"name": ...}}}}',
                param="tools",
            )
    if "tools" not in str(policy.tokenizer.chat_template):
        raise RequestError(
            "tools: this model's chat template shows no tools to the model; describe them in a message", param="tools"
        )
    return tools


def wants_calls(body: dict) -> bool:
    """Return whether calls in the answer are to be returned as such. Call after `read_tools`."""
    return bool(body.get("tools")) and body.get("tool_choice") != "none"


def text_or_parts(content: Any, kinds: tuple[str, ...], *, param: str) -> str | list[Any]:
    """Return another API's content as a chat's: text, or parts if some are images.

    Args:
        content: A text, or a list of parts.
        kinds: Types of parts that have a text.
        param: Of the request, for the error.
    """
    images = [part for part in content if _is_image(part)] if isinstance(content, list) else []
    if not images:
        return joined_text(content, kinds, param=param)
    texts = {
        True: lambda part: part,
        False: lambda part: {"type": "text", "text": joined_text([part], kinds, param=param)},
    }
    return [texts[_is_image(part)](part) for part in content]


def _is_image(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") in IMAGE_PARTS


def joined_text(parts: Any, kinds: tuple[str, ...], *, param: str) -> str:
    """Return a content as one text. Raises RequestError if it is no text, and no parts of these kinds.

    Args:
        parts: A text, or a list of parts.
        kinds: Types of parts that have a text.
        param: Of the request, for the error.
    """
    if isinstance(parts, str):
        return parts
    if not isinstance(parts, list):
        what = f"content={shorten(parts)} must be a text, or a list of parts with a type"
        raise RequestError(f"{param}: {what}", param=param)
    for part in parts:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in kinds or not isinstance(part.get("text"), str):
            raise RequestError(
                f"{param}: a part of the type {kind!r} is not supported; this model takes text only "
                f"({', '.join(kinds)})",
                param=param,
            )
    return "".join(part["text"] for part in parts)


def _readable(message: Any, policy: ServedModel) -> dict:
    """Return the message with its content as one text.

    Its images are beside it, encoded.
    """
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise RequestError(
            f"messages: {shorten(message)} is not a message; give an object with role and content", param="messages"
        )
    content = message.get("content")
    if content is None and message["role"] == "assistant":
        content = ""
    text, images = _content(content, policy, role=message["role"])
    readable = {key: value for key, value in message.items() if key not in ("tool_calls", "images")} | {"content": text}
    readable |= {"images": images} if images else {}
    if readable["role"] == "developer":  # OpenAI's later name, which chat templates do not know
        readable["role"] = "system"
    calls = message.get("tool_calls")
    return readable if not calls else readable | {"tool_calls": _checked_calls(calls)}


def _content(content: Any, policy: ServedModel, *, role: str) -> tuple[str, list[bytes]]:
    """Return a content as one text, and its encoded images."""
    if policy.processor is None or not (isinstance(content, list) and any(map(_is_image, content))):
        return joined_text(content, ("text",), param="messages"), []
    if role == "assistant":
        raise RequestError("messages: an answer has no images; they are the user's or a tool's", param="messages")
    try:
        return content_text(text_or_parts(content, ("text",), param="messages"), policy.processor)
    except DataError as error:
        raise RequestError(str(error), param="messages") from error


def _checked_calls(calls: Any) -> list[dict]:
    for call in calls if isinstance(calls, list) else [calls]:
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise RequestError(f"messages: {shorten(call)} is no tool call", param="messages")
        if not isinstance(function.get("arguments"), str | dict | None):
            raise RequestError(
                f"messages: arguments={shorten(function['arguments'])} of a tool call must be a text", param="messages"
            )
    return calls
