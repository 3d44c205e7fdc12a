"""Agents of other people: each row's agent talks to the endpoint in a session of its own.

`SessionAgentLoop` is the base of their agent loops. `OutsideAgentLoop` (`outside_agent`) starts nothing, and trains
programs that ask for work. Each row is an episode that a program claims and ends:

    POST /v1/episodes               the next row, with a session of its own
    POST /v1/episodes/NAME/end      its reward, none, or why the program failed

A program needs an HTTP client and no code of this project. It may run on another machine, and there may be any number
of them. An episode that is not ended `rollout.agent.timeout_s` seconds after it was claimed has failed: its session
takes no more requests, and the row is offered again within the budget of `failures`.
"""

import asyncio
import math
from abc import abstractmethod
from dataclasses import dataclass, field, replace
from typing import Any

from hybridrl.errors import AgentFailed, ConfigError, HybridRLError, RequestFailed
from hybridrl.rewards.sample_score import as_number
from hybridrl.serving.agent_loop import base
from hybridrl.serving.agent_loop.episode_clock import EpisodeClock
from hybridrl.serving.continuation import PolicyClient
from hybridrl.serving.sessions.rows import SessionRow, session_rows
from hybridrl.serving.sessions.session import EpisodeLimits, Session
from hybridrl.serving.sessions.store import SessionHost
from hybridrl.workers.rollout.requests import Request, TokenOutput
from hybridrl.workers.rollout.sampling.sampler import SamplingParams


@dataclass(eq=False)  # it and its session refer to each other
class SessionEpisode:
    """The session of one row, and the row's policy for the endpoint, which may run on another event loop.

    Attributes:
        policy: Answers the session's requests.
        loop: Event loop of `policy`.
        failure: What ended the policy, such as a lost rollout process. An agent sees a status of HTTP; this is for the
            trainer.
    """

    host: SessionHost
    policy: PolicyClient
    loop: asyncio.AbstractEventLoop
    columns: dict[str, Any]
    context: base.AgentLoopContext
    clock: EpisodeClock
    session: Session = field(init=False)
    failure: Exception | None = None

    @classmethod
    def open(
        cls, name: str, context: base.AgentLoopContext, sampling: SamplingParams, row: dict[str, Any]
    ) -> "SessionEpisode":
        """Return the episode of a row. Raises ConfigError without an endpoint. name: of the agent loop."""
        if (host := context.session_host) is None:
            raise ConfigError(f"the agent loop {name} needs actor_rollout_ref.rollout.endpoint_port")
        request, loop = row["request"], asyncio.get_running_loop()
        episode = cls(host, row["client"], loop, base.columns_of(row), context, EpisodeClock.of(row))
        lengths = (context.max_prompt_length, context.max_response_length)
        episode.session = host.sessions.open_episode(
            EpisodeLimits(episode, sampling, request.seed, request.sample, *lengths)
        )
        return episode

    async def generate(self, request: Request, *, conversation: str | None = None) -> TokenOutput:
        """Return the policy's answer. The endpoint calls it on its own event loop."""
        try:
            answer = self.policy.generate(request, conversation=conversation)
            if asyncio.get_running_loop() is self.loop:
                return await answer
            return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(answer, self.loop))
        except RequestFailed:
            raise
        except HybridRLError as error:
            self.failure = error
            raise

    @property
    def ended_by_length(self) -> bool:
        """Whether a request was refused for want of room. The agent may fail because of that, and is trained."""
        return self.session.was_full and bool(self.session.turns)

    def output(self, returned: Any, *, agent: str) -> base.AgentLoopOutput:
        """Return the main conversation, with the others as branches.

        Args:
            returned: Reward of the episode; None: that which was posted, if any.
            agent: Names the agent in an error.

        Raises:
            HybridRLError: The policy was lost.
            AgentFailed: The agent has sent no request, or its reward is not finite.
            TypeError: Its reward is no number.
        """
        if self.failure is not None:
            raise self.failure
        reward = None if returned is None else as_number(returned)
        if returned is not None and reward is None:
            raise TypeError(f"{agent} returned {returned!r}; an agent returns its reward, or None")
        if reward is not None and not math.isfinite(reward):
            raise AgentFailed(f"{agent} returned {reward}", cause="reward not finite")
        session = self.session
        rows = session_rows(session.turns, max_prompt_length=self.context.max_prompt_length)
        if not rows:
            raise AgentFailed(
                f"{agent} ended without an answered request to its session; does its client use the base_url "
                "(OPENAI_BASE_URL) that it was given?",
                cause="no request",
            )
        main, *branches = (_output_of(row, session.reward_of(row.own_turns)) for row in rows)
        counts = {f"requests/{kind}": float(number) for kind, number in session.counts.items()}
        if not self.context.trains_branches:
            left_out = sum(sum(branch.response_mask) for branch in branches)
            counts |= {"branches_left_out": float(len(branches)), "tokens_left_out": float(left_out)}
        given = (value for value in (reward, session.reward, main.reward) if value is not None)
        kept = branches if self.context.trains_branches else []
        return replace(main, reward=next(given, None), counts=counts, branches=kept)


def _output_of(row: SessionRow, reward: float | None) -> base.AgentLoopOutput:
    """Return a row of a session, with a reward of its own or None."""
    return base.AgentLoopOutput(
        *(row.prompt_ids, row.response_ids, row.response_mask, row.response_logprobs),
        num_turns=2 * len(row.turns),
        version=min(version for version, mask in zip(row.token_versions, row.response_mask, strict=True) if mask),
        token_versions=row.token_versions,
        reward=reward,
        routes=row.routes,
        images=row.images,
    )


class SessionAgentLoop(base.AgentLoop):
    """Base class of loops whose agent sends its requests to a session."""

    has_own_deadline = True

    @abstractmethod
    async def play(self, episode: SessionEpisode) -> Any:
        """Return the agent's reward or None, when it has ended. Raises AgentFailed if it failed."""

    async def run(self, sampling_params: SamplingParams, **row: Any) -> base.AgentLoopOutput:
        """Return the conversations of the agent, the main one first.

        An agent that ran out of tokens may fail because of that. Raises AgentFailed if it failed otherwise, or has sent
        no request.
        """
        episode = SessionEpisode.open(self.loop_name, self.context, sampling_params, row)
        try:
            reward = await self.play(episode)
        except AgentFailed:
            if episode.failure is None and not episode.ended_by_length:
                raise
            reward = None
        finally:
            episode.host.sessions.close(episode.session.name)
        return episode.output(reward, agent=self.player)


@base.register_agent_loop("outside_agent")
class OutsideAgentLoop(SessionAgentLoop):
    """Offers each row at the endpoint, and waits for the program that claims it."""

    has_own_pace = True  # a program may play one episode at a time, so none may wait for others to be claimed

    def __init__(self, context: base.AgentLoopContext):
        super().__init__(context)
        self.player = "the program outside"

    async def play(self, episode: SessionEpisode) -> float | None:
        """Return the reward that the program says.

        Consumes: The program's end of the episode.
        Waits for: A program that claims the episode, and its end.
        Unblocked by: The endpoint's handlers of `/v1/episodes`; the deadline, once it is claimed.
        """
        offered = episode.host.episodes.offer(episode.session, episode.columns)
        try:
            await asyncio.wrap_future(offered.claimed)
            async with self.time_limit(episode.clock):
                end = await asyncio.wrap_future(offered.ended)
        finally:
            episode.host.episodes.withdraw(offered)
        if end.error is not None:
            raise AgentFailed(f"{self.player} reports: {end.error}", cause="reported by the program")
        return end.reward
