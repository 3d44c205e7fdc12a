"""Which classes are agent loops."""

import pytest

from hybridrl.errors import ConfigError
from hybridrl.serving.agent_loop import AgentLoop, register_agent_loop
from hybridrl.serving.agent_loop.base import AGENT_LOOPS


class Today(AgentLoop):
    """verl's form since 0.6: the loop asks a server manager."""

    async def run(self, sampling_params, **kwargs):
        return await self.server_manager.generate(request_id="1", prompt_ids=[], sampling_params=sampling_params)


class OwnConstructor(AgentLoop):
    def __init__(self, trainer_config, server_manager, tokenizer, processor, **kwargs):
        self.manager = server_manager

    async def run(self, sampling_params, **kwargs): ...


class Old(AgentLoop):
    """verl's form in 0.5."""

    async def run(self, messages, sampling_params): ...


@pytest.mark.parametrize(
    ("cls", "problem"),
    [
        (Today, "uses init_class or server_manager, as in verl"),
        (OwnConstructor, r"has another __init__ \(missing a required argument: 'server_manager'\)"),
        (Old, r"has another run \(missing a required argument: 'sampling_params'\)"),
    ],
)
def test_a_loop_in_verls_form_is_refused_with_the_form_that_it_has_here(cls, problem):
    with pytest.raises(ConfigError, match=rf"'mine' \({cls.__name__}\) {problem}; here it is\n.*\n.*sampling_params, "):
        register_agent_loop("mine")(cls)
    assert "mine" not in AGENT_LOOPS
