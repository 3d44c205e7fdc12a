"""Base class of agent loops, and the policy client, tokenizer and tools of a loop.

    @register_agent_loop("twice")
    class Twice(AgentLoop):
        async def run(self, sampling_params, **row):
            response = self.respond(row)
            await response.sample(sampling_params)
            response.observe(self.tokenizer.encode(" Once more: "))
            await response.sample(sampling_params)
            return response.output()

Loops run in the driver process, on the router's event loop; `AgentLoopManager` calls them.

Sampled tokens are never decoded and encoded again, so training sees the tokens that the policy chose and their
log-probs. Only the text of tools and environments is tokenized here. The loss leaves it out (response_mask 0).
"""

import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from hybridrl.algos.partition.row_images import RowImages, joined_images
from hybridrl.errors import AgentFailed, ConfigError
from hybridrl.import_path import load_module
from hybridrl.serving.agent_loop.episode_clock import EpisodeClock
from hybridrl.serving.continuation import PolicyClient
from hybridrl.serving.sessions.store import SessionHost
from hybridrl.workers import images
from hybridrl.workers.images import ImageProcessor
from hybridrl.workers.rollout.requests import NOT_SAMPLED, Request, TokenOutput
from hybridrl.workers.rollout.sampling.sampler import SamplingParams

UNSET_VERSION = 2**62  # until a token is sampled: larger than every real version


@dataclass
class AgentLoopOutput:
    """One response with all its turns.

    Attributes:
        prompt_ids: As given, or those of an agent that writes its own prompt; at most `data.max_prompt_length`.
        response_ids, response_mask, response_logprobs: Equally long. Mask and log-prob are 1 and the sampled one for
            the policy's tokens, 0 and 0.0 for tokens of tools and environments.
        num_turns: Messages, those of the user and the tools included.
        version: Version of the oldest weights that sampled a token.
        token_versions: Version of the weights that sampled each token, -1 for tokens that were not sampled. Empty where
            `version` sampled all.
        reward: What the agent says itself; None: the run's reward function scores the response.
        is_left_out: The loop has failed. The sample has no reward and trains nothing.
        counts: Numbers of this response; their sums are logged as `rollout/agent/NAME`.
        routes: Entry of the column `routed_experts`, as the last request returned it: it covers what came before.
        images: Of prompt and response; None: those of the row, if the prompt is the row's.
        branches: Other conversations of the same episode, each a row of its own with `agent.train_branches`. Their
            reward is that of the episode unless they have one. A token is on the mask of one row only.
    """

    prompt_ids: list[int]
    response_ids: list[int]
    response_mask: list[int]
    response_logprobs: list[float]
    num_turns: int = 2
    version: int = UNSET_VERSION
    token_versions: list[int] = field(default_factory=list)
    reward: float | None = None
    is_left_out: bool = False
    counts: dict[str, float] = field(default_factory=dict)
    branches: list["AgentLoopOutput"] = field(default_factory=list)
    routes: Any = field(default=None, compare=False)
    images: RowImages | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        lengths = {len(self.response_ids), len(self.response_mask), len(self.response_logprobs)}
        lengths |= {len(self.token_versions)} if self.token_versions else set()
        if len(lengths) > 1:
            raise ValueError(
                f"an agent loop's response has {len(self.response_ids)} tokens, a mask of "
                f"{len(self.response_mask)}, {len(self.response_logprobs)} log-probs and "
                f"{len(self.token_versions)} token_versions; give one of each per token (token_versions may be empty)"
            )

    @property
    def all_token_versions(self) -> list[int]:
        """Return `token_versions`, filled in where they were left out."""
        return self.token_versions or [self.version if mask else NOT_SAMPLED for mask in self.response_mask]

    def as_branch(self) -> dict[str, Any]:
        """Return the row as plain data, as the column `branches` has it."""
        names = ("prompt_ids", "response_ids", "response_mask", "response_logprobs", "num_turns", "version", "reward")
        found = {name: getattr(self, name) for name in (*names, "routes", "images")}
        return found | {"token_versions": self.all_token_versions}


