"""An agent loop: how one response comes about. `AGENT=1 bash run.sh` uses it.

The tokens of the model are trained, those that `observe` appends are not.
"""

from dataclasses import replace

from hybridrl.serving.agent_loop import AgentLoop, register_agent_loop

HINT = " = "


@register_agent_loop("second_try")
class SecondTry(AgentLoop):
    """Lets the model go on after a hint if its first half of the tokens has no digit."""

    async def run(self, sampling_params, **row):
        """Return the response to one row."""
        response = self.respond(row)
        half = max(1, response.tokens_left // 2)
        await response.sample(replace(sampling_params, max_new_tokens=half))
        has_digit = any(character.isdigit() for character in self.tokenizer.decode(response.ids))
        hint = self.tokenizer.encode(HINT, add_special_tokens=False)
        if not has_digit and response.observe(hint):
            await response.sample(sampling_params)
        return response.output()
