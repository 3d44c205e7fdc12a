"""Find the recorded turn that a request continues, and say what kind of branch it starts.

Pure functions over the turns of a session and the message keys of a request. A turn is one request with its answer.
Turns are a tree: the parent of a turn is the turn whose conversation, answer included, the request repeats.
"""

from collections import defaultdict
from collections.abc import Sequence
from enum import StrEnum
from typing import Protocol

from hybridrl.serving.sessions.message_keys import MessageKey


class BranchKind(StrEnum):
    """How a request relates to the turns before it."""

    FIRST = "first"  # of the session
    CONTINUED = "continued"  # the next request of a conversation
    RESAMPLED = "resampled"  # the same request again: a retry, or several samples
    FORKED = "forked"  # another continuation of a conversation that was continued already: parallel calls
    SEPARATE = "separate"  # another conversation, such as that of a sub-agent
    COMPACTED = "compacted"  # the client dropped or summarised answers of the policy
    EDITED = "edited"  # the client changed an answer of the policy
    REWRITTEN = "rewritten"  # the client changed other messages, or tools; all answers are still there
    RENDERED = "rendered"  # the chat template has no end of a turn, so that the conversation was tokenized again


class RecordedTurn(Protocol):
    """What matching reads of a turn."""

    @property
    def parent(self) -> int | None: ...

    @property
    def keys(self) -> Sequence[MessageKey]:
        """Keys of the messages since the parent's answer, without this turn's answer."""
        ...

    @property
    def reply(self) -> MessageKey: ...

    @property
    def call_ids(self) -> tuple[str, ...]: ...


def find_parent(
    turns: Sequence[RecordedTurn], keys: Sequence[MessageKey], ids: Sequence[tuple[str, ...]]
) -> tuple[int | None, int]:
    """Return the turn that a request continues, and how many of its keys that turn's conversation has.

    Among turns with the same conversation, that with the request's call ids comes first, then the newest.

    Args:
        turns: Of the session, in the order in which they ended.
        keys: Of the request, the tools' first.
        ids: Ids of the tool calls of each key's message.

    Returns:
        (None, 0) if the request repeats no answer of the session.
    """
    children = defaultdict(list)
    for number, turn in enumerate(turns):
        children[turn.parent].append(number)
    best: tuple[int, int, int, int | None] = (0, 0, -1, None)
    frontier: list[tuple[int, int, int | None]] = [(0, 0, None)]  # keys matched, calls with the same ids, turn
    while frontier:
        matched, same_ids, node = frontier.pop()
        for number in children[node]:
            turn, place = turns[number], matched + len(turns[number].keys)
            if place < len(keys) and _repeats(keys[matched : place + 1], [*turn.keys, turn.reply]):
                same = same_ids + (turn.call_ids == ids[place])
                best = max(best, (place + 1, same, number, number), key=lambda found: found[:3])
                frontier.append((place + 1, same, number))
    return best[3], best[0]


def branch_kind(
    turns: Sequence[RecordedTurn], keys: Sequence[MessageKey], parent: int | None, num_matched: int
) -> BranchKind:
    """Return how a request relates to the turns of its session.

    Args:
        turns: Of the session.
        keys: Of the request.
        parent: Its parent, of `find_parent`.
        num_matched: Keys that the parent's conversation has.
    """
    if not turns:
        return BranchKind.FIRST
    rest = keys[num_matched:]
    siblings = [turn for turn in turns if turn.parent == parent]
    if any(len(turn.keys) == len(rest) and _repeats(rest, turn.keys) for turn in siblings):
        return BranchKind.RESAMPLED
    if parent is not None and not any(key.is_assistant for key in rest):
        return BranchKind.FORKED if siblings else BranchKind.CONTINUED
    if parent is not None and not siblings:
        return BranchKind.CONTINUED  # with answers that the client wrote itself
    return _changed_kind(turns, keys)


def conversation(turns: Sequence[RecordedTurn], number: int) -> list[MessageKey]:
    """Return the keys of the whole conversation that ends with the answer of turn `number`."""
    found: list[MessageKey] = []
    node: int | None = number
    while node is not None:
        found[:0] = [*turns[node].keys, turns[node].reply]
        node = turns[node].parent
    return found


def _changed_kind(turns: Sequence[RecordedTurn], keys: Sequence[MessageKey]) -> BranchKind:
    """Return how a request differs that repeats no recorded conversation to its end."""
    is_parent = {turn.parent for turn in turns}
    recorded = [conversation(turns, number) for number in range(len(turns)) if number not in is_parent]
    nearest = max(recorded, key=lambda one: (num_common(keys, one), len(one)))
    common = num_common(keys, nearest)
    answers = [turn.reply for turn in turns]
    own = [key for key in keys if key.is_assistant and _is_one_of(key, answers)]
    task = next((place for place, key in enumerate(keys) if key.role == "user"), len(keys))
    if not own and common <= task:
        return BranchKind.SEPARATE
    if _has_edited_answer(keys, nearest, common, answers):
        return BranchKind.EDITED
    has_lost = any(
        answer.is_assistant and not any(key.repeats(answer) for key in keys[common:]) for answer in nearest[common:]
    )
    return BranchKind.COMPACTED if has_lost else BranchKind.REWRITTEN


def _has_edited_answer(
    keys: Sequence[MessageKey], recorded: Sequence[MessageKey], common: int, answers: Sequence[MessageKey]
) -> bool:
    """Return whether an unknown answer stands in place of the policy's, and the conversation around it is kept."""
    if common >= min(len(keys), len(recorded)):
        return False
    if not (keys[common].is_assistant and recorded[common].is_assistant) or _is_one_of(keys[common], answers):
        return False
    after, recorded_after = keys[common + 1 :], recorded[common + 1 :]
    is_kept = not after or not recorded_after or after[0].repeats(recorded_after[0])
    return is_kept or len(keys) > len(recorded)


def num_common(keys: Sequence[MessageKey], recorded: Sequence[MessageKey]) -> int:
    """Return how many keys at the start of a request repeat a recorded conversation."""
    number = 0
    for key, other in zip(keys, recorded, strict=False):
        if not key.repeats(other):
            break
        number += 1
    return number


def _repeats(keys: Sequence[MessageKey], recorded: Sequence[MessageKey]) -> bool:
    return all(key.repeats(other) for key, other in zip(keys, recorded, strict=True))


def _is_one_of(key: MessageKey, answers: Sequence[MessageKey]) -> bool:
    return any(key.repeats(answer) for answer in answers)
