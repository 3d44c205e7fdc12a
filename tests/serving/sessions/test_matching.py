"""What kind of branch a request starts, worked out by hand."""

from dataclasses import dataclass

import pytest

from hybridrl.serving.sessions.matching import branch_kind, conversation, find_parent
from hybridrl.serving.sessions.message_keys import MessageKey, message_key

ROLES = {"t": "tools", "s": "system", "u": "user", "a": "assistant", "r": "tool"}


def keys(text: str) -> list[MessageKey]:
    """Return keys of a conversation such as "t s u1 a1": role and content."""
    return [MessageKey(ROLES[word[0]], word) for word in text.split()]


@dataclass
class Turn:
    parent: int | None
    keys: list[MessageKey]
    reply: MessageKey
    call_ids: tuple[str, ...] = ()


def turn(parent: int | None, asked: str, answer: str, *ids: str) -> Turn:
    return Turn(parent, keys(asked), keys(answer)[0], ids)


def match(turns: list[Turn], asked: str, ids: dict[int, tuple[str, ...]] | None = None) -> tuple[str, int | None]:
    found = keys(asked)
    parent, num = find_parent(turns, found, [(ids or {}).get(place, ()) for place in range(len(found))])
    return str(branch_kind(turns, found, parent, num)), parent


# t s u1 a1 u2 a2, with a3 as another answer to u2
TALK = [turn(None, "t s u1", "a1"), turn(0, "u2", "a2"), turn(0, "u2", "a3")]


@pytest.mark.parametrize(
    ("asked", "kind", "parent"),
    [
        ("t s u1 a1 u2 a2 u3", "continued", 1),
        ("t s u1 a1 u2 a3 u3", "continued", 2),
        ("t s u1 a1 u2 a3 u3 a9 u4", "continued", 2),  # with an answer of the client's own
        ("t s u1", "resampled", None),
        ("t s u1 a1 u2", "resampled", 0),
        ("t s u1 a1 u9", "forked", 0),
        ("t s9 u9", "separate", None),
        ("t s u9", "separate", None),
        ("t9 s9 u9 a9 u8", "separate", None),
        ("t s u1 u9", "compacted", None),
        ("t s u1 u9 a2 u3", "compacted", None),  # a1 is gone
        ("t s u1 a9 u9", "compacted", None),  # the summary has the role of an answer
        ("t s u1 a9 u2 a2 u3", "edited", None),
        ("t s u1 a1 u2 a9", "edited", 0),
        ("t s u1 a1 u2 a9 u3", "edited", 0),
        ("t s9 u1 a1 u2 a2 u3", "rewritten", None),
        ("t9 s u1 a1 u2 a2 u3", "rewritten", None),
        ("t s u1 a1 u9 a2 u3", "rewritten", 0),
    ],
)
def test_a_request_is_compared_with_the_recorded_conversations(asked, kind, parent):
    assert match(TALK, asked) == (kind, parent)


def test_the_first_request_starts_the_session():
    assert match([], "t s u1") == ("first", None)


def test_of_equal_answers_that_with_the_requests_calls_is_continued_else_the_newest():
    turns = [turn(None, "t u1", "a1", "x"), turn(None, "t u1", "a1", "y"), turn(None, "t u1", "a1", "z")]
    assert match(turns, "t u1 a1 r1", {2: ("y",)}) == ("continued", 1)
    assert match(turns, "t u1 a1 r1", {2: ("w",)}) == ("continued", 2)
    assert conversation(turns, 1) == keys("t u1 a1")


def call(arguments: object, **fields: object) -> dict:
    return {
        "role": "assistant",
        "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": arguments}}],
        **fields,
    }


@pytest.mark.parametrize(
    ("sent", "recorded", "is_same"),
    [
        ({"role": "user", "content": " x\n"}, {"role": "user", "content": "x"}, True),
        ({"role": "user", "content": "x"}, {"role": "system", "content": "x"}, False),
        ({"role": "assistant", "content": "x"}, {"role": "assistant", "content": "<think>y</think>\nx"}, True),
        ({"role": "assistant", "content": "<think>z</think>x"}, {"role": "assistant", "content": "y</think>x"}, False),
        (call('{"b": 1,"a":2}', content=""), call('{"a": 2, "b": 1}', content=None), True),
        (call({"a": 2}), call('{"a": 2}'), True),
        (call('{"a": 3}'), call('{"a": 2}'), False),
        (call("{"), call("{"), True),
    ],
)
def test_messages_are_the_same_however_a_client_writes_them(sent, recorded, is_same):
    assert message_key(sent).repeats(message_key(recorded)) == is_same
