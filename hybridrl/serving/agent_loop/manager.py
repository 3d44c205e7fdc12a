"""`AgentLoopManager`: generate batches by agent loops (`rollout.mode=async`), with the columns of a batched call.

It is the `Generator` of the trainer's pipeline (`trainer/ppo/policy/generator.py`), in place of batched calls to the
worker group. Loops and tools run in the driver process, on the event loop of a `PolicyService`. The rollout processes
generate the policy's tokens. Batches and weight pushes take effect in submission order, also where the caller does not
wait for them. `trainer.lag` depends on this order.

Shapes: B prompts of width P, n samples each, S = B * n rows, R = data.max_response_length.
"""

import asyncio
import copy
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch

from hybridrl.algos.partition.row_images import images_of
from hybridrl.config import PPOConfig
from hybridrl.data_plane.meta_info import GenerationRequest
from hybridrl.errors import ConfigError
from hybridrl.import_path import load_module
from hybridrl.protocol import DataProto
from hybridrl.serving.agent_loop import base
from hybridrl.serving.agent_loop.batch import AgentBatch
from hybridrl.serving.agent_loop.failures import leave_out_groups
from hybridrl.serving.agent_loop.recorded_row import RecordedRow, pop_records, to_columns
from hybridrl.serving.agent_loop.response_columns import ResponseColumns
from hybridrl.serving.agent_loop.short_round import chosen_responses, generate_short_round
from hybridrl.serving.agent_loop.tools.function_tools import load_tools
from hybridrl.serving.openai import Endpoint, ServedModel
from hybridrl.serving.replicas import GroupReplicas, ReplicaOutage, Resync
from hybridrl.serving.router import ReplicaRouter
from hybridrl.serving.service import Generate, PendingLoad, PolicyService
from hybridrl.workers.engine.hf_model import overridden_config
from hybridrl.workers.images import load_processor
from hybridrl.workers.rollout.base import load_special_tokens
from hybridrl.workers.rollout.requests import Request
from hybridrl.workers.rollout.sampling.sampler import SamplingParams, default_seeds, sampling_params

KEY = "actor_rollout_ref.rollout"
AGENT_METRICS = "rollout/agent/"


