"""`verifiers_agent`: an environment that plays an episode itself, as a client of the endpoint.

Such an environment has a method `play(task)` instead of `reset` and `step`. `task` has the columns of the row, and
`base_url`, `api_key` and `model` of OpenAI's API in a session of this episode alone. It returns the reward. All
conversations of the session are trained, as with `http_agent`. The environment runs in a process of its
own, also with another interpreter.
"""

from typing import Any

from hybridrl.serving.agent_loop.base import AgentLoopContext, register_agent_loop
from hybridrl.serving.agent_loop.programs.session_agent import SessionAgentLoop, SessionEpisode
from hybridrl.serving.environments.pool import pool_of
from hybridrl.serving.environments.settings import load_environments, spec_of_row


@register_agent_loop("verifiers_agent")
class PlayedEnvironmentLoop(SessionAgentLoop):
    """Lets the environment of a row play an episode."""

    def __init__(self, context: AgentLoopContext):
        super().__init__(context)
        self.specs = load_environments(context.environments)
        self.player = "the environment"
        for spec in self.specs.values():
            pool_of(spec).check()

    def close(self) -> None:
        for spec in self.specs.values():
            pool_of(spec).close()

    async def play(self, episode: SessionEpisode) -> Any:
        spec, kwargs = spec_of_row(self.specs, episode.columns)
        async with pool_of(spec).take(episode.clock) as environment, self.time_limit(episode.clock):
            host = episode.host
            endpoint = {"base_url": host.url_of(episode.session.name), "api_key": host.api_key, "model": host.model}
            columns = {**episode.columns, **endpoint, "name": spec.name, "kwargs": kwargs}
            return await environment.play(columns)
