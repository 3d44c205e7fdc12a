"""The agent loop `self_play`: the policy plays both sides of a table; the first player's moves are trained.

The other side sees only the heap that it finds. It samples with the same weights and other random numbers.
"""

from dataclasses import replace
from typing import Any

from hybridrl.serving.agent_loop import register_agent_loop
from hybridrl.serving.environments import Answer
from hybridrl.serving.environments.process import EnvironmentProcess
from hybridrl.serving.environments.text_loop import EnvironmentAgentLoop
from hybridrl.serving.sessions.prompts import encode, render
from hybridrl.workers.rollout import SamplingParams

OTHER_SIDE = 1 << 40  # added to the seed of a row


@register_agent_loop("self_play")
class SelfPlay(EnvironmentAgentLoop):
    async def act(
        self, environment: EnvironmentProcess, action: str, sampling_params: SamplingParams, row: dict[str, Any]
    ) -> Answer:
        """Return what is left after an own move and the move of the other side."""
        own = await environment.step(action)
        if own.is_done:
            return own
        messages = [*row["raw_prompt"], {"role": "user", "content": own.observation}]
        conversation = f"{row['request'].request_id}, other side"
        request = replace(
            row["request"],
            request_id=f"{conversation}, {own.observation}",
            prompt_ids=tuple(encode(self.tokenizer, render(self.tokenizer, messages, ()))),
            sampling=replace(sampling_params, n=1),
            seed=row["request"].seed ^ OTHER_SIDE,
        )
        output = await row["client"].generate(request, conversation=conversation)
        move = self.tokenizer.decode(output.token_ids, skip_special_tokens=True)
        other = await environment.step(move)
        return other._replace(reward=own.reward + other.reward)
