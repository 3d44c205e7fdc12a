"""The part of the `vllm` rollout that vLLM imports by name inside its worker. Nothing else imports this module.

`RolloutExtension` (worker_extension_cls) loads weights and fingerprints them. `RowSampler` (a logits processor) samples
the tokens; vLLM then only picks the one token left possible. This has three effects:

  - A token depends on its row's seed and not on the other requests of the batch.
  - Its log-prob is that of softmax(logits / temperature), whatever top-k and top-p are.
  - vLLM's own log-prob objects (one per token, in Python) and per-request generators cost nothing.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from vllm.config import VllmConfig
from vllm.sampling_params import SamplingParams as EngineParams
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor, process_dict_updates

from hybridrl.single_controller.monitoring.work_done import report_work
from hybridrl.workers import engine
from hybridrl.workers.engine.hf_model import reads_images
from hybridrl.workers.rollout.sampling import sampler
from hybridrl.workers.rollout.sampling.logits import TokenHistory
from hybridrl.workers.rollout.sampling.scores import ScoreRequest, TokenScores, joined, score_logits
from hybridrl.workers.rollout.vllm.executor import local_shards, sum_over_group
from hybridrl.workers.rollout.vllm.memory_release import release_pages
from hybridrl.workers.rollout.vllm.route_log import CapturedRoutes
from hybridrl.workers.rollout.vllm.weights.adapters import HeldAdapters
from hybridrl.workers.rollout.vllm.weights.loading import DECAY, PushedDecays, load_weights, pushed_parameters
from hybridrl.workers.weight_transfer.fingerprint import Dtypes, fingerprint

ROWS = 256  # whose logits are in memory together


class PromptScorer:
    """Computes log-probs of given tokens from vLLM's hidden states.

    vLLM's own log-probs of prompts are Python objects per token, have the most likely tokens and no chosen ones, and
    fail with adapters once several requests are in a step. This object takes vLLM's place for requests that name
    themselves in `extra_args["scored"]`: each step that computes a part of such a prompt adds its part of the scores.

    Args:
        model_runner: vLLM's.
        adapters: None: the engine has none.
    """

    def __init__(self, model_runner: Any, adapters: HeldAdapters | None):
        self._runner, self._adapters = model_runner, adapters
        self._prompts: dict[str, tuple[ScoreRequest, list[TokenScores]]] = {}
        model_runner._get_prompt_logprobs_dict = self._score_step

    def expect(self, name: str, wanted: ScoreRequest) -> None:
        """Score the prompt of a request that will be added: all tokens but the last."""
        self._prompts[name] = (wanted, [])

    def scores(self, name: str) -> TokenScores | None:
        """Return a prompt's scores and forget it; None if they are not complete."""
        wanted, parts = self._prompts.pop(name)
        is_complete = sum(len(part.log_probs) for part in parts) == len(wanted.tokens) - 1
        return joined(parts) if is_complete else None

    def _score_step(self, hidden_states: torch.Tensor, num_scheduled: dict[str, int]) -> dict[str, Any]:
        """Score the tokens that a step has computed, in place of vLLM's method."""
        runner = self._runner
        for name in [name for name in runner.num_prompt_logprobs if name in num_scheduled]:
            request, index = runner.requests[name], runner.input_batch.req_id_to_index[name]
            first, start = request.num_computed_tokens, runner.query_start_loc.np[index].item()
            num = min(num_scheduled[name], len(request.prompt_token_ids) - first)
            if found := self._prompts.get(request.sampling_params.extra_args["scored"]):
                wanted, parts = found
                for row in range(0, num, ROWS):
                    rows = hidden_states[start + row : start + min(row + ROWS, num)]
                    parts.append(score_logits(self._logits(rows, wanted.adapter), wanted, first=first + row))
            if first + num >= len(request.prompt_token_ids):
                del runner.num_prompt_logprobs[name]
        return {}

    def _logits(self, hidden_ND: torch.Tensor, adapter: int) -> torch.Tensor:
        if self._adapters is not None:
            self._adapters.use_for_rows(adapter, len(hidden_ND))
        return self._runner.model.compute_logits(hidden_ND)


