"""Render messages as tokens: a whole conversation, or only what follows the policy's last answer.

A sampled answer is never tokenized again. Its text would not give the same tokens, and templates change earlier
answers: they strip white space and drop thoughts. `text_after_answer` therefore renders the conversation with a mark
in place of the answer, and takes the text that the template puts after the turn with the mark.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from hybridrl.serving.sessions.message_keys import parsed_arguments

MARK = "qzAnswerOfThePolicyqz"  # letters only: templates and JSON leave them as they are

Messages = Sequence[Mapping[str, Any]]
NO_OPTIONS: Mapping[str, Any] = {}


def render(tokenizer: Any, messages: Messages, tools: Messages, *, options: Mapping[str, Any] = NO_OPTIONS) -> str:
    """Return the text of a conversation and the start of the next answer. Raises what the template raises.

    Args:
        tokenizer: With a chat template.
        messages: The whole conversation.
        tools: Of the request.
        options: For the template (`data.apply_chat_template_kwargs`).
    """
    readable = [_for_template(message) for message in messages]
    given = {**options, "tokenize": False, "add_generation_prompt": True} | ({"tools": list(tools)} if tools else {})
    return tokenizer.apply_chat_template(readable, **given)


def encode(tokenizer: Any, text: str) -> list[int]:
    """Return the tokens of rendered text, which has its special tokens already."""
    return tokenizer.encode(text, add_special_tokens=False)


def text_after_answer(
    tokenizer: Any,
    messages: Messages,
    tools: Messages,
    *,
    answer: int,
    sampled: Sequence[int],
    options: Mapping[str, Any] = NO_OPTIONS,
) -> str | None:
    """Return the text that the template puts between the tokens of an answer and the policy's next one.

    It begins with the end of the turn if the policy did not sample that itself.

    Args:
        tokenizer: With a chat template.
        messages: The whole conversation.
        tools: Of the request.
        answer: Place of the answer among the messages; those after it are new.
        sampled: Tokens of the answer.
        options: For the template.

    Returns:
        None if the end of the turn cannot be found in the template's text.
    """
    mark = MARK
    while any(mark in str(message) for message in messages):
        mark += "z"
    marked = [*messages]
    marked[answer] = _with_mark(messages[answer], mark)
    whole = render(tokenizer, marked, tools, options=options)
    if mark not in whole:
        return None
    tail = whole[whole.rindex(mark) + len(mark) :]
    sampled_end = end_text(tokenizer, sampled)
    ends = [text for text in {tokenizer.eos_token, sampled_end} if text and text in tail]
    if not ends:
        return None if marked[answer].get("tool_calls") else tail
    end = min(ends, key=tail.index)
    at = tail.index(end)
    return tail[at + len(end) :] if sampled_end is not None else tail[at:]


def end_text(tokenizer: Any, sampled: Sequence[int]) -> str | None:
    """Return the text of the special token that an answer ends with; None without one."""
    ends = {tokenizer.eos_token_id, *tokenizer.all_special_ids}
    return tokenizer.convert_ids_to_tokens(sampled[-1]) if sampled and sampled[-1] in ends else None


def _with_mark(message: Mapping[str, Any], mark: str) -> dict[str, Any]:
    """Return an answer that ends with the mark: templates write calls after the text."""
    calls = [*(message.get("tool_calls") or ())]
    if not calls:
        return {"role": message["role"], "content": mark}
    last = calls[-1]
    calls[-1] = {**last, "function": {**last["function"], "arguments": {"a": mark}}}
    return {**message, "content": "", "tool_calls": calls}


def _for_template(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message as templates expect it: text that is no null, and arguments as objects."""
    readable = {key: value for key, value in message.items() if key != "images"}
    readable["content"] = message.get("content") or ""
    if message.get("tool_calls"):
        readable["tool_calls"] = [
            {**call, "function": {**call["function"], "arguments": parsed_arguments(call["function"].get("arguments"))}}
            for call in message["tool_calls"]
        ]
    return readable
