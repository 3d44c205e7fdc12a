"""Train programs that ask for work: each row is an episode that a program claims and ends.

    POST /v1/episodes               the next row, with a session of its own
    POST /v1/episodes/NAME/end      its reward, none, or why the program failed

A program needs an HTTP client and no code of this project. It may run on another machine, and there may be any number
of them. An episode that is not ended `rollout.agent.timeout_s` seconds after it was claimed has failed: its session
takes no more requests, and the row is offered again within the budget of `failures`.
"""

import asyncio
from typing import Any

from hybridrl.errors import AgentFailed
from hybridrl.serving.agent_loop.base import AgentLoop, AgentLoopContext, AgentLoopOutput, register_agent_loop
from hybridrl.serving.agent_loop.programs.session_episode import SessionEpisode
from hybridrl.workers.rollout.sampling.sampler import SamplingParams


@register_agent_loop("outside_agent")
class OutsideAgentLoop(AgentLoop):
    """Offers each row at the endpoint, and waits for the program that claims it."""

    has_own_deadline = True
    has_own_pace = True  # a program may play one episode at a time, so none may wait for others to be claimed

    def __init__(self, context: AgentLoopContext):
        super().__init__(context)
        self.player = "the program outside"

    async def run(self, sampling_params: SamplingParams, **row: Any) -> AgentLoopOutput:
        """Return the conversations of the program. Raises AgentFailed if it failed, was late, or sent no request."""
        episode = SessionEpisode.open("outside_agent", self.context, sampling_params, row)
        offered = episode.host.episodes.offer(episode.session, episode.columns)
        try:
            await asyncio.wrap_future(offered.claimed)
            async with self.time_limit(episode.clock):
                end = await asyncio.wrap_future(offered.ended)
        finally:
            episode.host.episodes.withdraw(offered)
            episode.close()
        if end.error is not None and episode.client.failure is None and not episode.ended_by_length:
            raise AgentFailed(f"{self.player} reports: {end.error}", cause="reported by the program")
        return episode.output(end.reward, agent=self.player)
