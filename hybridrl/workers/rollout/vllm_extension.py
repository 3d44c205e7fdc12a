"""The part of the `vllm` rollout that vLLM itself imports, by name, inside its worker. Nothing else imports this module.

`RolloutExtension` (worker_extension_cls) takes weights in and reads them back. `RowSampler` (a logits processor) draws the tokens:
vLLM then only picks the one it left possible. So a token depends on its row's seed and not on what else is in the batch, its log-prob
is that of softmax(logits / temperature) whatever top-k and top-p, and vLLM's own log-prob objects (one per token, in Python) and
per-request generators are not paid for.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

import torch
from vllm.config import VllmConfig
from vllm.model_executor.layers import utils as linear_dispatch
from vllm.platforms import current_platform
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor, process_dict_updates

from hybridrl.workers.rollout.fingerprint import fingerprint
from hybridrl.workers.rollout.sampler import SamplingParams, draw_tokens, uniforms

if current_platform.is_cpu():
    # On CPU vLLM packs every Linear into a closure and drops `layer.weight`: weights could then be neither replaced nor read back.
    # With this the layers compute with their plain weight; it has to be in place before the model is built.
    def _keep_plain_weight(layer: torch.nn.Module, remove_weight: bool) -> None:
        layer.cpu_linear = torch.nn.functional.linear

    linear_dispatch.dispatch_cpu_unquantized_gemm = _keep_plain_weight


@dataclass
class Run:
    """One `generate` call: keys (S,) int64 in; tokens (S, R) int64 and log_probs (S, R) float32 as they are drawn."""

    keys: torch.Tensor
    sampling: SamplingParams
    tokens: torch.Tensor
    log_probs: torch.Tensor


class RowSampler(LogitsProcessor):
    """Draws the next token of every request and rules out all others.

    A request names its row of the run in `extra_args["row"]`. The number of its tokens so far is read from vLLM's own list, so a
    request that was preempted and computed again draws the same tokens again.
    """

    run: ClassVar[Run | None] = None  # `generate` blocks, so there is at most one in a process

    def __init__(self, vllm_config: VllmConfig, device: torch.device, is_pin_memory: bool) -> None:
        self._requests: dict[int, tuple[int, list[int]]] = {}  # place in vLLM's batch -> row, tokens so far

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        process_dict_updates(self._requests, batch_update, lambda params, _, tokens: (params.extra_args["row"], tokens))

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        run = self.run
        if run is None:
            return logits
        requests = [self._requests[place] for place in range(len(logits))]
        rows = torch.tensor([row for row, _ in requests], device=logits.device)
        steps = torch.tensor([len(tokens) for _, tokens in requests], device=logits.device)
        tokens, log_probs = draw_tokens(logits, uniforms(run.keys[rows], steps), run.sampling)
        # A prompt that is only partly computed yet draws a token that vLLM throws away; the right one later takes its place here.
        run.tokens[rows, steps] = tokens
        run.log_probs[rows, steps] = log_probs
        return logits.fill_(float("-inf")).scatter_(-1, tokens[:, None], 0.0)


class RolloutExtension:
    """Methods that vLLM's worker gains, called through `LLM.collective_rpc`."""

    def load_rollout_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Copy named weights (Hugging Face names) into the model in place."""
        with torch.no_grad():
            self.model_runner.get_model().load_weights(weights)

    def rollout_fingerprint(self, dtype: torch.dtype) -> int:
        """Return the fingerprint of the parameters that the model computes with."""
        return fingerprint(self.model_runner.get_model().named_parameters(), dtype)

    def start_run(self, keys: torch.Tensor, sampling: SamplingParams) -> None:
        """Draw the tokens of the requests to come with these keys (S,) int64."""
        shape = (len(keys), sampling.max_new_tokens)
        RowSampler.run = Run(
            keys=keys.to(self.device),
            sampling=sampling,
            tokens=torch.zeros(shape, dtype=torch.int64, device=self.device),
            log_probs=torch.zeros(shape, dtype=torch.float32, device=self.device),
        )

    def finish_run(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the run's tokens (S, R) int64 and log_probs (S, R) float32 on CPU; meaningless where nothing was generated."""
        run, RowSampler.run = RowSampler.run, None
        return run.tokens.cpu(), run.log_probs.cpu()
