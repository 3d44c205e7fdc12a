"""`AgentLoopManager`: batches of prompts through agent loops and the router, with the columns that a batched call
gives.

It stands where `generate_sequences` stands (`rollout.mode=async`). Loops and tools run in the driver's process, on the
event loop of a `PolicyService`; the policy's tokens are made by the rollout's processes. Batches and pushes of weights
take effect in the order in which they were asked for, also where nobody waits for them: that is what `trainer.lag`
rests on.

Shapes: B prompts of width P, n samples each, S = B * n rows, R = data.max_response_length.
"""

import asyncio
import copy
import os
from collections.abc import Callable
from concurrent.futures import CancelledError
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from hybridrl.config import PPOConfig
from hybridrl.config.import_path import load_module
from hybridrl.errors import ConfigError
from hybridrl.protocol import DataProto
from hybridrl.serving.agent_loop.base import NO_VERSION, AgentLoop, AgentLoopOutput, AgentSetting, agent_loop
from hybridrl.serving.agent_loop.batch import AgentBatch, read, write_down
from hybridrl.serving.agent_loop.tools import load_tools
from hybridrl.serving.agent_loop.work_queue import Turn, Turns
from hybridrl.serving.openai import Endpoint, Served
from hybridrl.serving.router import GroupReplicas, Outage, Router
from hybridrl.serving.service import PolicyService
from hybridrl.workers.engine.hf_model import overridden_config
from hybridrl.workers.rollout.base import load_special_tokens
from hybridrl.workers.rollout.partial import NO_VERSION as NOT_SAMPLED
from hybridrl.workers.rollout.requests import Request
from hybridrl.workers.rollout.sampling.sampler import SamplingParams, row_seeds, sampling_of

KEY = "actor_rollout_ref.rollout"
SAID = "said"  # column of a batch that is not complete: what the policy has said so far, as `write_down` writes it


@dataclass
class AgentFuture:
    """Responses that are being made, as far as they were asked for. `get` waits for them."""

    manager: "AgentLoopManager"
    prompts: DataProto
    sampling: SamplingParams
    batch: AgentBatch
    turn: Turn
    limit: int = 0  # tokens of each response that were asked for

    def get(self) -> DataProto:
        """Return what `generate_sequences` would; where responses are to go on, the prompts of all S rows with a column
        `said`.

        Raises CancelledError if the service was closed before they were made, or if they have gone on since.
        """
        self.turn.wait()
        return self.manager.collect(self)


