"""Events of a streamed answer of the Responses API, numbered in their order.

created, in_progress, then for the text: output_item.added, content_part.added, output_text.delta ..., and their ends;
for each call: output_item.added, function_call_arguments.delta and .done, output_item.done; then completed, incomplete,
or failed.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from hybridrl.serving.openai.apis.base import Event
from hybridrl.serving.openai.apis.responses_items import Item, call_items, message_item, text_part
from hybridrl.serving.openai.parameters import RequestError
from hybridrl.serving.openai.requests import CompletionRequest
from hybridrl.serving.openai.responses import Choice


@dataclass
class ResponsesWriter:
    """The events of one answer. body: returns the answer with an output and a status."""

    completion: CompletionRequest
    choice: Choice
    body: Callable[..., dict[str, Any]]
    _number: int = 0
    _text: str | None = None  # sent so far; None: the item of the text has not begun
    _items: list[Item] = field(default_factory=list)  # complete ones

    def begin(self) -> Iterator[Event]:
        for state in ("created", "in_progress"):
            yield self._event(state, response=self.body(output=[], status="in_progress"))

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
        for item in call_items(self.completion.name, self.choice.tool_calls):
            yield from self._call(item)
        is_cut = self.choice.finish_reason == "length"
        yield self._event("incomplete" if is_cut else "completed", response=self.body(output=self._items))

    def fail(self, error: RequestError) -> Iterator[Event]:
        about = {"code": "server_error", "message": error.message}
        yield self._event("failed", response=self.body(output=self._items, status="failed", error=about))

    @property
    def _place(self) -> dict[str, Any]:
        return {"item_id": f"msg_{self.completion.name}", "output_index": 0, "content_index": 0}

    def _begin_text(self) -> Iterator[Event]:
        if self._text is not None:
            return
        self._text = ""
        item = message_item(self.completion.name, "", status="in_progress")
        yield self._event("output_item.added", output_index=0, item=item)
        yield self._event("content_part.added", **self._place, part=text_part(""))

    def _end_text(self) -> Iterator[Event]:
        if self._text is None:
            return
        status = "incomplete" if self.choice.finish_reason == "length" else "completed"
        item = message_item(self.completion.name, self._text, status=status)
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