@dataclass
class SampledBatch:
    """The sequences of one `generate` call or of served requests, and what was sampled for them.

    keys: (S,) int64, input. tokens: (S, R) int64 and log_probs: (S, R) float32, filled by `draw`. history: of a call
    whose next token depends on it. end_id: the token that makes vLLM end a request whose stop string is complete; not
    part of the response. num_drawn: tokens drawn so far, with those that vLLM discards. never: tokens that stand for
    images, which are not drawn. Log-probs stay the model's.
    """

    keys: torch.Tensor
    sampling: sampler.SamplingParams
    tokens: torch.Tensor
    log_probs: torch.Tensor
    history: TokenHistory | None = None
    end_id: int = 0
    num_drawn: int = 0
    never: torch.Tensor | None = None

    def draw(self, logits: torch.Tensor, rows: torch.Tensor, steps: torch.Tensor) -> torch.Tensor:
        """Draw token number `steps` (N,) of sequences `rows` (N,).

        Returns:
            logits (N, V), overwritten in place, in which only the drawn tokens are possible.
        """
        history = self.history
        process = None if history is None else history.processor(logits, rows, steps)
        if self.never is not None:
            process = sampler.without_tokens(self.never, logits, process)
        tokens, log_probs = sampler.draw_tokens(
            logits, sampler.uniforms(self.keys[rows], steps), self.sampling, process=process
        )
        # A partly computed prompt draws a token that vLLM discards. The right one overwrites it here later.
        self.tokens[rows, steps] = tokens
        self.log_probs[rows, steps] = log_probs
        self.num_drawn += len(rows)
        report_work(self.num_drawn, self.tokens.numel(), "tokens")
        if history is not None:
            stopped = history.stopped_before(rows, steps)
            tokens = tokens.masked_fill(stopped, self.end_id)
            history.record(rows[~stopped], steps[~stopped], tokens[~stopped])
        return logits.fill_(float("-inf")).scatter_(-1, tokens[:, None], 0.0)


class RowSampler(LogitsProcessor):
    """Draws the next token of every request and makes all others impossible.

    A request names its row in `extra_args["row"]`. A served request (`request_engine`) also names its batch in
    `extra_args["batch"]`; without one it belongs to the current `generate` call. vLLM's own list of a request's tokens
    gives their number, so a request that was preempted and computed again draws the same tokens again.
    """

    batches: ClassVar[dict[int | None, SampledBatch]] = {}  # of served requests by number; None: of `generate`

    def __init__(self, vllm_config: VllmConfig, device: torch.device, is_pin_memory: bool) -> None:
        # index in vLLM's batch -> number of our batch, row, tokens so far
        self._requests: dict[int, tuple[int | None, int, list[int]]] = {}

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        process_dict_updates(self._requests, batch_update, _request_state)

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        indices_of: dict[int | None, list[int]] = {}
        for index in range(len(logits)):
            indices_of.setdefault(self._requests[index][0], []).append(index)
        for number, indices in indices_of.items():
            batch = self.batches.get(number)
            if batch is None:  # a self-test of vLLM, or the request was aborted
                continue
            rows = torch.tensor([self._requests[index][1] for index in indices], device=logits.device)
            steps = torch.tensor([len(self._requests[index][2]) for index in indices], device=logits.device)
            if len(indices_of) == 1:
                batch.draw(logits, rows, steps)
            else:
                chosen = torch.tensor(indices, device=logits.device)
                logits[chosen] = batch.draw(logits[chosen], rows, steps)
        return logits


def _request_state(params: EngineParams, _: Any, tokens: list[int]) -> tuple[int | None, int, list[int]]:
    assert params.extra_args is not None, "every request names its row there"
    return params.extra_args.get("batch"), params.extra_args["row"], tokens


