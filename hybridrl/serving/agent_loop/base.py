"""What an agent loop is, and what it may use: a policy that answers tokens with tokens, a tokenizer, tools.

    @register_agent_loop("twice")
    class Twice(AgentLoop):
        async def run(self, sampling_params, **row):
            response = self.respond(row)
            await response.sample(sampling_params)
            response.observe(self.tokenizer.encode(" Once more: "))
            await response.sample(sampling_params)
            return response.output()

Tokens stay what they were: what was sampled is never decoded and encoded again, so training sees the tokens that the
policy chose and their log-probs. Only what tools and environments say is tokenized here, and the loss leaves it out
(response_mask 0).
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from hybridrl.errors import ConfigError
from hybridrl.serving.continuation import PolicyClient
from hybridrl.workers.rollout.partial import NO_VERSION as NOT_SAMPLED
from hybridrl.workers.rollout.requests import Request, TokenOutput
from hybridrl.workers.rollout.sampling.sampler import SamplingParams

NO_VERSION = 2**62  # before anything was sampled: later than every version there is


@dataclass
class AgentLoopOutput:
    """One response with everything that was said in it.

    prompt_ids: as they were given. response_ids, response_mask, response_logprobs: equally long; 1 and the log-prob
    where the policy spoke, 0 and 0.0 where a tool or an environment did. num_turns: messages, the user's and the tools'
    included. version: of the oldest weights that made a token. token_versions: of the weights that made each token, -1
    where the policy did not speak; empty where `version` made them all.
    """

    prompt_ids: list[int]
    response_ids: list[int]
    response_mask: list[int]
    response_logprobs: list[float]
    num_turns: int = 2
    version: int = NO_VERSION
    token_versions: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        lengths = {len(self.response_ids), len(self.response_mask), len(self.response_logprobs)}
        lengths |= {len(self.token_versions)} if self.token_versions else set()
        if len(lengths) > 1:
            raise ValueError(
                f"an agent loop's response has {len(self.response_ids)} tokens, a mask of "
                f"{len(self.response_mask)} and "
                f"{len(self.response_logprobs)} log-probs; they belong together, and with them "
                f"{len(self.token_versions)} "
                "token_versions, if there are any"
            )

    @property
    def versions_of_tokens(self) -> list[int]:
        """`token_versions`, filled in where they were left out."""
        return self.token_versions or [self.version if mask else NOT_SAMPLED for mask in self.response_mask]


@dataclass
class Response:
    """A response in the making. `sample` lets the policy go on, `observe` says something to it; both add tokens.

    limit: most tokens in all. request: the first turn's; those of the others follow from it.
    """

    client: PolicyClient
    request: Request
    limit: int
    ids: list[int] = field(default_factory=list)
    mask: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    num_turns: int = 1
    version: int = NO_VERSION
    token_versions: list[int] = field(default_factory=list)

    @property
    def room(self) -> int:
        return self.limit - len(self.ids)

    async def sample(self, sampling_params: SamplingParams) -> TokenOutput:
        """Let the policy speak until it ends or there is no room; returns what it said.

        ValueError if there is no room at all.
        """
        if self.room <= 0:
            raise ValueError(
                f"the response has its {self.limit} tokens (data.max_response_length) already; look at `room` first"
            )
        turn = replace(
            self.request,
            request_id=f"{self.request.request_id}#{self.num_turns}",
            prompt_ids=(*self.request.prompt_ids, *self.ids),
            sampling=replace(sampling_params, n=1, max_new_tokens=min(self.room, sampling_params.max_new_tokens)),
            num_done=len(self.ids),
        )
        output = await self.client.generate(turn, conversation=self.request.request_id)
        self.ids += output.token_ids
        self.mask += [1] * len(output.token_ids)
        self.log_probs += output.log_probs
        self.version = min(self.version, output.version) if output.token_ids else self.version
        self.token_versions += output.token_versions
        self.num_turns += 1
        return output

    def observe(self, tokens: list[int]) -> bool:
        """Add what a tool or an environment says, if there is room for all of it and a token after it; else nothing,
        and False.
        """
        if len(tokens) >= self.room:
            return False
        self.ids += tokens
        self.mask += [0] * len(tokens)
        self.log_probs += [0.0] * len(tokens)
        self.token_versions += [NOT_SAMPLED] * len(tokens)
        self.num_turns += 1
        return True

    def output(self) -> AgentLoopOutput:
        prompt_ids = list(self.request.prompt_ids)
        return AgentLoopOutput(
            prompt_ids, self.ids, self.mask, self.log_probs, self.num_turns, self.version, self.token_versions
        )


@dataclass(frozen=True)
class AgentSetting:
    """What all loops of a job share.

    tools: name -> function. max_turns: of the policy, in one response; None means no limit but length.
    """

    tokenizer: Any
    max_response_length: int
    tools: Mapping[str, Callable] = field(default_factory=dict)
    max_turns: int | None = None


class AgentLoop(ABC):
    """One object serves all rows of a batch at the same time: what belongs to a row stays in `run`'s own variables."""

    def __init__(self, setting: AgentSetting):
        self.setting, self.tokenizer, self.tools = setting, setting.tokenizer, setting.tools

    @abstractmethod
    async def run(self, sampling_params: SamplingParams, **row: Any) -> AgentLoopOutput:
        """Return the response to one row.

        row: its columns (`raw_prompt`, `extra_info`, ...), and for `respond` the request and client.
        """

    def respond(self, row: Mapping[str, Any]) -> Response:
        """Return the empty response to this row."""
        return Response(row["client"], row["request"], self.setting.max_response_length)


AGENT_LOOPS: dict[str, type[AgentLoop]] = {}


def register_agent_loop(name: str) -> Callable[[type[AgentLoop]], type[AgentLoop]]:
    """Make a loop known as `agent_name` of a row, and as `actor_rollout_ref.rollout.agent.default_agent_loop`."""

    def register(cls: type[AgentLoop]) -> type[AgentLoop]:
        AGENT_LOOPS[name] = cls
        return cls

    return register


def agent_loop(name: str) -> type[AgentLoop]:
    """Return a registered loop; an unknown name is a ConfigError that lists the known ones."""
    if name not in AGENT_LOOPS:
        raise ConfigError(
            f"there is no agent loop {name!r} (a row's agent_name, or "
            "actor_rollout_ref.rollout.agent.default_agent_loop); known: "
            f"{', '.join(sorted(AGENT_LOOPS))}. One of your own is registered in the file "
            "actor_rollout_ref.rollout.agent.path"
        )
    return AGENT_LOOPS[name]
