"""The part of the `vllm` rollout that vLLM itself imports, by name, inside its worker. Nothing else imports this
module.

`RolloutExtension` (worker_extension_cls) takes weights in and reads them back. `RowSampler` (a logits processor) draws
the tokens: vLLM then only picks the one it left possible. So a token depends on its row's seed and not on what else is
in the batch, its log-prob is that of softmax(logits / temperature) whatever top-k and top-p, and vLLM's own log-prob
objects (one per token, in Python) and per-request generators are not paid for.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from vllm.config import VllmConfig
from vllm.model_executor.layers import utils as linear_dispatch
from vllm.platforms import current_platform
from vllm.sampling_params import SamplingParams as EngineParams
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor, process_dict_updates

from hybridrl.workers.rollout.memory_release import give_back_pages
from hybridrl.workers.rollout.sampling.logits import Ends, History
from hybridrl.workers.rollout.sampling.sampler import SamplingParams, draw_tokens, uniforms
from hybridrl.workers.rollout.vllm.executor import own_shards, sum_over_group
from hybridrl.workers.weight_transfer.fingerprint import fingerprint

if current_platform.is_cpu():
    # On CPU vLLM packs every Linear into a closure and drops `layer.weight`: weights could then be neither replaced nor
    # read back. With this the layers compute with their plain weight; it has to be in place before the model is built.
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
    history: History | None = None
    end_id: int = 0  # makes vLLM end a request whose stop string is complete; not part of the response

    def draw(self, logits: torch.Tensor, rows: torch.Tensor, steps: torch.Tensor) -> torch.Tensor:
        """Draw token number `steps` (N,) of the sequences `rows` (N,); return logits (N, V), overwritten, that leave
        only it possible.
        """
        history = self.history
        shaped = None if history is None else history.shape(logits, rows, steps)
        tokens, log_probs = draw_tokens(logits, uniforms(self.keys[rows], steps), self.sampling, shaped=shaped)
        # A prompt that is only partly computed yet draws a token that vLLM throws away; the right one later takes its
        # place here.
        self.tokens[rows, steps] = tokens
        self.log_probs[rows, steps] = log_probs
        if history is not None:
            ended = history.ended(rows, steps)
            tokens = tokens.masked_fill(ended, self.end_id)
            history.record(rows[~ended], steps[~ended], tokens[~ended])
        return logits.fill_(float("-inf")).scatter_(-1, tokens[:, None], 0.0)


class RowSampler(LogitsProcessor):
    """Draws the next token of every request and rules out all others.

    A request names its row of the run in `extra_args["row"]`, and the run in `extra_args["run"]` if it is not that of a
    `generate` call but a request that is served (`serving_vllm`). The number of its tokens so far is read from vLLM's
    own list, so a request that was preempted and computed again draws the same tokens again.
    """

    run: ClassVar[Run | None] = None  # `generate` blocks, so there is at most one in a process
    served: ClassVar[dict[int, Run]] = {}  # runs of requests that are served, by number

    def __init__(self, vllm_config: VllmConfig, device: torch.device, is_pin_memory: bool) -> None:
        self._requests: dict[
            int, tuple[int | None, int, list[int]]
        ] = {}  # place in vLLM's batch -> run, row, tokens so far

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        process_dict_updates(self._requests, batch_update, _whose)

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        places: dict[int | None, list[int]] = {}
        for place in range(len(logits)):
            places.setdefault(self._requests[place][0], []).append(place)
        for number, own in places.items():
            run = self.run if number is None else self.served.get(number)
            if run is None:  # vLLM tries itself out, or a request was aborted
                continue
            rows = torch.tensor([self._requests[place][1] for place in own], device=logits.device)
            steps = torch.tensor([len(self._requests[place][2]) for place in own], device=logits.device)
            if len(places) == 1:
                run.draw(logits, rows, steps)
            else:
                chosen = torch.tensor(own, device=logits.device)
                logits[chosen] = run.draw(logits[chosen], rows, steps)
        return logits


def _whose(params: EngineParams, _: Any, tokens: list[int]) -> tuple[int | None, int, list[int]]:
    return params.extra_args.get("run"), params.extra_args["row"], tokens


class RolloutExtension:
    """Methods that vLLM's worker gains, called through `LLM.collective_rpc`."""

    def load_rollout_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Copy named weights (Hugging Face names) into the model in place."""
        with torch.no_grad():
            self.model_runner.get_model().load_weights(weights)

    def rollout_fingerprint(self, dtype: torch.dtype) -> int:
        """Return the fingerprint of the parameters that the model computes with, over all ranks of its tensor-parallel
        group.
        """
        model = self.model_runner.get_model()
        if self.parallel_config.tensor_parallel_size == 1:
            return fingerprint(model.named_parameters(), dtype)
        return sum_over_group(fingerprint(own_shards(model), dtype))

    def rollout_bytes(self) -> int:
        """Return what weights and key-value cache take."""
        held = [*self.model_runner.get_model().parameters(), *self.model_runner.kv_caches]
        storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in held}
        return sum(storages.values())

    def drop_cache(self) -> int:
        """Give the pages of the key-value cache in host memory back; return how many bytes that were."""
        return give_back_pages(self.model_runner.kv_caches)

    def start_run(
        self, prompts: list[list[int]], keys: torch.Tensor, sampling: SamplingParams, ends: Ends, num_done: int
    ) -> None:
        """Draw the tokens of the requests to come with these keys (S,) int64."""
        RowSampler.run = self._run(prompts, keys, sampling, ends, num_done)

    def _run(
        self, prompts: list[list[int]], keys: torch.Tensor, sampling: SamplingParams, ends: Ends, num_done: int
    ) -> Run:
        shape = (len(keys), sampling.max_new_tokens)
        return Run(
            keys=keys.to(self.device),
            sampling=sampling,
            tokens=torch.zeros(shape, dtype=torch.int64, device=self.device),
            log_probs=torch.zeros(shape, dtype=torch.float32, device=self.device),
            history=History.start(prompts, sampling, ends, num_done=num_done, device=self.device),
            end_id=ends.ids[0] if ends.ids else 0,
        )

    def finish_run(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Return the run's tokens (S, R) int64 and log_probs (S, R) float32 on CPU; meaningless where nothing was
        generated.

        Last the most tokens of every response (S,) int64, where stop strings may have ended it; else None.
        """
        run, RowSampler.run = RowSampler.run, None
        return run.tokens.cpu(), run.log_probs.cpu(), None if run.history is None else run.history.lengths.cpu()

    def open_run(
        self,
        number: int,
        prompts: list[list[int]],
        keys: torch.Tensor,
        sampling: SamplingParams,
        ends: Ends,
        num_done: int,
    ) -> None:
        """Draw the tokens of requests that name this run.

        What it has and where it draws to may be changed by `seat`.
        """
        RowSampler.served[number] = self._run(prompts, keys, sampling, ends, num_done)

    def seat(self, number: int, row: int, key: torch.Tensor) -> None:
        """Let a new request with this key (1,) int64 have a row of the run."""
        RowSampler.served[number].keys[row] = key[0]

    def drawn(self, number: int, row: int, length: int) -> tuple[list[int], list[float]]:
        """Return the first `length` tokens of a row of the run, fewer if a stop string ended it, and
        their log-probs.
        """
        run = RowSampler.served[number]
        limit = length if run.history is None else min(length, int(run.history.lengths[row]))
        return run.tokens[row, :limit].tolist(), run.log_probs[row, :limit].tolist()

    def close_run(self, number: int) -> None:
        del RowSampler.served[number]
