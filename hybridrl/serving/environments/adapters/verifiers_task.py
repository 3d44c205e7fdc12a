"""`verifiers`: an environment of the package `verifiers` (0.4) plays its episodes on the policy's endpoint.

    class_name: verifiers
    config:
      env: {taskset: {id: gsm8k}, agent: {harness: {id: "null"}, runtime: {type: subprocess}}}

`env` is the package's own configuration, as in a file of its `eval` command. A row's `idx` in
`extra_info.interaction_kwargs` is the place of its task in the taskset. The reward is that of the package: the mean
over the traces of trained agents.
"""

import os
from typing import Any

API_KEY = "HYBRIDRL_EPISODE_KEY"  # the package reads keys of clients from the environment


class VerifiersTask:
    """One loaded environment; its tasks are read as far as rows ask for them.

    Args:
        env: `verifiers.v1.EnvConfig`.
    """

    def __init__(self, env: dict[str, Any]):
        from verifiers.v1.utils.loaders import environment_class, load_environment

        taskset = env.get("taskset") or {}
        cls = environment_class(taskset.get("id", ""), env.get("id", ""))
        self._env: Any = load_environment(_config_type(cls).model_validate(env))
        self._stream = iter(self._env.taskset)
        self._tasks: list[Any] = []

    async def play(self, task: dict[str, Any]) -> float:
        """Return the reward of one episode. Raises RuntimeError if the package counts it as failed."""
        from verifiers.v1 import EvalClientConfig, ModelContext, SamplingConfig

        os.environ[API_KEY] = task["api_key"]
        client = EvalClientConfig(base_url=task["base_url"], api_key_var=API_KEY)
        context = ModelContext(model=task["model"], client=client, sampling=SamplingConfig())
        async with self._env.serving():
            episode = await self._env.run_episode(self._task(int(task["kwargs"]["idx"])), context)
        if not episode.ok:
            errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
            what = f"{errors[-1].type}: {errors[-1].message}" if errors else "it says no reason"
            raise RuntimeError(f"the episode failed: {what}")
        rewards = [trace.reward for trace in episode.traces if trace.agent.trainable]
        return sum(rewards) / len(rewards)

    def _task(self, idx: int) -> Any:
        while len(self._tasks) <= idx:
            try:
                self._tasks.append(next(self._stream))
            except StopIteration:
                raise LookupError(f"idx={idx}: the taskset has {len(self._tasks)} tasks") from None
        return self._tasks[idx]


def _config_type(cls: type) -> Any:
    """Return the class of the configuration of an environment class."""
    from verifiers.v1 import Env, EnvConfig
    from verifiers.v1.utils.generic import concrete_type

    return concrete_type(cls, EnvConfig, origin=Env) or EnvConfig
