"""Serve single requests with the in-process vLLM engine.

One step is one vLLM step for all open requests.

`VLLMRollout.request_engine` returns it, in the rollout's worker process. vLLM batches continuously. `RowSampler` in
`worker_extension`, which this module reaches through `call_worker`, samples the tokens themselves.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch

from hybridrl.algos.partition.row_images import RowImages
from hybridrl.data_plane.futures import stored
from hybridrl.workers.rollout.request_engine import EngineHost, RequestEngine
from hybridrl.workers.rollout.requests import FinishReason, Request, TokenOutput
from hybridrl.workers.rollout.sampling.sampler import SamplingParams, StopCondition, needs_history
from hybridrl.workers.rollout.sampling.scores import ScoreRequest, TokenScores, score_logits
from hybridrl.workers.rollout.vllm.process_state import preserve_process_state

MAX_SHARED_BATCHES = 8  # training and validation need two


class VLLMHost(EngineHost, Protocol):
    """The part of `VLLMRollout` that this module uses."""

    @property
    def engine(self) -> Any:
        """vLLM's own engine."""

    def call_worker(self, method: str, *args: Any) -> Any: ...

    def engine_params(self, row: int, sampling: SamplingParams, stop_condition: StopCondition) -> Any: ...

    def engine_prompt(self, tokens: list[int], images: RowImages | None) -> dict[str, Any]: ...

    def adapter_request(self, number: int) -> Any: ...

    def check_prompt(self, output: Any, tokens: Sequence[int]) -> None: ...


@dataclass
class _BatchSlots:
    """The rows of one `SampledBatch` in the worker: requests with the same sampling parameters share it.

    shared: the parameters under which it is shared; None for the own batch of a request whose next token depends on its
    history.
    """

    number: int
    free_rows: list[int]
    shared: SamplingParams | None


@dataclass
class _PlacedRequest:
    """An open request in its row of a batch."""

    request: Request
    batch: _BatchSlots
    row: int
    version: int
    tokens: list[int] = field(default_factory=list)