@dataclass
class ResponseBuilder:
    """A response under construction. `sample` and `observe` append tokens.

    Attributes:
        client: The policy.
        request: Request of the first turn; those of later turns are derived from it.
        limit: Most response tokens in all.
        ids, mask, log_probs, token_versions: One entry per response token so far.
        routes: Those of the last turn, which cover the earlier ones.
        images: Of the prompt and the tokens so far.
    """

    client: PolicyClient
    request: Request
    limit: int
    ids: list[int] = field(default_factory=list)
    mask: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    num_turns: int = 1
    version: int = UNSET_VERSION
    token_versions: list[int] = field(default_factory=list)
    routes: Any = None
    images: RowImages | None = field(init=False)

    def __post_init__(self) -> None:
        self.images = self.request.images

    @property
    def tokens_left(self) -> int:
        return self.limit - len(self.ids)

    async def sample(self, sampling_params: SamplingParams) -> TokenOutput:
        """Let the policy generate until it stops or no tokens are left, and return its output.

        Raises:
            ValueError: No tokens are left.
        """
        if self.tokens_left <= 0:
            raise ValueError(
                f"the response has all its {self.limit} tokens (data.max_response_length); check `tokens_left` first"
            )
        turn = replace(
            self.request,
            request_id=f"{self.request.request_id}#{self.num_turns}",
            prompt_ids=(*self.request.prompt_ids, *self.ids),
            sampling=replace(
                sampling_params, n=1, max_new_tokens=min(self.tokens_left, sampling_params.max_new_tokens)
            ),
            num_done=len(self.ids),
            images=self.images,
        )
        output = await self.client.generate(turn, conversation=self.request.request_id)
        self.ids += output.token_ids
        self.mask += [1] * len(output.token_ids)
        self.log_probs += output.log_probs
        self.version = min(self.version, output.version) if output.token_ids else self.version
        self.token_versions += output.token_versions
        self.routes = self.routes if output.routes is None else output.routes
        self.num_turns += 1
        return output

    def observe(self, tokens: list[int], images: RowImages | None = None) -> bool:
        """Append the tokens of a tool or an environment, and return whether they fit.

        They fit if there is room for one more token.

        Args:
            tokens: As `AgentLoop.encode` returns them.
            images: Of these tokens.
        """
        if len(tokens) >= self.tokens_left:
            return False
        self.images = joined_images([(0, self.images), (len(self.request.prompt_ids) + len(self.ids), images)])
        self.ids += tokens
        self.mask += [0] * len(tokens)
        self.log_probs += [0.0] * len(tokens)
        self.token_versions += [NOT_SAMPLED] * len(tokens)
        self.num_turns += 1
        return True

    def output(self) -> AgentLoopOutput:
        prompt_ids = list(self.request.prompt_ids)
        sampled = (self.log_probs, self.num_turns, self.version, self.token_versions)
        return AgentLoopOutput(prompt_ids, self.ids, self.mask, *sampled, routes=self.routes, images=self.images)


@dataclass(frozen=True)
class AgentLoopContext:
    """What all loops of a job share.

    Attributes:
        tools: Name to function.
        max_turns: Most turns of the policy in one response; None: only the length limits it.
        max_prompt_length: Tokens of a prompt.
        template_options: For the chat template (`data.apply_chat_template_kwargs`).
        program: `rollout.agent.program`, of `http_agent`.
        environments: `rollout.multi_turn.interaction_config_path`, of `environment_agent` and `verifiers_agent`.
        agent_timeout_s: Seconds for one response (`rollout.agent.timeout_s`).
        trains_branches: Whether `AgentLoopOutput.branches` are trained (`rollout.agent.train_branches`).
        session_host: Of the endpoint, while there is one.
        processor: Of a model that reads images, see `workers/images`; None: it reads text only.
    """

    tokenizer: Any
    max_response_length: int
    tools: Mapping[str, Callable] = field(default_factory=dict)
    max_turns: int | None = None
    max_prompt_length: int = 0
    template_options: Mapping[str, Any] = field(default_factory=dict)
    program: str | None = None
    environments: str | None = None
    agent_timeout_s: float = math.inf
    trains_branches: bool = True
    session_host: SessionHost | None = None
    processor: ImageProcessor | None = None


