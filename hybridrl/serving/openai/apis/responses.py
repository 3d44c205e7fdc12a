"""`/v1/responses`: OpenAI's Responses API, for text and functions.

An item is a message, a function call, or the output of a function. Items of one turn of the policy become one chat
message: its text, and its calls. An answer that is stored can be continued by its id (`previous_response_id`). The
store has the messages of the newest answers, and is of this process alone.
"""

import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hybridrl.serving.openai import parameters
from hybridrl.serving.openai.apis.api import Api, Event, StreamWriter, oldest_version
from hybridrl.serving.openai.chat import text_or_parts
from hybridrl.serving.openai.choice import Choice

MAX_STORED = 1024  # answers
MAX_STORED_CHARACTERS = 64_000_000  # of all stored answers, each with its whole conversation
PASSED_ON = ("model", "temperature", "top_p", "tool_choice", "parallel_tool_calls", "stream", *parameters.OWN_SAMPLING)
NAMES = parameters.ParameterNames(
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
    demands={"tool_choice": parameters.automatic_choice, "text": parameters.no_format},
)
TEXT_PARTS = ("input_text", "output_text", "text")
Messages = Sequence[Mapping[str, Any]]
Item = dict[str, Any]


class ResponsesWriter(StreamWriter):
    """The events of a streamed answer, numbered in their order.

    created, in_progress, then for the text: output_item.added, content_part.added, output_text.delta ..., and their
    ends; for each call: output_item.added, function_call_arguments.delta and .done, output_item.done; then completed,
    incomplete, or failed.
    """

    def __init__(self, choices: list[Choice]):
        super().__init__(choices)
        self._name, self._number = self.completion.name, 0
        self._text: str | None = None  # sent so far; None: the item of the text has not begun
        self._items: list[Item] = []  # complete ones

    def begin(self) -> Iterator[Event]:
        for state in ("created", "in_progress"):
            yield self._event(state, response=response_body(self.choice, output=[], status="in_progress"))

    def add(self, choice: Choice, content: Mapping[str, Any]) -> Iterator[Event]:
        added = content["delta"]["content"]
        if added:
            yield from self._begin_text()
            self._text = (self._text or "") + added
            yield self._event("output_text.delta", **self._place, delta=added, logprobs=[])

    def end(self) -> Iterator[Event]:
        if not self.choice.tool_calls:
            yield from self._begin_text()
        yield from self._end_text()
        for item in call_items(self._name, self.choice.tool_calls):
            yield from self._call(item)
        yield self._event(end_status(self.choice), response=response_body(self.choice, output=self._items))

    def fail(self, error: parameters.RequestError) -> Iterator[Event]:
        about = {"code": "server_error", "message": error.message}
        yield self._event(
            "failed", response=response_body(self.choice, output=self._items, status="failed", error=about)
        )

    @property
    def _place(self) -> dict[str, Any]:
        return {"item_id": f"msg_{self._name}", "output_index": 0, "content_index": 0}

    def _begin_text(self) -> Iterator[Event]:
        if self._text is not None:
            return
        self._text = ""
        item = message_item(self._name, "", status="in_progress")
        yield self._event("output_item.added", output_index=0, item=item)
        yield self._event("content_part.added", **self._place, part=text_part(""))

    def _end_text(self) -> Iterator[Event]:
        if self._text is None:
            return
        item = message_item(self._name, self._text, status=end_status(self.choice))
        yield self._event("output_text.done", **self._place, text=self._text, logprobs=[])
        yield self._event("content_part.done", **self._place, part=text_part(self._text))
        yield self._event("output_item.done", output_index=0, item=item)
        self._items.append(item)

    def _call(self, item: Item) -> Iterator[Event]:
        place = {"item_id": item["id"], "output_index": len(self._items)}
        begun = item | {"status": "in_progress", "arguments": ""}
        yield self._event("output_item.added", output_index=place["output_index"], item=begun)
        yield self._event("function_call_arguments.delta", **place, delta=item["arguments"])
        done = {"name": item["name"], "arguments": item["arguments"]}
        yield self._event("function_call_arguments.done", **place, **done)
        yield self._event("output_item.done", output_index=place["output_index"], item=item)
        self._items.append(item)

    def _event(self, kind: str, **data: Any) -> Event:
        number, self._number = self._number, self._number + 1
        name = f"response.{kind}"
        return Event({"type": name, "sequence_number": number, **data}, name)