class AgentLoopManager:
    """Made once per job, and opened when the rollout's processes are there.

    metrics: `rollout/...` of the batch that was collected last, and how often replicas were lost since the start.
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
        self._turns: Turns | None = None
        self._outages: list[Outage] = []  # of routers before this one
        self.metrics: dict[str, float] = {"rollout/replicas_lost": 0.0, "rollout/requests_retried": 0.0}

    # -- the rollout's processes

    def open(self, group: Any, *, refill: Callable[[int], None] | None, beside: bool) -> None:
        """Serve from these processes until `close`; again after it, when some of them were replaced.

        refill: gives a process that was started anew the current weights; None if none can be. beside: they have
        nothing to do but to generate, so requests are served while the job does other things; if not, only within a
        call that wants responses.
        """
        rollout = self.config.actor_rollout_ref.rollout
        self._loops = {}  # a loop may hold things that belong to one event loop
        self._service = PolicyService(self._replicas(group, version=None, refill=refill))
        self._turns = Turns(self._service, beside=beside)
        if rollout.endpoint_port:
            endpoint = Endpoint(
                self._service.router, self._served(), host=rollout.endpoint_host, port=rollout.endpoint_port
            )
            self._service.call(endpoint.start())
            self._service.at_end.append(endpoint.stop)

    def close(self, *, wait: bool = False) -> None:
        """End what is being made.

        wait: until nothing is asked of the processes any more. Safe to call twice, and before `open`.
        """
        if self._turns is not None:
            self._turns.close(wait=wait)
            self._turns = None
            self._outages += self._service.router.outages

    def _served(self) -> Served:
        """The policy as the endpoint shows it, called by the last part of its path."""
        data, model = self.config.data, self.config.actor_rollout_ref.model
        config = overridden_config(model.path, model.override_config, trust_remote_code=model.trust_remote_code)
        length = data.max_prompt_length + data.max_response_length
        name = os.path.basename(os.path.normpath(model.path))
        return Served(name, self.setting.tokenizer, length, data.max_response_length, config.vocab_size)

    def _replicas(self, group: Any, *, version: int | None, refill: Callable[[int], None] | None) -> GroupReplicas:
        rollout = self.config.actor_rollout_ref.rollout
        return GroupReplicas(group, version=version, progress_timeout_s=rollout.progress_timeout_s, refill=refill)

    def push_later(self, version: int, take: Callable[[], None]) -> Turn:
        """Have the processes take weights, by `take`, after what was asked for before.

        Whoever waits for it is told what went wrong.
        """
        return self._turns.push(version, take)

    # -- batches

    def generate_later(self, prompts: DataProto, *, version: int | None) -> AgentFuture:
        """Have whole responses made, by the weights of this version, which was asked for last.

        prompts: as `generate_sequences` takes them, with the rows' other columns in `non_tensor_batch`, for the loops.
        """
        return self.begin_later(prompts, self.setting.max_response_length, version=version)

    def begin_later(self, prompts: DataProto, max_new_tokens: int, *, version: int | None) -> AgentFuture:
        """Have responses begun, of at most so many tokens, what tools say included."""
        sampling = self._sampling(prompts)
        return self._advance(
            AgentFuture(self, prompts, sampling, self._batch(prompts, sampling), None), max_new_tokens, version=version
        )

    def continue_later(self, begun: Any, max_new_tokens: int, *, version: int | None) -> AgentFuture:
        """Have responses go on that were begun, here or (a future of what `get` returned) by the run that wrote the
        checkpoint.
        """
        if not isinstance(begun, AgentFuture):
            begun = self._restored(begun.get())
        elif begun.batch.was_ended:
            begun = self._restored(self._unfinished(begun))
        return self._advance(begun, max_new_tokens, version=version)

    def generate_on(
        self, group: Any, prompts: DataProto, *, version: int | None, refill: Callable[[int], None] | None = None
    ) -> DataProto:
        """Return whole responses of other processes, while the caller waits; for an evaluator, in any thread."""
        sampling = self._sampling(prompts)
        apart = copy.copy(self)
        apart._loops, apart.metrics = {}, {}  # a loop may hold things that belong to one event loop
        batch = apart._batch(prompts, sampling)

        async def run() -> None:
            async with Router(self._replicas(group, version=version, refill=refill)) as router:
                await batch.advance(
                    router, self.setting.max_response_length, timeout_s=self.config.trainer.call_timeout_s
                )

        asyncio.run(run())
        return self._joined(prompts, batch.outputs, sampling)

    def _advance(self, future: AgentFuture, more: int, *, version: int | None) -> AgentFuture:
        batch, timeout_s = future.batch, self.config.trainer.call_timeout_s
        limit = min(batch.planned + more, self.setting.max_response_length)
        batch.planned = limit
        turn = self._turns.generate(
            version, lambda service: service.call(batch.advance(service.router, limit, timeout_s=timeout_s))
        )
        return replace(future, turn=turn, limit=limit)

    def collect(self, future: AgentFuture) -> DataProto:
        """Return the columns of a future whose turn is over, and look at what happened to replicas."""
        outages = [*self._outages, *self._service.router.outages]
        self.metrics["rollout/replicas_lost"] = float(len(outages))
        self.metrics["rollout/requests_retried"] = float(sum(outage.retried for outage in outages))
        if future.batch.limit != future.limit and not future.batch.is_whole:
            raise CancelledError(f"responses of {future.limit} tokens have gone on to {future.batch.limit} since")
        if future.batch.limit < self.setting.max_response_length:
            return self._unfinished(future)
        outputs = future.batch.outputs
        self.metrics["rollout/num_turns/mean"] = sum(out.num_turns for out in outputs) / max(1, len(outputs))
        return self._joined(future.prompts, outputs, future.sampling)

    def _unfinished(self, future: AgentFuture) -> DataProto:
        rows = future.prompts.repeat(future.sampling.n, interleave=True)
        seeds = torch.tensor([row["request"].seed for row in future.batch.rows], dtype=torch.int64)
        said = np.array([write_down(policy.said) for policy in future.batch.policies], dtype=object)
        limit = torch.full((len(said),), future.batch.limit, dtype=torch.int64)
        columns = dict(rows.batch.items()) | {"seeds": seeds, "limit": limit}
        return DataProto.from_dict(columns, rows.non_tensor_batch | {SAID: said}, meta_info=dict(rows.meta_info))

    def _restored(self, rows: DataProto) -> AgentFuture:
        """What `_unfinished` wrote, in the making again."""
        sampling = self._sampling(rows)
        prompts = rows.select_idxs(torch.arange(len(rows)) % sampling.n == 0)
        limit = int(prompts.batch.pop("limit")[0]) if len(prompts) else 0
        prompts.non_tensor_batch.pop(SAID)
        batch = self._batch(prompts, sampling, said=[read(text) for text in rows.non_tensor_batch[SAID]])
        batch.planned = limit
        return AgentFuture(self, prompts, sampling, batch, None)

    def _sampling(self, prompts: DataProto) -> SamplingParams:
        meta = prompts.meta_info
        return sampling_of(self.config, validate=meta.get("validate", False), seed=meta.get("seed", 0))

    def _batch(self, prompts: DataProto, sampling: SamplingParams, *, said: list | None = None) -> AgentBatch:
        self._num_calls += 1
        one = replace(sampling, n=1)
        return AgentBatch(self._rows(prompts, sampling), lambda row: self._one(row, one), said=said)

    async def _one(self, row: dict[str, Any], sampling: SamplingParams) -> AgentLoopOutput:
        name = row.get("agent_name") or self.config.actor_rollout_ref.rollout.agent.default_agent_loop
        output = await self._loop(name).run(sampling, **row)
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
                    f"{self._num_calls}.{i}.{sample}",
                    tuple(ids[mask].tolist()),
                    replace(sampling, n=1),
                    int(seeds[i]),
                    sample=sample,
                )
                rows.append(own | {"request": request})
        return rows

    def _joined(self, prompts: DataProto, outputs: list[AgentLoopOutput], sampling: SamplingParams) -> DataProto:
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
            "weights_version": torch.tensor(
                [-1 if out.version == NO_VERSION else out.version for out in outputs], dtype=torch.int64
            ),
            "num_turns": torch.tensor([out.num_turns for out in outputs], dtype=torch.int64),
        }
        if self.config.trainer.partial_rollout and not prompts.meta_info.get("validate", False):
            columns["token_versions"] = _padded([out.versions_of_tokens for out in outputs], width, fill=NOT_SAMPLED)
        if sampling.logprobs:
            columns["rollout_log_probs"] = _padded([out.response_logprobs for out in outputs], width, fill=0.0)
        return DataProto.from_dict(tensors=columns, non_tensors={}, meta_info=dict(prompts.meta_info))


def _padded(lists: list[list], width: int, *, fill: float) -> torch.Tensor:
    """Return lists as one tensor (S, width), filled up on the right; int64, or float32 where `fill` is a float."""
    dtype = torch.float32 if isinstance(fill, float) else torch.int64
    return torch.tensor([[*entries, *([fill] * (width - len(entries)))] for entries in lists], dtype=dtype).reshape(
        len(lists), width
    )
