"""`environment_agent`: the policy and an environment of texts take turns, until the episode ends.

A row names its environment in `extra_info.interaction_kwargs`. Runs in the driver process, on the router's event loop;
the environment runs in a process of its own. What an environment does wrong is sorted by `agent_loop/failures.py`.
"""

from dataclasses import replace
from typing import Any

from hybridrl.algos.partition.row_images import IMAGE_DATA
from hybridrl.errors import ConfigError, DataError
from hybridrl.serving.agent_loop import base
from hybridrl.serving.agent_loop.episode_clock import EpisodeClock
from hybridrl.serving.environments.environment import Answer, Messages
from hybridrl.serving.environments.pool import pool_of
from hybridrl.serving.environments.process import EnvironmentProcess
from hybridrl.serving.environments.settings import load_environments, spec_of_row
from hybridrl.serving.sessions.prompts import render, text_after_answer
from hybridrl.workers.rollout.requests import TokenOutput
from hybridrl.workers.rollout.sampling.sampler import SamplingParams

REWARDED_HERE = "environment"  # data source whose rewards are those of the environments


@base.register_agent_loop("environment_agent")
class EnvironmentAgentLoop(base.AgentLoop):
    """At most `max_turns` turns of the policy. A response ends where an observation does not fit any more."""

    has_own_deadline = True  # waiting for a free process takes nothing from it

    def __init__(self, context: base.AgentLoopContext):
        super().__init__(context)
        self.specs = load_environments(context.environments)
        for spec in self.specs.values():
            pool_of(spec).check()

    def close(self) -> None:
        for spec in self.specs.values():
            pool_of(spec).close()

    async def run(self, sampling_params: SamplingParams, **row: Any) -> base.AgentLoopOutput:
        spec, kwargs = spec_of_row(self.specs, row)
        clock = EpisodeClock.of(row)
        async with pool_of(spec).take(clock) as environment, self.time_limit(clock):
            added = {"name": spec.name, "kwargs": kwargs, "seed": row["request"].seed % 2**31}
            first = await environment.reset(base.columns_of(row) | added)
            return await self.play(environment, first, sampling_params, row)

    async def play(
        self, environment: EnvironmentProcess, first: Messages, sampling_params: SamplingParams, row: dict[str, Any]
    ) -> base.AgentLoopOutput:
        """Return the response of an episode that has begun.

        Args:
            environment: Of this episode.
            first: Messages of the environment that follow the row's prompt.
            sampling_params: For one sample.
            row: As for `run`.
        """
        messages: Messages = [*row.get("raw_prompt", ()), *first]
        response = self._begin(row, messages) if first else self.respond(row)
        rewards: list[float] = []
        is_done = False
        while response.tokens_left > 0:
            output = await response.sample(sampling_params)
            if output.finish_reason != "stop":
                break  # the action is cut off
            action = self.tokenizer.decode(output.token_ids, skip_special_tokens=True)
            answer = await self.act(environment, action, sampling_params, row)
            rewards.append(answer.reward)
            observation, encoded = self.text_of(answer.observation)
            messages += [{"role": "assistant", "content": action}, {"role": "user", "content": observation}]
            is_done = answer.is_done
            if is_done or len(rewards) == self.context.max_turns:
                break
            if not response.observe(*self.encode(self._observation(messages, output), encoded)):
                break
        counts = {"environment/steps": float(len(rewards))}
        if not is_done and (last := await environment.finish()) is not None:
            rewards.append(last)
        reward = _episode_reward(environment, rewards, row)
        return replace(response.output(), reward=reward, counts=counts)

    async def act(
        self, environment: EnvironmentProcess, action: str, sampling_params: SamplingParams, row: dict[str, Any]
    ) -> Answer:
        """Return the environment's answer to an action. Override it where others act in between."""
        return await environment.step(action)

    def _begin(self, row: dict[str, Any], messages: Messages) -> base.ResponseBuilder:
        """Return an empty response to the row's prompt and the first observation."""
        encoded = [*(row.get(IMAGE_DATA) or {"images": ()})["images"]]
        for place, message in enumerate(messages):
            is_of_row = place < len(row.get("raw_prompt", ()))
            text, own = self._with_tags(message["content"]) if is_of_row else self.text_of(message["content"])
            messages[place] = {**message, "content": text}
            encoded += own
        options = self.context.template_options
        prompt, images = self.encode(render(self.tokenizer, messages, (), options=options), encoded)
        if len(prompt) > self.context.max_prompt_length > 0:
            raise DataError(
                f"the prompt and the first observation have {len(prompt)} tokens; data.max_prompt_length is "
                f"{self.context.max_prompt_length}"
            )
        request = replace(row["request"], prompt_ids=tuple(prompt), images=images)
        return base.ResponseBuilder(row["client"], request, self.context.max_response_length)

    def _with_tags(self, content: Any) -> tuple[Any, list[bytes]]:
        """Return a content of the row's prompt with the template's text for each `<image>`."""
        processor = self.context.processor
        if processor is None or not isinstance(content, str):
            return content, []
        return content.replace("<image>", processor.text), []

    def _observation(self, messages: Messages, output: TokenOutput) -> str:
        """Return the text between an action, the last message but one, and the policy's next turn."""
        place, sampled, options = len(messages) - 2, [*output.token_ids][-1:], self.context.template_options
        text = text_after_answer(self.tokenizer, messages, (), answer=place, sampled=sampled, options=options)
        if text is None:
            raise ConfigError(
                "the chat template of actor_rollout_ref.model.path does not show where an answer ends; environments "
                "need one that renders turns of user and assistant one after the other"
            )
        return text


def _episode_reward(environment: EnvironmentProcess, rewards: list[float], row: dict[str, Any]) -> float | None:
    """Return the reward of an episode; None: the run's reward function scores it."""
    rule = environment.spec.reward or ("none" if environment.is_interaction else "sum")
    if rule == "none":
        if row.get("data_source") == REWARDED_HERE:
            raise ConfigError(
                f"data_source={REWARDED_HERE}: the environment {environment.spec.name!r} says no reward (`reward: "
                "none`), and this data source has no score function. Set `reward` of the environment to sum or last, "
                "or name another data source"
            )
        return None
    return sum(rewards) if rule == "sum" else (rewards[-1] if rewards else 0.0)
