"""`/v1/responses`: OpenAI's Responses API, for text and functions.

An answer that is stored can be continued by its id (`previous_response_id`). The store has the messages of the newest
answers, and is of this process alone.
"""

import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

from hybridrl.serving.openai.apis.base import About, oldest_version
from hybridrl.serving.openai.apis.responses_items import chat_tools, messages_of, output_items
from hybridrl.serving.openai.apis.responses_stream import ResponsesWriter
from hybridrl.serving.openai.parameters import (
    OWN_SAMPLING,
    ParameterNames,
    RequestError,
    automatic_choice,
    get_typed,
    no_format,
    shorten,
)
from hybridrl.serving.openai.requests import CompletionRequest
from hybridrl.serving.openai.responses import Choice, error_body

MAX_STORED = 1024  # answers
MAX_STORED_CHARACTERS = 64_000_000  # of all stored answers, each with its whole conversation
PASSED_ON = ("model", "temperature", "top_p", "tool_choice", "parallel_tool_calls", "stream", *OWN_SAMPLING)
NAMES = ParameterNames(
    supported={*PASSED_ON, "input", "instructions", "tools", "max_output_tokens", "previous_response_id", "store"},
    unsupported={
        "background": (None, False),
        "context_management": (None, []),
        "conversation": (None,),
        "include": (None, []),
        "max_tool_calls": (None,),
        "moderation": (None,),
        "prompt": (None,),
        "reasoning": (None, {}),
        "text": (None, {}, {"format": {"type": "text"}}),
        "top_logprobs": (None, 0),
        "truncation": (None, "disabled"),
    },
    ignored={
        *("user", "metadata", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"),
        "stream_options",
    },
    demands={"tool_choice": automatic_choice, "text": no_format},
)
Messages = Sequence[Mapping[str, Any]]


class ResponsesApi:
    """The API with its stored answers."""

    kind, id_prefix, names = "chat", "resp_", NAMES
    renamed = {"max_tokens": "max_output_tokens", "messages": "input"}

    def __init__(self) -> None:
        self._stored: OrderedDict[str, tuple[Messages, int]] = OrderedDict()  # messages and their characters
        self._num_characters = 0
        self._lock = threading.Lock()

    def to_chat(self, body: dict[str, Any]) -> dict[str, Any]:
        get_typed(body, "store", bool, True)
        instructions = get_typed(body, "instructions", str, None)
        system = [] if instructions is None else [{"role": "system", "content": instructions}]
        messages = [*system, *self._earlier(body), *messages_of(body.get("input"))]
        chat = {name: body[name] for name in PASSED_ON if name in body} | {"messages": messages}
        if (limit := get_typed(body, "max_output_tokens", int, None)) is not None:
            chat["max_tokens"] = limit
        return chat | ({"tools": chat_tools(body["tools"])} if body.get("tools") else {})

    def _earlier(self, body: dict[str, Any]) -> Messages:
        """Return the messages that `previous_response_id` names, without instructions."""
        name = get_typed(body, "previous_response_id", str, None)
        if name is None:
            return []
        with self._lock:
            if name not in self._stored:
                raise RequestError(
                    f"previous_response_id={shorten(name)}: there is no such answer, or it was not stored; the newest "
                    f"{MAX_STORED} are. Send the whole conversation as input",
                    param="previous_response_id",
                    code="previous_response_not_found",
                )
            self._stored.move_to_end(name)
            return self._stored[name][0]

    def answered(self, completion: CompletionRequest, choice: Choice) -> None:
        """Store the conversation, unless the request has `store=false`."""
        given = completion.given
        if given.get("store") is False:
            return
        num_instructions = 0 if given.get("instructions") is None else 1
        messages = [*completion.messages[num_instructions:], choice.message]
        size = sum(len(message.get("content") or "") for message in messages)
        with self._lock:
            self._stored[completion.name] = (messages, size)
            self._num_characters += size
            while len(self._stored) > MAX_STORED or self._num_characters > MAX_STORED_CHARACTERS:
                _, (_, dropped) = self._stored.popitem(last=False)
                self._num_characters -= dropped

    def answer(self, completion: CompletionRequest, choices: list[Choice], about: About) -> dict[str, Any]:
        [choice] = choices
        return response_body(completion, choice, about, output=output_items(completion.name, choice))

    def writer(self, completion: CompletionRequest, choices: list[Choice], about: About) -> ResponsesWriter:
        [choice] = choices
        return ResponsesWriter(completion, choice, lambda **state: response_body(completion, choice, about, **state))

    def error_body(self, error: RequestError) -> dict[str, Any]:
        return error_body(error)


def response_body(
    completion: CompletionRequest,
    choice: Choice,
    about: About,
    *,
    output: list[dict[str, Any]],
    status: str | None = None,
    error: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Return the whole answer, or what there is of it so far.

    Args:
        completion: The request.
        choice: Its response.
        about: Names the answer.
        output: Items.
        status: Of the answer; None: it is complete.
        error: Of an answer that failed.
    """
    given, is_cut = completion.given, choice.finish_reason == "length"
    return {
        "id": about.name,
        "object": "response",
        "created_at": about.created,
        "status": status or ("incomplete" if is_cut else "completed"),
        "error": error,
        "incomplete_details": {"reason": "max_output_tokens"} if is_cut and status is None else None,
        "instructions": given.get("instructions"),
        "max_output_tokens": given.get("max_output_tokens"),
        "metadata": given.get("metadata") or {},
        "model": about.model,
        "output": output,
        "parallel_tool_calls": not completion.has_one_call,
        "previous_response_id": given.get("previous_response_id"),
        "reasoning": {"effort": None, "summary": None},
        "store": given.get("store") is not False,
        "temperature": completion.requests[0].sampling.temperature if completion.requests[0].sampling.do_sample else 0,
        "text": {"format": {"type": "text"}},
        "tool_choice": given.get("tool_choice") or "auto",
        "tools": given.get("tools") or [],
        "top_p": completion.requests[0].sampling.top_p,
        "truncation": "disabled",
        "usage": None if status else usage(choice),
        "user": given.get("user"),
        "weights_version": oldest_version([choice]),
    }


def usage(choice: Choice) -> dict[str, Any]:
    """Return the token counts."""
    read, sampled = len(choice.request.prompt_ids), len(choice.token_ids)
    return {
        "input_tokens": read,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": sampled,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": read + sampled,
    }
