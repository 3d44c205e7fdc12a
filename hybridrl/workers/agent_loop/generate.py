"""`AgentLoopManager`: a batch of prompts through agent loops and the router, with the columns that a batched call gives.

It stands where `generate_sequences` stands (`rollout.mode=async`). Loops and tools run in the driver's process, on one event loop for
the time of the call; the policy's tokens are made by the rollout's processes.

Shapes: B prompts of width P, n samples each, S = B * n rows, R = data.max_response_length.
"""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from hybridrl.config import PPOConfig
from hybridrl.config.import_path import load_module
from hybridrl.errors import ConfigError
from hybridrl.protocol import DataProto
from hybridrl.workers.agent_loop.base import NO_VERSION, AgentLoop, AgentLoopOutput, AgentSetting, agent_loop
from hybridrl.workers.agent_loop.tools import load_tools
from hybridrl.workers.rollout.router import GroupReplicas, Router
from hybridrl.workers.rollout.sampler import SamplingParams, row_seeds
from hybridrl.workers.rollout.sampling import sampling_of
from hybridrl.workers.rollout.serving import Request
from hybridrl.workers.tokens import load_special_tokens

KEY = "actor_rollout_ref.rollout"


class AgentLoopManager:
    """Made once per job; the loops that rows name are made when the first row names them.

    metrics: of the last call, `rollout/...`, and how often replicas were lost since the start.
    """

    def __init__(self, config: PPOConfig, tokenizer: Any):
        self.config, rollout, policy = config, config.actor_rollout_ref.rollout, config.actor_rollout_ref.model
        if rollout.agent.path is not None:
            try:
                load_module(rollout.agent.path)
            except ConfigError as error:
                raise ConfigError(f"{KEY}.agent.path={rollout.agent.path}: {error}") from error
        self.setting = AgentSetting(
            tokenizer=tokenizer,
            max_response_length=config.data.max_response_length,
            tools=load_tools(rollout.multi_turn.function_tool_path, key=f"{KEY}.multi_turn.function_tool_path"),
            max_turns=rollout.multi_turn.max_assistant_turns,
        )
        self._loops: dict[str, AgentLoop] = {}
        self._pad = load_special_tokens(policy.path, trust_remote_code=policy.trust_remote_code).pad_id
        self._loop(rollout.agent.default_agent_loop)  # refused here, not after the start
        self._num_calls = 0
        self.metrics: dict[str, float] = {"rollout/replicas_lost": 0.0, "rollout/requests_retried": 0.0}

    def generate(self, prompts: DataProto, group: Any, *, version: int | None, refill: Callable[[int], None] | None = None) -> DataProto:
        """Return what `ActorRolloutRefWorker.generate_sequences` would, with `num_turns` (S,) int64 beside it.

        prompts: as there, and the rows' other columns in `non_tensor_batch`, for the loops. group: the rollout's processes.
        refill: gives a process that was started anew the current weights; None if none can be.
        """
        meta = prompts.meta_info
        sampling = sampling_of(self.config, validate=meta.get("validate", False), seed=meta.get("seed", 0))
        silence_s = self.config.actor_rollout_ref.rollout.progress_timeout_s
        replicas = GroupReplicas(group, version=version, progress_timeout_s=silence_s, refill=refill)
        self._num_calls += 1
        outputs = asyncio.run(self._run(prompts, sampling, replicas))
        self.metrics["rollout/num_turns/mean"] = sum(out.num_turns for out in outputs) / max(1, len(outputs))
        return self._batch(prompts, outputs, sampling)

    async def _run(self, prompts: DataProto, sampling: SamplingParams, replicas: GroupReplicas) -> list[AgentLoopOutput]:
        rows = self._rows(prompts, sampling)
        async with Router(replicas) as router:
            tasks = [asyncio.create_task(self._one(row, replace(sampling, n=1), router)) for row in rows]
            try:
                outputs = await asyncio.gather(*tasks)
            finally:
                for task in tasks:
                    task.cancel()
        self.metrics["rollout/replicas_lost"] += len(router.outages)
        self.metrics["rollout/requests_retried"] += sum(outage.retried for outage in router.outages)
        return outputs

    async def _one(self, row: dict[str, Any], sampling: SamplingParams, router: Router) -> AgentLoopOutput:
        name = row.get("agent_name") or self.config.actor_rollout_ref.rollout.agent.default_agent_loop
        output = await self._loop(name).run(sampling, client=router, **row)
        router.end_conversation(row["request"].request_id)
        if len(output.response_ids) > self.setting.max_response_length:
            raise ConfigError(
                f"the agent loop {name!r} returned {len(output.response_ids)} tokens; data.max_response_length is "
                f"{self.setting.max_response_length}"
            )
        return output

    def _loop(self, name: str) -> AgentLoop:
        if name not in self._loops:
            self._loops[name] = agent_loop(name)(self.setting)
        return self._loops[name]

    def _rows(self, prompts: DataProto, sampling: SamplingParams) -> list[dict[str, Any]]:
        """One row for each response: the prompt's columns, and the request of its first turn."""
        columns, rows = prompts.batch, []
        seeds = columns["seeds"] if "seeds" in columns else row_seeds(sampling.seed, len(prompts))
        for i, (ids, mask) in enumerate(zip(columns["input_ids"], columns["attention_mask"].bool(), strict=True)):
            own = {name: column[i] for name, column in prompts.non_tensor_batch.items()}
            for sample in range(sampling.n):
                request = Request(
                    f"{self._num_calls}.{i}.{sample}", tuple(ids[mask].tolist()), replace(sampling, n=1), int(seeds[i]), sample=sample
                )
                rows.append(own | {"request": request})
        return rows

    def _batch(self, prompts: DataProto, outputs: list[AgentLoopOutput], sampling: SamplingParams) -> DataProto:
        width = self.setting.max_response_length
        rows = prompts.repeat(sampling.n, interleave=True)
        columns = dict(rows.batch.items())
        lengths = torch.tensor([len(out.response_ids) for out in outputs], dtype=torch.int64)
        is_there = (torch.arange(width) < lengths[:, None]).to(columns["attention_mask"].dtype)
        responses = _padded([out.response_ids for out in outputs], width, fill=self._pad)
        positions = columns["position_ids"][:, -1:] + torch.arange(1, width + 1)
        columns |= {
            "prompts": columns["input_ids"],
            "responses": responses,
            "input_ids": torch.cat([columns["input_ids"], responses], dim=1),
            "attention_mask": torch.cat([columns["attention_mask"], is_there], dim=1),
            "position_ids": torch.cat([columns["position_ids"], positions], dim=1),
            "response_mask": _padded([out.response_mask for out in outputs], width, fill=0),
            "weights_version": torch.tensor([-1 if out.version == NO_VERSION else out.version for out in outputs], dtype=torch.int64),
            "num_turns": torch.tensor([out.num_turns for out in outputs], dtype=torch.int64),
        }
        if sampling.logprobs:
            columns["rollout_log_probs"] = _padded([out.response_logprobs for out in outputs], width, fill=0.0)
        return DataProto.from_dict(tensors=columns, non_tensors={}, meta_info=dict(prompts.meta_info))


def _padded(lists: list[list], width: int, *, fill: float) -> torch.Tensor:
    """Return lists as one tensor (S, width), filled up on the right; int64, or float32 where `fill` is a float."""
    dtype = torch.float32 if isinstance(fill, float) else torch.int64
    return torch.tensor([[*entries, *([fill] * (width - len(entries)))] for entries in lists], dtype=dtype).reshape(len(lists), width)
