"""The default agent loop: one prompt, one response."""

from typing import Any

from hybridrl.serving.agent_loop.base import AgentLoop, AgentLoopOutput, register_agent_loop
from hybridrl.workers.rollout.sampling.sampler import SamplingParams


@register_agent_loop("single_turn_agent")
class SingleTurnAgentLoop(AgentLoop):
    """Generates the same tokens as one batched call (`rollout.mode=sync`)."""

    async def run(self, sampling_params: SamplingParams, **row: Any) -> AgentLoopOutput:
        response = self.respond(row)
        await response.sample(sampling_params)
        return response.output()