class VLLMRequestEngine(RequestEngine):
    """A `RequestEngine` on a `VLLMRollout`, which can generate whole batches while no request is open."""

    rollout: VLLMHost

    def __init__(self, rollout: VLLMHost):
        super().__init__(rollout)
        self._open: dict[str, _PlacedRequest] = {}
        self._shared_batches: dict[SamplingParams, _BatchSlots] = {}
        self._num_batches = self._num_scored = 0
        self._scoring: str | None = None

    def add(self, request: Request) -> None:
        batch = self._batch_for(request)
        row = batch.free_rows.pop()
        try:
            self.rollout.call_worker("assign_slot", batch.number, row, request.key)
            params = self._params(request, batch.number, row)
            with preserve_process_state():
                prompt = self.rollout.engine_prompt(list(request.prompt_ids), request.images)
                adapter = self.rollout.adapter_request(request.adapter)
                self.rollout.engine.add_request(request.request_id, prompt, params, lora_request=adapter)
        except Exception:
            self._free(batch, row)
            raise
        self._open[request.request_id] = _PlacedRequest(request, batch, row, self.rollout.current_version())

    def _params(self, request: Request, number: int, row: int) -> Any:
        from vllm.sampling_params import RequestOutputKind

        params = self.rollout.engine_params(row, request.sampling, self.rollout.stop_condition(request.sampling))
        params.extra_args["batch"] = number
        params.output_kind = RequestOutputKind.DELTA
        return params

    def _batch_for(self, request: Request) -> _BatchSlots:
        """Return a batch with a free row for this request."""
        sampling, stop_condition = request.sampling, self.rollout.stop_condition(request.sampling)
        if needs_history(sampling, stop_condition):
            return self._open_batch([list(request.prompt_ids)], request.key, sampling, request.num_done, shared=None)
        shared = replace(
            sampling, max_new_tokens=self.rollout.setup.max_response_length, seed=0, stop_token_ids=(), ignore_eos=False
        )
        batch = self._shared_batches.get(shared)
        if batch is None or not batch.free_rows:
            # vLLM queues waiting requests itself, so more may be open than it computes at a time. They get another
            # batch.
            self._close_idle_batches()
            keys = torch.zeros(self.rollout.setup.config.max_num_seqs, dtype=torch.int64)
            batch = self._shared_batches[shared] = self._open_batch([[0]] * len(keys), keys, shared, 0, shared=shared)
        return batch

    def _close_idle_batches(self) -> None:
        """Close shared batches without open requests, if there are `MAX_SHARED_BATCHES` or more.

        Each takes memory, and clients of an endpoint choose their own sampling parameters.
        """
        if len(self._shared_batches) < MAX_SHARED_BATCHES:
            return
        for shared, batch in list(self._shared_batches.items()):
            if self._is_idle(batch):
                self.rollout.call_worker("close_batch", batch.number)
                del self._shared_batches[shared]

    def _is_idle(self, batch: _BatchSlots) -> bool:
        return len(batch.free_rows) == self.rollout.setup.config.max_num_seqs

    def _open_batch(
        self,
        prompts: list[list[int]],
        keys: torch.Tensor,
        sampling: SamplingParams,
        num_done: int,
        *,
        shared: SamplingParams | None,
    ) -> _BatchSlots:
        self._num_batches += 1
        self.rollout.call_worker(
            "open_batch", self._num_batches, prompts, keys, sampling, self.rollout.stop_condition(sampling), num_done
        )
        return _BatchSlots(self._num_batches, list(range(len(keys))), shared)

    def step(self) -> list[TokenOutput]:
        with preserve_process_state():
            outputs = self.rollout.engine.step()
        done = []
        for output in outputs:
            # vLLM may still report a request that was aborted in this very step.
            entry = self._open.get(output.request_id)
            if entry is None:
                self._scoring = None if output.request_id == self._scoring else self._scoring
                continue
            self.rollout.check_prompt(output, entry.request.prompt_ids)
            entry.tokens += output.outputs[0].token_ids
            if output.finished:
                done.append(self._close(entry, "length" if output.outputs[0].finish_reason == "length" else "stop"))
        return done

    def score(self, wanted: ScoreRequest) -> tuple[TokenScores, list[TokenOutput]]:
        """Return log-probs of given tokens, and outputs of open requests that finished meanwhile."""
        if len(wanted.tokens) < 2:
            return score_logits(torch.zeros(0, max(1, wanted.num_top)), wanted), []
        from vllm import SamplingParams as EngineParams

        self._num_scored += 1
        self._scoring, done = f"scores-{self._num_scored}", list[TokenOutput]()
        name = self._scoring
        self.rollout.call_worker("expect_scores", name, wanted)
        args = {"row": 0, "batch": -1, "scored": name}  # of no batch: the token that vLLM samples is not used
        params = EngineParams(max_tokens=1, temperature=0.0, prompt_logprobs=0, detokenize=False, extra_args=args)
        prompt, adapter = {"prompt_token_ids": list(wanted.tokens[:-1])}, self.rollout.adapter_request(wanted.adapter)
        with preserve_process_state():
            self.rollout.engine.add_request(name, prompt, params, lora_request=adapter)
        try:
            while self._scoring is not None and self.rollout.engine.has_unfinished_requests():
                done += self._step() if self._unanswered else self.step()  # alone, its error is its own
        except Exception:
            self._start_again()
            raise
        finally:
            if self._scoring is not None:
                self.rollout.engine.abort_request([name])
            self._scoring = None
            scores = self.rollout.call_worker("token_scores", name)
        if scores is None:
            raise RuntimeError(f"vllm rollout: vLLM did not compute all {len(wanted.tokens)} tokens of a prompt")
        return scores, done

    def _start_again(self) -> None:
        """Add open requests anew: vLLM counts a failed step's tokens as computed."""
        requests, self._unanswered = [*self._unanswered.values()], {}
        for request in requests:
            self.abort(request.request_id)
        self._waiting = requests + self._waiting

    def abort(self, request_id: str) -> TokenOutput | None:
        entry = self._open.get(request_id)
        if entry is None:
            return None
        with preserve_process_state():
            self.rollout.engine.abort_request([request_id])
        return self._close(entry, "abort")

    def _close(self, entry: _PlacedRequest, reason: FinishReason) -> TokenOutput:
        """Free the request's row and return its output, after checking that vLLM returned the sampled tokens."""
        name, batch = entry.request.request_id, entry.batch
        tokens, log_probs = self.rollout.call_worker("sampled_tokens", batch.number, entry.row, len(entry.tokens))
        num_computed = len(entry.request.prompt_ids) + len(tokens) - 1
        routes = self.rollout.call_worker("routes", batch.number, {entry.row: num_computed}) if tokens else None
        if tokens != entry.tokens[: len(tokens)]:
            raise RuntimeError(
                f"vllm rollout: vLLM returned other tokens than were sampled for request {name}; its log-probs would "
                "be wrong"
            )
        del self._open[name]
        if len(tokens) < len(entry.tokens):  # a stop string was complete; vLLM then needed one more token to end
            reason = "stop"
        self._free(batch, entry.row)
        return TokenOutput(name, tokens, log_probs, reason, entry.version, routes=stored(routes)[0] if routes else None)

    def _free(self, batch: _BatchSlots, row: int) -> None:
        """Give a row back, and close a batch that nobody else can use."""
        batch.free_rows.append(row)
        if batch.shared is None or (self._shared_batches.get(batch.shared) is not batch and self._is_idle(batch)):
            self.rollout.call_worker("close_batch", batch.number)
