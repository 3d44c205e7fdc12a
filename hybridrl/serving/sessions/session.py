"""`Session`: the turns of one agent, and the prompt of its next request.

Every token that the engine reads for a session is either part of a recorded turn, taken over as it is, or part of the
messages that are new in a request. Rows made of the turns therefore have exactly the tokens that the policy sampled,
with their log-probs, after exactly the tokens that it read.

The endpoint plans in its parser threads and records on its event loop.
"""

import hashlib
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from hybridrl.algos.partition.row_images import RowImages, joined_images
from hybridrl.serving.continuation import PolicyClient
from hybridrl.serving.sessions import matching, prompts
from hybridrl.serving.sessions.matching import BranchKind
from hybridrl.serving.sessions.message_keys import MessageKey, call_ids, conversation_keys, message_key
from hybridrl.workers.images import ImageProcessor, with_images
from hybridrl.workers.rollout.sampling.sampler import SamplingParams


def context_length(tokens: int) -> str:
    """Return the start of an error: OpenAI's words, by which clients such as litellm know that a retry is useless."""
    return f"This model's maximum context length is {tokens} tokens"


class SessionFull(Exception):
    """A conversation has no room for another token of the policy."""


class SessionEnded(Exception):
    """A session takes no more requests."""


@dataclass(frozen=True)
class Turn:
    """One request and its answer.

    Attributes:
        parent: Number of the turn that it continues; None: it starts a conversation.
        keys: Of the messages since the parent's answer.
        given_ids: Tokens of these messages: what the engine read after the parent's tokens.
        token_ids, log_probs, versions: What the engine sampled, with the weight version of each token.
        reply: Key of the answer.
        call_ids: Ids of the answer's tool calls.
        kind: How the request relates to earlier ones.
        answer_id: Id of the answer, which its client has.
        routes: Entry of the column `routed_experts` of the conversation up to here.
        images: Of `given_ids`.
    """

    parent: int | None
    keys: tuple[MessageKey, ...]
    given_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    log_probs: tuple[float, ...]
    versions: tuple[int, ...]
    reply: MessageKey
    call_ids: tuple[str, ...]
    kind: BranchKind
    answer_id: str = ""
    routes: Any = field(default=None, compare=False)
    images: RowImages | None = field(default=None, compare=False)


@dataclass(frozen=True)
class PromptPlan:
    """The prompt of a request. tokens_left: for the answer; None: the session sets no limit.

    Attributes:
        given_images: Of `given_ids`.
        images: Of `prompt_ids`.
    """

    parent: int | None
    keys: tuple[MessageKey, ...]
    given_ids: tuple[int, ...]
    prompt_ids: tuple[int, ...]
    kind: BranchKind
    tokens_left: int | None
    occurrence: int  # of this prompt in the session, from 0
    given_images: RowImages | None = None
    images: RowImages | None = None


@dataclass(frozen=True)
class EpisodeLimits:
    """How a session samples that an agent loop has opened: as the training batch does, whatever its requests say.

    Attributes:
        client: Answers its requests, in place of the router.
        sampling: Of each request, except for its length.
        seed, sample: Of the row.
        max_prompt_length: Tokens of a training row's prompt.
        max_response_length: Tokens of a training row's response, those between the policy's turns included.
    """

    client: PolicyClient
    sampling: SamplingParams
    seed: int
    sample: int
    max_prompt_length: int
    max_response_length: int

    def tokens_left(self, first_prompt: int, total: int) -> int:
        """Return how many tokens a conversation may still get.

        What does not fit into the prompt of a row is at the start of its response, outside the mask.

        Args:
            first_prompt: Tokens of the first request of the conversation.
            total: Tokens so far.
        """
        return self.max_response_length - (total - min(first_prompt, self.max_prompt_length))


