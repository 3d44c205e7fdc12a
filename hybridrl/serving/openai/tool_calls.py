"""Tool calls in the policy's text: the formats in which models write them.

    format = detect_format(tokenizer)
    text, calls = format.parse(sampled_text)

A call that does not have its format stays in the text. Called by `responses`; the templates that show tools and calls
to a model are the tokenizer's.
"""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Call:
    """A call in the policy's text. arguments: JSON of an object."""

    name: str
    arguments: str


Parsed = tuple[str, list[Call]]  # the text without its calls, and the calls


@dataclass(frozen=True)
class ToolFormat:
    """How a family of models writes calls.

    Attributes:
        starts: Texts with which a call begins; what may be the beginning of one is not streamed.
        begins_text: Whether "{" begins a call at the start of a text.
        parse: Returns the text without its calls, and the calls.
    """

    starts: tuple[str, ...]
    begins_text: bool
    parse: Callable[[str], Parsed]

    def visible(self, text: str) -> str:
        """Return the start of an unfinished text that belongs to no call."""
        if self.begins_text and text.lstrip()[:1] in ("", "{"):
            return ""
        for start in self.starts:
            place = text.find(start)
            if place >= 0:
                text = text[:place]
            for length in range(min(len(start) - 1, len(text)), 0, -1):
                if text.endswith(start[:length]):
                    text = text[:-length]
                    break
        return text.rstrip()


def parse_hermes(text: str) -> Parsed:
    """Return the calls of Hermes and Qwen models: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`."""
    calls: list[Call] = []

    def take(block: re.Match[str]) -> str:
        call = _call_of(_json(block[1]), "arguments")
        calls.extend([call] if call else [])
        return "" if call else block[0]

    rest = re.sub(r"<tool_call>(.*?)</tool_call>", take, text, flags=re.DOTALL)
    return (rest.rstrip(), calls) if calls else (text, [])


def parse_llama3_json(text: str) -> Parsed:
    """Return the calls of Llama 3: the whole text is `{"name": ..., "parameters": {...}}`, several with `;`."""
    body = text.replace("<|python_tag|>", "", 1).strip()
    calls, place, decoder = [], 0, json.JSONDecoder()
    while place < len(body):
        try:
            value, end = decoder.raw_decode(body, place)
        except (ValueError, RecursionError):
            return text, []
        call = _call_of(value, "parameters") or _call_of(value, "arguments")
        if call is None:
            return text, []
        calls.append(call)
        place = end + len(re.match(r"[\s;]*", body[end:])[0])  # type: ignore[index]
    return ("", calls) if calls else (text, [])


def parse_mistral(text: str) -> Parsed:
    """Return the calls of Mistral: `[TOOL_CALLS][{"name": ..., "arguments": {...}}]`, or `[TOOL_CALLS]name{...}`."""
    content, *blocks = text.split("[TOOL_CALLS]")
    calls: list[Call] = []
    for block in blocks:
        found = _mistral_block(block.strip())
        if not found:
            return text, []
        calls += found
    return (content.rstrip(), calls) if calls else (text, [])


def _mistral_block(block: str) -> list[Call]:
    """Return the calls after one `[TOOL_CALLS]`; none if it is malformed."""
    if named := re.fullmatch(r"([\w.-]+)(?:\[CALL_ID\]\w+)?(?:\[ARGS\])?(\{.*\})", block, flags=re.DOTALL):
        call = _call_of({"name": named[1], "arguments": _json(named[2])}, "arguments")
        return [call] if call else []
    values = _json(block)
    calls = [_call_of(value, "arguments") for value in values] if isinstance(values, list) else []
    return [call for call in calls if call] if all(calls) else []


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _call_of(value: Any, key: str) -> Call | None:
    """Return the call that a JSON value describes; None if it describes none."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str) or not value["name"]:
        return None
    arguments = value.get(key, {})
    if not isinstance(arguments, dict) or value.keys() - {"name", "id", key}:
        return None
    return Call(value["name"], json.dumps(arguments, ensure_ascii=False))


FORMATS = {
    "hermes": ToolFormat(("<tool_call>",), False, parse_hermes),
    "llama3_json": ToolFormat(("<|python_tag|>",), True, parse_llama3_json),
    "mistral": ToolFormat(("[TOOL_CALLS]",), False, parse_mistral),
}


def detect_format(tokenizer: Any) -> ToolFormat:
    """Return the format that the tokenizer's chat template shows to the model; hermes where it shows none."""
    template = str(tokenizer.chat_template)
    if "[TOOL_CALLS]" in template:
        return FORMATS["mistral"]
    if "<tool_call>" not in template and ("<|python_tag|>" in template or '"parameters"' in template):
        return FORMATS["llama3_json"]
    return FORMATS["hermes"]
