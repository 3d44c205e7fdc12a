"""`CapturedRoutes`: the experts of each token that vLLM computes, for `rollout.enable_rollout_routing_replay`.

vLLM returns experts to its users only with its model runner V2, whose sampler has another interface than `RowSampler`.
Its routers hand them to a capturer with the runner V1, too: `CapturedRoutes` binds vLLM's own capturer, and reads it
after each step. A token that is computed again, after a preemption, replaces what it had.

Imported inside vLLM's worker, by `worker_extension`.

Shapes: N computed tokens, L layers with experts, K experts of a token.
"""

from typing import Any

import numpy as np
import torch
from vllm.config import VllmConfig
from vllm.model_executor.layers.fused_moe.layer import MoERunner
from vllm.model_executor.layers.fused_moe.routed_experts_capturer import (
    RoutedExpertsCapturer,
    bind_routed_experts_capturer,
)

from hybridrl.workers.engine.routing.routes import MISSING, RoutingShape, pack

RowKey = tuple[int | None, int]
"""Number of a batch of served requests (None: the `generate` call), and the row in it."""


class CapturedRoutes:
    """What the routers of vLLM's model chose for each row of the open batches.

    Args:
        runner: vLLM's model runner, whose every step is read.
        config: Of the engine.
    """

    def __init__(self, runner: Any, config: VllmConfig):
        model = runner.get_model()
        self._runner, self._execute = runner, runner.execute_model
        self._capturer = RoutedExpertsCapturer(config.scheduler_config.max_num_batched_tokens, config)
        bind_routed_experts_capturer(model, self._capturer)
        self._layers = sorted(module.layer_id for module in model.modules() if isinstance(module, MoERunner))
        sizes = config.model_config.get_num_experts_per_tok(), config.model_config.get_num_experts()
        self._shape = RoutingShape(len(self._layers), *sizes)
        self._parts: dict[RowKey, list[tuple[int, np.ndarray]]] = {}
        runner.execute_model = self._execute_and_read

    def _execute_and_read(self, scheduled: Any, *args: Any, **kwargs: Any) -> Any:
        result = self._execute(scheduled, *args, **kwargs)
        counts = scheduled.num_scheduled_tokens
        batch = self._runner.input_batch
        found = self._capturer.snapshot_routing_data(scheduled.total_num_scheduled_tokens)[:, self._layers]
        experts, end = pack(found.to(torch.int64), self._shape), 0
        for index, name in enumerate(batch.req_ids):
            start, end = end, end + counts[name]
            named = self._runner.requests[name].sampling_params.extra_args
            key = named.get("batch"), named["row"]
            self._parts.setdefault(key, []).append((int(batch.num_computed_tokens_cpu[index]), experts[start:end]))
        return result

    def forget(self, number: int | None, row: int | None = None) -> None:
        """Forget a row of a batch, or all of its rows."""
        for key in [key for key in self._parts if key[0] == number and row in (None, key[1])]:
            del self._parts[key]

    def entry(self, number: int | None, row: int, length: int) -> np.ndarray:
        """Return the entry of the column of a row's first `length` tokens."""
        entry = np.full((length, self._shape.num_layers, self._shape.top_k), MISSING).astype(self._shape.dtype)
        for start, experts in self._parts.get((number, row), []):
            entry[start : start + len(experts)] = experts[: max(0, length - start)]
        return entry
