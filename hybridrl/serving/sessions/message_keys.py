"""Keys of chat messages: which messages are the same although a client has written them again.

A client sends the whole conversation with every request, after its own framework has parsed and rebuilt it. Equal are
messages with the same role, text and tool calls. Not compared: white space around the text, the ids of calls, the order
and the spacing of their JSON arguments, and fields that a chat template seldom reads.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

END_OF_THOUGHT = "</think>"
TOOLS = "tools"  # role of the key that stands for the tools of a request


class MessageKey(NamedTuple):
    """What is compared of a message.

    Attributes:
        role: Of the message.
        digest: Of its text without a thought, and of its tool calls.
        thought: Digest of the text up to the last `</think>`; "" without one.
        with_stop: As `digest`, of the text with the stop text that ended it; "" if none did.
    """

    role: str
    digest: str
    thought: str = ""
    with_stop: str = ""

    @property
    def is_assistant(self) -> bool:
        return self.role == "assistant"

    def repeats(self, recorded: "MessageKey") -> bool:
        """Return whether a client's message is the recorded one.

        Clients may leave out the thought, and may put the stop text back.
        """
        is_same = self.role == recorded.role and self.digest in (recorded.digest, recorded.with_stop)
        return is_same and self.thought in ("", recorded.thought)


def conversation_keys(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> list[MessageKey]:
    """Return the keys of a request: one for its tools, then one per message (text only)."""
    return [MessageKey(TOOLS, _digest(_canonical(list(tools)))), *map(message_key, messages)]


def message_key(message: Mapping[str, Any], *, stop_text: str | None = None) -> MessageKey:
    """Return the key of a message whose content is a text, or None beside tool calls.

    Args:
        message: As a client sends it, or gets it; `images` are those of its text, encoded.
        stop_text: That ended it, and is not in its text.
    """
    thought, found, text = (message.get("content") or "").rpartition(END_OF_THOUGHT)
    calls = [
        (call["function"]["name"], _canonical(parsed_arguments(call["function"].get("arguments"))))
        for call in message.get("tool_calls") or ()
    ]
    images = [hashlib.blake2b(image, digest_size=16).hexdigest() for image in message.get("images", ())]
    texts = [text] if stop_text is None else [text, text + stop_text]
    digest, *with_stop = (_digest(_canonical([one.strip(), calls, message.get("name"), *images])) for one in texts)
    return MessageKey(message["role"], digest, _digest(thought.strip()) if found else "", *with_stop)


def call_ids(message: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the ids of a message's tool calls."""
    return tuple(str(call.get("id")) for call in message.get("tool_calls") or ())


def parsed_arguments(arguments: Any) -> Any:
    """Return the arguments of a call as chat templates expect them, as an object if possible."""
    if not isinstance(arguments, str):
        return {} if arguments is None else arguments
    try:
        parsed = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    return parsed if isinstance(parsed, dict) else arguments


def _canonical(value: Any) -> str:
    return json.dumps(value, sort_keys=True, ensure_ascii=False, separators=(",", ":"))


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()