class ResponsesApi(Api):
    """The API with its stored answers."""

    id_prefix, names, writer = "resp_", NAMES, ResponsesWriter
    renamed = {"max_tokens": "max_output_tokens", "messages": "input"}

    def __init__(self) -> None:
        self._stored: OrderedDict[str, tuple[Messages, int]] = OrderedDict()  # messages and their characters
        self._num_characters = 0
        self._lock = threading.Lock()

    def to_chat(self, body: dict[str, Any]) -> dict[str, Any]:
        parameters.get_typed(body, "store", bool, True)
        instructions = parameters.get_typed(body, "instructions", str, None)
        system = [] if instructions is None else [{"role": "system", "content": instructions}]
        messages = [*system, *self._earlier(body), *messages_of(body.get("input"))]
        chat = {name: body[name] for name in PASSED_ON if name in body} | {"messages": messages}
        if (limit := parameters.get_typed(body, "max_output_tokens", int, None)) is not None:
            chat["max_tokens"] = limit
        return chat | ({"tools": chat_tools(body["tools"])} if body.get("tools") else {})

    def _earlier(self, body: dict[str, Any]) -> Messages:
        """Return the messages that `previous_response_id` names, without instructions."""
        name = parameters.get_typed(body, "previous_response_id", str, None)
        if name is None:
            return []
        with self._lock:
            if name not in self._stored:
                raise parameters.RequestError(
                    f"previous_response_id={parameters.shorten(name)}: there is no such answer, or it was not stored; "
                    f"the newest {MAX_STORED} are. Send the whole conversation as input",
                    param="previous_response_id",
                    code="previous_response_not_found",
                )
            self._stored.move_to_end(name)
            return self._stored[name][0]

    def answered(self, choice: Choice) -> None:
        """Store the conversation, unless the request has `store=false`."""
        completion, given = choice.completion, choice.completion.given
        if given.get("store") is False:
            return
        num_instructions = 0 if given.get("instructions") is None else 1
        messages = [*completion.messages[num_instructions:], choice.message]
        size = sum(len(str(message)) for message in messages)  # its calls, too
        with self._lock:
            self._stored[completion.name] = (messages, size)
            self._num_characters += size
            while len(self._stored) > MAX_STORED or self._num_characters > MAX_STORED_CHARACTERS:
                _, (_, dropped) = self._stored.popitem(last=False)
                self._num_characters -= dropped

    def answer(self, choices: list[Choice]) -> dict[str, Any]:
        [choice] = choices
        return response_body(choice, output=output_items(choice))


def response_body(
    choice: Choice, *, output: list[Item], status: str | None = None, error: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Return the whole answer, or what there is of it so far.

    Args:
        choice: The response.
        output: Items.
        status: Of the answer; None: it is complete.
        error: Of an answer that failed.
    """
    completion, sampling = choice.completion, choice.request.sampling
    given, end = completion.given, end_status(choice)
    return {
        "id": completion.name,
        "object": "response",
        "created_at": completion.created,
        "status": status or end,
        "error": error,
        "incomplete_details": {"reason": "max_output_tokens"} if not status and end == "incomplete" else None,
        "instructions": given.get("instructions"),
        "max_output_tokens": given.get("max_output_tokens"),
        "metadata": given.get("metadata") or {},
        "model": completion.policy.name,
        "output": output,
        "parallel_tool_calls": not completion.has_one_call,
        "previous_response_id": given.get("previous_response_id"),
        "reasoning": {"effort": None, "summary": None},
        "store": given.get("store") is not False,
        "temperature": sampling.temperature if sampling.do_sample else 0,
        "text": {"format": {"type": "text"}},
        "tool_choice": given.get("tool_choice") or "auto",
        "tools": given.get("tools") or [],
        "top_p": sampling.top_p,
        "truncation": "disabled",
        "usage": None if status else usage(choice),
        "user": given.get("user"),
        "weights_version": oldest_version([choice]),
    }


def end_status(choice: Choice) -> str:
    """Return the status of an answer at its end."""
    return "incomplete" if choice.finish_reason == "length" else "completed"


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


def messages_of(given: Any) -> list[dict[str, Any]]:
    """Return the messages of `input`. Raises RequestError for anything that is no text, message, call or output."""
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    if not isinstance(given, list) or not given:
        raise parameters.RequestError("input is missing: a text, or a list of items", param="input")
    messages: list[dict[str, Any]] = []
    for item in given:
        _append(messages, item)
    return messages


def _append(messages: list[dict[str, Any]], item: Any) -> None:
    """Append an item; a call belongs to the message of the policy before it."""
    kind = item.get("type", "message") if isinstance(item, dict) else None
    if kind == "message" and isinstance(item.get("role"), str):
        content = text_or_parts(item.get("content"), TEXT_PARTS, param="input")
        messages.append({"role": item["role"], "content": content})
    elif kind == "function_call":
        if not messages or messages[-1]["role"] != "assistant":
            messages.append({"role": "assistant", "content": ""})
        function = {"name": item.get("name"), "arguments": item.get("arguments")}
        call = {"id": item.get("call_id"), "type": "function", "function": function}
        messages[-1]["tool_calls"] = [*messages[-1].get("tool_calls", ()), call]
    elif kind == "function_call_output":
        output = text_or_parts(item.get("output"), TEXT_PARTS, param="input")
        messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": output})
    else:
        raise parameters.RequestError(
            f"input: {parameters.shorten(item)} is not supported; items are messages, function_call and "
            "function_call_output",
            param="input",
        )


def chat_tools(tools: Any) -> Any:
    """Return the tools as a chat request has them. Raises RequestError for a tool that is no function."""
    if not isinstance(tools, list):
        return tools
    return [_chat_tool(tool) for tool in tools]


def _chat_tool(tool: Any) -> dict[str, Any]:
    if not isinstance(tool, dict) or tool.get("type") != "function" or not isinstance(tool.get("name"), str):
        raise parameters.RequestError(
            f'tools: {parameters.shorten(tool)} is not supported; give {{"type": "function", "name": ...}}',
            param="tools",
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


def output_items(choice: Choice) -> list[Item]:
    """Return a complete answer as items: its text, unless there are only calls, and its calls."""
    name, has_text = choice.completion.name, bool(choice.text) or not choice.tool_calls
    text = [message_item(name, choice.text, status=end_status(choice))] if has_text else []
    return [*text, *call_items(name, choice.tool_calls)]
