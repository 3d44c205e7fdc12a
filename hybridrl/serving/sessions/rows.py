"""Training rows of a session: one for each conversation that no turn continues.

Pure functions over the turns of a session.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from hybridrl.algos.partition.row_images import RowImages, joined_images
from hybridrl.serving.sessions.matching import BranchKind
from hybridrl.serving.sessions.session import Turn, path, path_images
from hybridrl.workers.rollout.requests import NOT_SAMPLED


@dataclass
class SessionRow:
    """One conversation.

    Attributes:
        prompt_ids: What the policy read before its first token, or the first part of it.
        response_ids: All other tokens.
        response_mask: 1 for tokens that the policy sampled and no earlier row trains, else 0.
        response_logprobs: Of the sampled tokens at which they were sampled, also off the mask; 0.0 for the others.
        token_versions: Weight version of each sampled token, -1 for the others.
        turns: Numbers of the session's turns.
        own_turns: Those of them whose tokens are on the mask.
        routes: Those of the last turn.
        images: Of all tokens.
    """

    prompt_ids: list[int]
    turns: list[int]
    own_turns: list[int] = field(default_factory=list)
    response_ids: list[int] = field(default_factory=list)
    response_mask: list[int] = field(default_factory=list)
    response_logprobs: list[float] = field(default_factory=list)
    token_versions: list[int] = field(default_factory=list)
    routes: Any = None
    images: RowImages | None = None

    def observe(self, ids: Sequence[int]) -> None:
        """Append tokens that the policy read."""
        self.response_ids += ids
        self.response_mask += [0] * len(ids)
        self.response_logprobs += [0.0] * len(ids)
        self.token_versions += [NOT_SAMPLED] * len(ids)

    def sample(self, turn: Turn, *, is_trained: bool) -> None:
        """Append tokens that the policy sampled."""
        self.response_ids += turn.token_ids
        self.response_mask += [int(is_trained)] * len(turn.token_ids)
        self.response_logprobs += turn.log_probs
        self.token_versions += turn.versions
        self.routes = turn.routes


def session_rows(turns: Sequence[Turn], *, max_prompt_length: int | None = None) -> list[SessionRow]:
    """Return the rows of a session, the main one first.

    Each sampled token is on the mask of one row.

    Args:
        turns: Of the session.
        max_prompt_length: Tokens of a prompt; what the first request has more is at the start of the response.
    """
    trained: set[int] = set()
    rows = []
    for leaf in ordered_leaves(turns):
        numbers = path(turns, leaf)
        first = turns[numbers[0]].given_ids
        cut = len(first) if max_prompt_length is None else min(len(first), max_prompt_length)
        row = SessionRow(list(first[:cut]), numbers, images=joined_images(path_images(turns, leaf)))
        row.observe(first[cut:])
        for number in numbers:
            if number != numbers[0]:
                row.observe(turns[number].given_ids)
            row.sample(turns[number], is_trained=number not in trained)
        row.own_turns = [number for number in numbers if number not in trained]
        trained.update(numbers)
        rows.append(row)
    return rows


def ordered_leaves(turns: Sequence[Turn]) -> list[int]:
    """Return the last turns of all conversations, that of the main one first, then the newest ones.

    The main conversation has the most turns of the policy, and of several such it is the newest. Conversations of
    sub-agents (`BranchKind.SEPARATE`) come after all others.
    """
    continued = {turn.parent for turn in turns}
    leaves = [number for number in range(len(turns)) if number not in continued]
    main = max(leaves, key=lambda leaf: _rank(turns, leaf), default=None)
    return sorted(leaves, key=lambda leaf: (leaf != main, -leaf))


def _rank(turns: Sequence[Turn], leaf: int) -> tuple[bool, int, int]:
    numbers = path(turns, leaf)
    return turns[numbers[0]].kind != BranchKind.SEPARATE, len(numbers), leaf