class AgentLoopManager:
    """Created once per job; opened when the rollout processes are running.

    `metrics`: `rollout/...` of the last collected batch, and the number of replica losses since the start.
    """

    reads_other_columns = True  # loops get the columns of their row

    def __init__(self, config: PPOConfig, tokenizer: Any):
        self.config, rollout, model = config, config.actor_rollout_ref.rollout, config.actor_rollout_ref.model
        if rollout.agent.path is not None:
            try:
                load_module(rollout.agent.path)
            except ConfigError as error:
                raise ConfigError(f"{KEY}.agent.path={rollout.agent.path}: {error}") from error
        self.context = base.AgentLoopContext(
            tokenizer=tokenizer,
            max_response_length=config.data.max_response_length,
            tools=load_tools(rollout.multi_turn.function_tool_path, key=f"{KEY}.multi_turn.function_tool_path"),
            max_turns=rollout.multi_turn.max_assistant_turns,
            max_prompt_length=config.data.max_prompt_length,
            template_options=config.data.apply_chat_template_kwargs,
            program=rollout.agent.program,
            environments=rollout.multi_turn.interaction_config_path,
            trains_branches=rollout.agent.train_branches,
            agent_timeout_s=math.inf if rollout.agent.timeout_s is None else rollout.agent.timeout_s,
            processor=load_processor(model, tokenizer, config.data),
        )
        self._loops: dict[str, base.AgentLoop] = {}
        assert model.path is not None  # `check_config` demands it
        self._pad_id = load_special_tokens(model.path, trust_remote_code=model.trust_remote_code).pad_id
        self._get_loop(rollout.agent.default_agent_loop)  # an unknown name fails here, before anything starts
        self._num_calls = 0
        self._service: PolicyService | None = None
        self._past_outages: list[ReplicaOutage] = []  # of earlier routers
        self.metrics: dict[str, float] = {"rollout/replicas_lost": 0.0, "rollout/requests_retried": 0.0}

    # -- the rollout's processes

    def open(self, group: Any, *, resync: Resync | None, concurrent: bool) -> None:
        """Serve from these processes until `close`. May be called again, for instance after some were replaced.

        Args:
            group: The rollout processes.
            resync: Sends the current weights to restarted processes; None if the router cannot restart any.
            concurrent: The processes only generate, so requests are served while the driver trains. False: requests are
                served only during a call that generates.
        """
        rollout = self.config.actor_rollout_ref.rollout
        self._loops = {}  # a loop may hold objects that belong to one event loop
        replicas = self._replicas(group, version=None, resync=resync)
        self._service = service = PolicyService(replicas, concurrent=concurrent)
        if rollout.endpoint_port:
            endpoint = Endpoint(
                service.router, self._served_model(), host=rollout.endpoint_host, port=rollout.endpoint_port
            )
            service.call(endpoint.start())
            service.on_close.append(endpoint.stop)
            self.context = replace(self.context, session_host=endpoint.session_host)

    def close(self, *, wait: bool = False) -> None:
        """Stop generating. Safe to call twice, and before `open`.

        Args:
            wait: Return only when no process has a call in flight.
        """
        if (service := self._service) is not None:
            service.close(wait=wait)
            self._service = None
            self._past_outages += service.router.outages
        self._close_loops()

    def _close_loops(self) -> None:
        for loop in self._loops.values():
            loop.close()

    def _served_model(self) -> ServedModel:
        """Return the policy as the endpoint shows it, named by the last part of its path."""
        data, model = self.config.data, self.config.actor_rollout_ref.model
        assert model.path is not None  # `check_config` demands it
        config = overridden_config(model.path, model.override_config, trust_remote_code=model.trust_remote_code)
        length = data.max_prompt_length + data.max_response_length
        name = os.path.basename(os.path.normpath(model.path))
        sizes = length, data.max_response_length, config.get_text_config().vocab_size
        processor = self.context.processor
        return ServedModel(name, self.context.tokenizer, *sizes, data.apply_chat_template_kwargs, processor=processor)

    def _replicas(self, group: Any, *, version: int | None, resync: Resync | None) -> GroupReplicas:
        rollout = self.config.actor_rollout_ref.rollout
        return GroupReplicas(
            group,
            version=version,
            progress_timeout_s=rollout.progress_timeout_s,
            resync=resync,
            num_peers=rollout.tensor_model_parallel_size,
        )

    def push(self, version: int, receive: Callable[[], PendingLoad]) -> PendingLoad:
        """Let the processes receive weights, after everything submitted before.

        The result's `wait` raises what went wrong.

        Args:
            version: Version of the weights.
            receive: Starts the rollout's half of the push.
        """
        return self._opened().push(version, receive)

    def _opened(self) -> PolicyService:
        if self._service is None:
            raise RuntimeError("the agent loops are closed; call open() with the rollout's worker group first")
        return self._service

    # -- batches

    def submit(
        self, prompts: Any, *, version: int | None, max_new_tokens: int | None = None, num_prompts: int | None = None
    ) -> AgentBatch:
        """Start generating responses, or more tokens of open ones.

        Args:
            prompts: As for `generate_sequences`; `non_tensor_batch` has the rows' other columns, for the loops. Or what
                `submit` returned, or an object whose `get` returns the incomplete batch from a checkpoint.
            version: Version of the weights, the last one pushed.
            max_new_tokens: Most new tokens of each response, tool answers included. None: whole responses.
            num_prompts: Generate until so many groups are complete (`short_round`). None: all.
        """
        batch = self._batch(prompts) if isinstance(prompts, DataProto) else self._reopened(prompts)
        longest, timeout_s = self.context.max_response_length, self.config.trainer.call_timeout_s
        limit = min(batch.requested_limit + (longest if max_new_tokens is None else max_new_tokens), longest)
        generate: Generate = partial(batch.advance, limit=limit, timeout_s=timeout_s)
        if num_prompts is not None:
            settings: dict[str, Any] = {"num_groups": num_prompts, "max_new_tokens": limit, "timeout_s": timeout_s}
            generate = partial(generate_short_round, batch, **settings)
        batch.requested_limit = limit
        batch.work = self._opened().generate(version, generate)
        return batch

    def _reopened(self, partial: Any) -> AgentBatch:
        """Return a batch whose loops can continue, of open responses as `submit` gets them."""
        if not isinstance(partial, AgentBatch):
            return self._restore(partial.get())
        return self._restore(_incomplete_batch(partial)) if partial.was_aborted else partial

    def generate_on(
        self, group: Any, prompts: DataProto, *, version: int | None, resync: Resync | None = None
    ) -> DataProto:
        """Return whole responses from another group's processes. Blocks; an evaluator calls it in any thread."""
        copied = copy.copy(self)
        copied._loops, copied.metrics = {}, {}  # a loop may hold objects that belong to one event loop
        batch = copied._batch(prompts)

        async def run() -> None:
            async with ReplicaRouter(self._replicas(group, version=version, resync=resync)) as router:
                await batch.advance(
                    router, self.context.max_response_length, timeout_s=self.config.trainer.call_timeout_s
                )

        try:
            asyncio.run(run())
        finally:
            copied._close_loops()
        return copied._to_batch(prompts, batch.outputs)

    def _collect(self, batch: AgentBatch) -> DataProto:
        """Return the columns of a batch as far as it was generated, and update the replica metrics."""
        outages = [*self._past_outages, *([] if self._service is None else self._service.router.outages)]
        self.metrics["rollout/replicas_lost"] = float(len(outages))
        self.metrics["rollout/requests_retried"] = float(sum(outage.num_retried for outage in outages))
        if batch.chosen is not None:
            return self._to_batch(*chosen_responses(batch))
        if batch.limit < batch.last_limit:
            return _incomplete_batch(batch)
        return self._to_batch(batch.prompts, batch.outputs)

    def _restore(self, rows: DataProto) -> AgentBatch:
        """Return a batch that continues what `_incomplete_batch` wrote."""
        rows = rows.select()
        recorded = pop_records(rows.non_tensor_batch)
        prompts = rows.select_idxs(torch.arange(len(rows)) % self._sampling(rows).n == 0)
        limit = int(cast(torch.Tensor, prompts.batch.pop("limit"))[0]) if len(prompts) else 0
        batch = self._batch(prompts, recorded=recorded)
        batch.requested_limit = limit
        return batch

    def _sampling(self, prompts: DataProto) -> SamplingParams:
        request = GenerationRequest.of(prompts.meta_info)
        return sampling_params(self.config, validate=request.validate, seed=request.seed, greedy=request.greedy)

    def _batch(self, prompts: DataProto, *, recorded: list[RecordedRow] | None = None) -> AgentBatch:
        self._num_calls += 1
        sampling = self._sampling(prompts)
        one = replace(sampling, n=1)

        async def run_loop(row: dict[str, Any], is_retry: bool) -> base.AgentLoopOutput:
            return await self._run_row(row, one, is_retry=is_retry)

        return AgentBatch(
            prompts,
            self._rows(prompts, sampling),
            run_loop,
            last_limit=self.context.max_response_length,
            has_own_pace=lambda row: base.lookup_agent_loop(self._loop_name(row)).has_own_pace,
            recorded=recorded,
            collect=self._collect,
        )

    def _loop_name(self, row: Mapping[str, Any]) -> str:
        return row.get("agent_name") or self.config.actor_rollout_ref.rollout.agent.default_agent_loop

    async def _run_row(self, row: dict[str, Any], sampling: SamplingParams, *, is_retry: bool) -> base.AgentLoopOutput:
        name = self._loop_name(row)
        output = await self._get_loop(name, is_new=is_retry).run_in_time(sampling, **row)
        longest = max(len(one.response_ids) for one in (output, *output.branches))
        if longest > self.context.max_response_length:
            raise ConfigError(
                f"the agent loop {name!r} returned {longest} tokens; data.max_response_length is "
                f"{self.context.max_response_length}"
            )
        request = row["request"]
        has_own = output.images is not None or tuple(output.prompt_ids) != request.prompt_ids
        return output if has_own else replace(output, images=request.images)

    def _get_loop(self, name: str, *, is_new: bool = False) -> base.AgentLoop:
        """Return the loop of this name. is_new: another object, also for all later rows."""
        if is_new or name not in self._loops:
            self._loops[name] = base.lookup_agent_loop(name)(self.context)
        return self._loops[name]

    def _rows(self, prompts: DataProto, sampling: SamplingParams) -> list[dict[str, Any]]:
        """Return one row per response: the prompt's columns, and the request of its first turn."""
        columns, images, rows = prompts.batch, images_of(prompts) or [None] * len(prompts), []
        seeds = columns["seeds"] if "seeds" in columns else default_seeds(sampling.seed, len(prompts))
        for i, (ids, mask) in enumerate(zip(columns["input_ids"], columns["attention_mask"].bool(), strict=True)):
            own = {name: column[i] for name, column in prompts.non_tensor_batch.items()}
            for sample in range(sampling.n):
                request = Request(
                    f"{self._num_calls}.{i}.{sample}",
                    tuple(ids[mask].tolist()),
                    replace(sampling, n=1),
                    int(seeds[i]),
                    sample=sample,
                    images=images[i],
                )
                rows.append(own | {"request": request})
        return rows

    def _to_batch(self, prompts: DataProto, outputs: list[base.AgentLoopOutput]) -> DataProto:
        agent, sampling = self.config.actor_rollout_ref.rollout.agent, self._sampling(prompts)
        outputs = leave_out_groups(outputs, n=sampling.n, min_share=agent.min_group_share)
        self.metrics = {name: value for name, value in self.metrics.items() if not name.startswith(AGENT_METRICS)}
        self.metrics |= _summed_counts(outputs)
        self.metrics["rollout/num_turns/mean"] = sum(out.num_turns for out in outputs) / max(1, len(outputs))
        is_training = not GenerationRequest.of(prompts.meta_info).validate
        columns = ResponseColumns(
            width=self.context.max_response_length,
            pad_id=self._pad_id,
            log_probs=bool(sampling.logprobs),
            token_versions=is_training and self.config.trainer.partial_rollout,
            routes=is_training and self.config.actor_rollout_ref.rollout.enable_rollout_routing_replay,
            branches=is_training and agent.train_branches,
        )
        return columns.batch(prompts.repeat(sampling.n, interleave=True), outputs)


def _summed_counts(outputs: list[base.AgentLoopOutput]) -> dict[str, float]:
    """Return the sums of the responses' own counts, as metrics."""
    names = sorted({name for out in outputs for name in out.counts})
    return {f"{AGENT_METRICS}{name}": sum(out.counts.get(name, 0.0) for out in outputs) for name in names}


def _incomplete_batch(batch: AgentBatch) -> DataProto:
    """Return the prompts of all rows, and what a resumed run needs of their responses."""
    rows = batch.prompts.repeat(batch.n, interleave=True)
    seeds = torch.tensor([row["request"].seed for row in batch.rows], dtype=torch.int64)
    limit = torch.full((len(rows),), batch.limit, dtype=torch.int64)
    columns = cast(dict[str, torch.Tensor], dict(rows.batch.items())) | {"seeds": seeds, "limit": limit}
    others = rows.non_tensor_batch | to_columns(batch.records())
    return DataProto.from_dict(columns, others, meta_info=dict(rows.meta_info))