@dataclass
class Session:
    """The turns of one agent, with their branches.

    Attributes:
        name: In the URL.
        episode: Set for sessions that an agent loop has opened.
        counts: Answered requests by kind.
        reward: What the agent has posted.
        rewards: What it has posted for single conversations, by the number of a turn.
        was_full: A request was refused because a row had no room for its answer.
        is_closed: It takes no more requests.
        num_open: Requests in work.
        num_tokens: Tokens of all turns.
    """

    name: str
    episode: EpisodeLimits | None = None
    turns: list[Turn] = field(default_factory=list)
    counts: Counter[BranchKind] = field(default_factory=Counter)
    reward: float | None = None
    rewards: dict[int, float] = field(default_factory=dict)
    was_full: bool = False
    is_closed: bool = False
    num_open: int = 0
    num_tokens: int = 0
    _occurrences: Counter[bytes] = field(default_factory=Counter)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def plan(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]],
        tokenizer: Any,
        *,
        n: int = 1,
        check_text: Callable[[str], str] = str,
        options: Mapping[str, Any] = prompts.NO_OPTIONS,
        processor: ImageProcessor | None = None,
    ) -> PromptPlan:
        """Return the prompt of a request with these messages.

        Args:
            messages: The whole conversation, as the client sends it; contents are texts, with `images` beside them.
            tools: Of the request.
            tokenizer: With a chat template.
            n: Answers of the request.
            check_text: Returns a rendered text, or raises, before it is tokenized.
            options: For the chat template.
            processor: Of a model that reads images.

        Raises:
            DataError: An image is not read.
            SessionEnded: The session is closed.
            SessionFull: An episode has no room for an answer.
            Exception: What the chat template raises.
        """
        if self.is_closed:
            raise SessionEnded(f"session {self.name!r} has ended")
        turns = list(self.turns)
        keys = conversation_keys(messages, tools)
        parent, num_matched = matching.find_parent(turns, keys, [(), *map(call_ids, messages)])
        kind = matching.branch_kind(turns, keys, parent, num_matched)
        text = None
        if parent is not None:
            sampled = turns[parent].token_ids
            text = prompts.text_after_answer(
                tokenizer, messages, tools, answer=num_matched - 2, sampled=sampled, options=options
            )
            if text is None:
                parent, num_matched, kind = None, 0, BranchKind.RENDERED
        if text is None:
            text = prompts.render(tokenizer, messages, tools, options=options)
        encoded = [image for message in messages[max(0, num_matched - 1) :] for image in message.get("images", ())]
        before = path_images(turns, parent)
        num_before = sum(len(images["image_tokens"]) for _, images in before if images is not None)
        tokens = prompts.encode(tokenizer, check_text(text))
        given, images = with_images(tokens, encoded, processor, num_before=num_before)
        known = [token for place in path(turns, parent) for token in (*turns[place].given_ids, *turns[place].token_ids)]
        prompt = (*known, *given)
        with self._lock:
            digest = hashlib.blake2b(repr(prompt).encode(), digest_size=16).digest()
            occurrence = self._occurrences[digest]
            self._occurrences[digest] += n
        all_images = images, joined_images([*before, (len(known), images)])
        plan = PromptPlan(parent, tuple(keys[num_matched:]), tuple(given), prompt, kind, None, occurrence, *all_images)
        return plan if self.episode is None else self._limited(turns, plan, self.episode)

    def _limited(self, turns: list[Turn], plan: PromptPlan, episode: EpisodeLimits) -> PromptPlan:
        first = path(turns, plan.parent)[:1]
        first_prompt = len(turns[first[0]].given_ids) if first else len(plan.given_ids)
        left = episode.tokens_left(first_prompt, len(plan.prompt_ids))
        if left < 1:
            self.was_full = True
            num = len(plan.prompt_ids)
            raise SessionFull(
                f"{context_length(num + left)} in this conversation, which has {num}: its training row has no room for "
                f"an answer (data.max_prompt_length={episode.max_prompt_length}, "
                f"data.max_response_length={episode.max_response_length})"
            )
        return replace(plan, tokens_left=left)

    def seed(self, plan: PromptPlan) -> int:
        """Return the seed of an episode's request, which depends on its row and its prompt alone."""
        assert self.episode is not None
        numbers = self.episode.seed, self.episode.sample, plan.occurrence, plan.prompt_ids
        return int.from_bytes(hashlib.blake2b(repr(numbers).encode(), digest_size=8).digest()) >> 1

    def record(
        self,
        plan: PromptPlan,
        *,
        token_ids: Sequence[int],
        log_probs: Sequence[float],
        versions: Sequence[int],
        reply: Mapping[str, Any],
        stop_text: str | None = None,
        answer_id: str = "",
        routes: Any = None,
    ) -> None:
        """Add the answer to a request.

        Args:
            plan: Of the request.
            token_ids, log_probs, versions: As the engine returned them.
            reply: The message that the client gets.
            stop_text: That ended it, and is not in the message.
            answer_id: Id of the answer that the client gets.
            routes: Of the conversation up to here, where the rollout returns them.
        """
        if not token_ids or self.is_closed:
            return
        self.counts[plan.kind] += 1
        self.num_tokens += len(plan.given_ids) + len(token_ids)
        self.turns.append(
            Turn(
                *(plan.parent, plan.keys, plan.given_ids),
                *(tuple(token_ids), tuple(log_probs), tuple(versions)),
                *(message_key(reply, stop_text=stop_text), call_ids(reply), plan.kind),
                answer_id=answer_id,
                routes=routes,
                images=plan.given_images,
            )
        )

    def reward_answer(self, answer_id: str, reward: float) -> None:
        """Give the conversation of an answer a reward of its own. Raises KeyError if the session has no such answer."""
        numbers = [number for number, turn in enumerate(self.turns) if turn.answer_id == answer_id]
        if not numbers:
            raise KeyError(answer_id)
        self.rewards |= dict.fromkeys(numbers, reward)

    def reward_of(self, turns: Sequence[int]) -> float | None:
        """Return the reward of the last of these turns that has one; None: none has."""
        return next((self.rewards[number] for number in reversed(turns) if number in self.rewards), None)


def path(turns: Sequence[Turn], number: int | None) -> list[int]:
    """Return the numbers of the turns from the first one of a conversation to this one."""
    found: list[int] = []
    while number is not None:
        found.append(number)
        number = turns[number].parent
    return found[::-1]


def path_images(turns: Sequence[Turn], number: int | None) -> list[tuple[int, RowImages | None]]:
    """Return the images of each turn of a conversation, with the number of tokens before it."""
    found, start = [], 0
    for place in path(turns, number):
        found.append((start, turns[place].images))
        start += len(turns[place].given_ids) + len(turns[place].token_ids)
    return found