class AgentLoop(ABC):
    """Base class of loops.

    One object serves all rows of a batch at the same time: keep a row's state in local variables of `run`. A loop that
    failed is tried again with a new object.

    Attributes:
        loop_name: Under which the loop is registered.
        has_own_deadline: `run` ends itself after `agent_timeout_s`, not counting the time before it begins to work.
        has_own_pace: Its rows never wait for a push. It interrupts their requests, and these go on with new weights.
        player: Names the agent in errors.
    """

    loop_name = ""
    has_own_deadline = False
    has_own_pace = False

    def __init__(self, context: AgentLoopContext):
        self.context, self.tokenizer, self.tools = context, context.tokenizer, context.tools
        self.player = type(self).__name__

    @abstractmethod
    async def run(self, sampling_params: SamplingParams, **row: Any) -> AgentLoopOutput:
        """Return the response to one row.

        Args:
            sampling_params: For one sample.
            row: The row's columns (`raw_prompt`, `extra_info`, ...), and `HANDLES`.
        """

    async def run_in_time(self, sampling_params: SamplingParams, **row: Any) -> AgentLoopOutput:
        """Return what `run` returns. Raises AgentFailed if it has not returned after `agent_timeout_s`."""
        if self.has_own_deadline:
            return await self.run(sampling_params, **row)
        async with self.time_limit(EpisodeClock.of(row)):
            return await self.run(sampling_params, **row)

    @asynccontextmanager
    async def time_limit(self, clock: EpisodeClock) -> AsyncIterator[None]:
        """Limit a block to `agent_timeout_s`, not counting waits for new weights.

        Raises AgentFailed when it has not ended by then.
        """
        timeout_s = self.context.agent_timeout_s
        try:
            async with clock.limit(timeout_s) as limit:
                yield
        except TimeoutError as error:
            if not limit.expired():
                raise
            raise AgentFailed(
                f"{self.player} did not end within {timeout_s:g} s (actor_rollout_ref.rollout.agent.timeout_s)",
                cause="timeout",
            ) from error

    def text_of(self, content: Any) -> tuple[str, list[bytes]]:
        """Return a tool's or an environment's content as text for a chat template, and its images.

        Raises:
            DataError: It is neither text nor parts, or has images that the model does not read.
        """
        return images.content_text(content, self.context.processor)

    def encode(self, text: str, encoded: Sequence[bytes] = ()) -> tuple[list[int], RowImages | None]:
        """Return the tokens of rendered text, and its images, for `ResponseBuilder.observe`.

        Raises:
            DataError: An image is damaged, or the text has another number of images.
        """
        tokens = self.tokenizer.encode(text, add_special_tokens=False)
        return images.with_images(tokens, encoded, self.context.processor)

    def respond(self, row: Mapping[str, Any]) -> ResponseBuilder:
        """Return an empty response to this row."""
        return ResponseBuilder(row["client"], row["request"], self.context.max_response_length)

    def close(self) -> None:  # noqa: B027 - most loops have started nothing
        """End what the loop has started, once its rollout is closed."""


HANDLES = ("request", "client", "episode_clock")  # of a row, beside its columns: for `respond` and `time_limit`


def columns_of(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the columns that a row has in the data."""
    return {name: value for name, value in row.items() if name not in HANDLES}


AGENT_LOOPS: dict[str, type[AgentLoop]] = {}
OPTIONAL_LOOPS = {  # name -> module that registers it, loaded when a run uses it
    "environment_agent": "hybridrl.serving.environments.text_loop",
    "verifiers_agent": "hybridrl.serving.environments.played_loop",
}


def register_agent_loop(name: str) -> Callable[[type[AgentLoop]], type[AgentLoop]]:
    """Register a loop under the name used by a row's `agent_name` and `rollout.agent.default_agent_loop`.

    Raises:
        ConfigError: The class is in verl's form, or cannot be called as `AgentLoop` says.
    """

    def register(cls: type[AgentLoop]) -> type[AgentLoop]:
        _check_form(name, cls)
        AGENT_LOOPS[name], cls.loop_name = cls, name
        return cls

    return register


def _check_form(name: str, cls: type[AgentLoop]) -> None:
    """Raise ConfigError for a loop that has other methods or arguments than an `AgentLoop`."""
    functions = [member for member in vars(cls).values() if hasattr(member, "__code__")]
    problem = ""
    if hasattr(cls, "init_class") or any("server_manager" in function.__code__.co_names for function in functions):
        problem = "uses init_class or server_manager, as in verl"
    for method, arguments, names in (("__init__", [None], {}), ("run", [None], {"a_column": None})):
        try:
            inspect.signature(getattr(cls, method)).bind(None, *arguments, **names)
        except TypeError as error:
            problem = problem or f"has another {method} ({error})"
    if problem:
        raise ConfigError(
            f"the agent loop {name!r} ({cls.__name__}) {problem}; here it is\n"
            "    def __init__(self, context): super().__init__(context)\n"
            "    async def run(self, sampling_params, **row):\n"
            "        response = self.respond(row)\n"
            "        await response.sample(sampling_params)  # once per turn; response.observe(tokens) between turns\n"
            "        return response.output()"
        )


def lookup_agent_loop(name: str) -> type[AgentLoop]:
    """Return a registered loop; an unknown name is a ConfigError that lists the registered ones."""
    if name not in AGENT_LOOPS and name in OPTIONAL_LOOPS:
        load_module(OPTIONAL_LOOPS[name])
    if name not in AGENT_LOOPS:
        raise ConfigError(
            f"there is no agent loop {name!r} (a row's agent_name, or "
            "actor_rollout_ref.rollout.agent.default_agent_loop); registered: "
            f"{', '.join(sorted({*AGENT_LOOPS, *OPTIONAL_LOOPS}))}. One of your own is registered in the file "
            "actor_rollout_ref.rollout.agent.path"
        )
    return AGENT_LOOPS[name]


@register_agent_loop("single_turn_agent")
class SingleTurnAgentLoop(AgentLoop):
    """The default: one prompt, one response. Generates the same tokens as one batched call (`rollout.mode=sync`)."""

    async def run(self, sampling_params: SamplingParams, **row: Any) -> AgentLoopOutput:
        response = self.respond(row)
        await response.sample(sampling_params)
        return response.output()