class RolloutExtension:
    """Methods added to vLLM's worker; the rollout calls them through `LLM.collective_rpc`."""

    _routes: CapturedRoutes | None = None
    _decays: PushedDecays | None = None
    _adapters: HeldAdapters | None = None
    _scorer: PromptScorer | None = None

    device: torch.device  # these four are attributes of vLLM's worker
    model_runner: Any
    parallel_config: Any
    vllm_config: VllmConfig

    def log_routes(self) -> None:
        """Keep the experts of every token from now on."""
        self._routes = CapturedRoutes(self.model_runner, self.vllm_config)

    def routes(self, number: int | None, lengths: dict[int, int]) -> list[np.ndarray] | None:
        """Return a batch's routes, one entry per row, and forget them; None if not kept.

        Args:
            number: Of the batch; None: the last `generate` call.
            lengths: Row -> tokens of its entry.
        """
        if self._routes is None:
            return None
        entries = [self._routes.entry(number, row, length) for row, length in lengths.items()]
        for row in lengths:
            self._routes.forget(number, row)
        return entries

    def hold_adapters(self) -> None:
        """Let requests name adapters from now on."""
        self._adapters = HeldAdapters(self.model_runner.lora_manager)

    def add_adapter(self, number: int, tensors: Mapping[str, torch.Tensor], scale: float) -> None:
        """Hold an adapter, see `HeldAdapters.add`."""
        assert self._adapters is not None, "`hold_adapters` comes first"
        self._adapters.add(number, tensors, scale)

    def drop_adapter(self, number: int) -> None:
        """Forget an adapter that no open request names."""
        assert self._adapters is not None, "`hold_adapters` comes first"
        self._adapters.drop(number)

    def adapter_bytes(self) -> dict[str, int]:
        """Return the bytes of adapters, see `HeldAdapters.num_bytes`."""
        return {} if self._adapters is None else self._adapters.num_bytes()

    def expect_scores(self, name: str, wanted: ScoreRequest) -> None:
        """Score the prompt of a request that will be added, see `PromptScorer`."""
        self._scorer = self._scorer or PromptScorer(self.model_runner, self._adapters)
        self._scorer.expect(name, wanted)

    def token_scores(self, name: str) -> TokenScores | None:
        """Return a prompt's scores, see `PromptScorer.scores`."""
        assert self._scorer is not None, "`expect_scores` comes first"
        return self._scorer.scores(name)

    def load_rollout_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Load named weights (Hugging Face names) into the model's own tensors."""
        self._decays = self._decays or PushedDecays()
        load_weights(self.model_runner.get_model(), self._decays.noted(weights), config=self.vllm_config)

    def rollout_fingerprint(self, dtype: Dtypes) -> int:
        """Return the fingerprint of the model's parameters, over all ranks of its tensor-parallel group."""
        model = self.model_runner.get_model()
        is_whole = self.parallel_config.tensor_parallel_size == 1
        own = [*pushed_parameters(model.named_parameters() if is_whole else local_shards(model))]
        parts = [
            fingerprint([pair for pair in own if not pair[0].endswith(DECAY)], dtype),
            fingerprint([pair for pair in own if pair[0].endswith(DECAY)], torch.float32),
        ]
        others, decays = parts if is_whole else map(sum_over_group, parts)
        return (others + (self._decays.fingerprint(decays, dtype) if self._decays else decays)) % (1 << 64)

    def rollout_bytes(self) -> int:
        """Return the bytes of weights and key-value cache."""
        tensors = [*self.model_runner.get_model().parameters(), *self.model_runner.kv_caches]
        storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
        return sum(storages.values())

    def release_cache(self) -> int:
        """Release the host pages of the key-value cache and return the number of bytes released."""
        return release_pages(self.model_runner.kv_caches)

    def open_batch(
        self,
        number: int | None,
        prompts: list[list[int]],
        keys: torch.Tensor,
        sampling: sampler.SamplingParams,
        stop_condition: sampler.StopCondition,
        num_done: int,
    ) -> None:
        """Create a batch of sequences with these keys (S,) int64.

        Args:
            number: Of a batch of served requests, to which `assign_slot` gives its rows. None: of the next `generate`.
        """
        if number is None and self._routes is not None:
            self._routes.forget(None)
        config, shape, history = self.vllm_config.model_config.hf_config, (len(keys), sampling.max_new_tokens), None
        if sampler.needs_history(sampling, stop_condition):
            history = TokenHistory(prompts, sampling, stop_condition, num_done=num_done, device=self.device)
        RowSampler.batches[number] = SampledBatch(
            keys=keys.to(self.device),
            sampling=sampling,
            tokens=torch.zeros(shape, dtype=torch.int64, device=self.device),
            log_probs=torch.zeros(shape, dtype=torch.float32, device=self.device),
            history=history,
            end_id=stop_condition.ids[0] if stop_condition.ids else 0,
            never=torch.tensor(engine.placeholder_ids(config), device=self.device) if reads_images(config) else None,
        )

    def finish_batch(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Return what the `generate` call sampled, on CPU, and end its batch.

        Returns:
            tokens (S, R) int64 and log_probs (S, R) float32, undefined where nothing was generated; then the length
            limit of every response (S,) int64 where stop strings may have ended it, else None.
        """
        batch = RowSampler.batches.pop(None)
        return batch.tokens.cpu(), batch.log_probs.cpu(), None if batch.history is None else batch.history.lengths.cpu()

    def assign_slot(self, number: int, row: int, key: torch.Tensor) -> None:
        """Assign a row of the batch to a new request with this key (1,) int64."""
        RowSampler.batches[number].keys[row] = key[0]
        if self._routes is not None:
            self._routes.forget(number, row)

    def sampled_tokens(self, number: int, row: int, length: int) -> tuple[list[int], list[float]]:
        """Return the first `length` tokens of a row and their log-probs.

        Fewer if a stop string ended it.
        """
        batch = RowSampler.batches[number]
        limit = length if batch.history is None else min(length, int(batch.history.lengths[row]))
        return batch.tokens[row, :limit].tolist(), batch.log_probs[row, :limit].tolist()

    def close_batch(self, number: int) -> None:
        del RowSampler.batches[number]
