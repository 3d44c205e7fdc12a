"""Requests that come and go on the in-process vLLM engine: one `step` is one of vLLM's, for all that are open
(continuous batching).
"""

from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch

from hybridrl.workers.rollout.base import RolloutSetup
from hybridrl.workers.rollout.requests import FinishReason, Request, TokenOutput, looks_back
from hybridrl.workers.rollout.sampling.logits import Ends
from hybridrl.workers.rollout.sampling.sampler import SamplingParams
from hybridrl.workers.rollout.vllm.process_state import process_left_alone

MOST_SHARED_RUNS = 8  # training and validation need two


class EngineHost(Protocol):
    """What this module needs of a `VLLMRollout`."""

    setup: RolloutSetup

    @property
    def engine(self) -> Any:
        """vLLM's own engine."""

    def call_worker(self, method: str, *args: Any) -> Any: ...

    def current_version(self) -> int: ...

    def ends(self, sampling: SamplingParams) -> Ends: ...

    def engine_params(self, row: int, sampling: SamplingParams, ends: Ends) -> Any: ...


@dataclass
class _Run:
    """Rows that draw with the same sampling parameters.

    A request whose next token depends on its history has a run of its own.
    """

    number: int
    free: list[int]
    shared: SamplingParams | None


@dataclass
class _Open:
    request: Request
    run: _Run
    row: int
    version: int
    tokens: list[int] = field(default_factory=list)


class VLLMEngine:
    """Serves with a `VLLMRollout`, which can generate whole batches whenever no request is open."""

    def __init__(self, rollout: EngineHost):
        self.rollout = rollout
        self._open: dict[str, _Open] = {}
        self._shared: dict[SamplingParams, _Run] = {}
        self._num_runs = 0

    def num_open(self) -> int:
        return len(self._open)

    def is_open(self, request_id: str) -> bool:
        return request_id in self._open

    def add(self, request: Request) -> None:
        run = self._run_for(request)
        row = run.free.pop()
        self.rollout.call_worker("seat", run.number, row, request.key)
        self._open[request.request_id] = _Open(request, run, row, self.rollout.current_version())
        with process_left_alone():
            self.rollout.engine.add_request(
                request.request_id,
                {"prompt_token_ids": list(request.prompt_ids)},
                self._params(request, run.number, row),
            )

    def _params(self, request: Request, number: int, row: int) -> Any:
        from vllm.sampling_params import RequestOutputKind

        params = self.rollout.engine_params(row, request.sampling, self.rollout.ends(request.sampling))
        params.extra_args["run"] = number
        params.output_kind = RequestOutputKind.DELTA
        return params

    def _run_for(self, request: Request) -> _Run:
        """A run with a free row for this request."""
        sampling, ends = request.sampling, self.rollout.ends(request.sampling)
        if looks_back(sampling, ends):
            return self._open_run([list(request.prompt_ids)], request.key, sampling, request.num_done, shared=None)
        kind = replace(
            sampling, max_new_tokens=self.rollout.setup.max_response_length, seed=0, stop_token_ids=(), ignore_eos=False
        )
        run = self._shared.get(kind)
        if run is None or not run.free:
            # vLLM keeps waiting requests itself, so there may be more than it computes at the same time; then there is
            # another run.
            self._close_idle_runs()
            keys = torch.zeros(self.rollout.setup.config.max_num_seqs, dtype=torch.int64)
            run = self._shared[kind] = self._open_run([[0]] * len(keys), keys, kind, 0, shared=kind)
        return run

    def _close_idle_runs(self) -> None:
        """Forget runs that nothing is open in, when there are many: each takes memory, and an endpoint's clients ask
        for what they like.
        """
        if len(self._shared) < MOST_SHARED_RUNS:
            return
        for kind, run in list(self._shared.items()):
            if len(run.free) == self.rollout.setup.config.max_num_seqs:
                self.rollout.call_worker("close_run", run.number)
                del self._shared[kind]

    def _open_run(
        self,
        prompts: list[list[int]],
        keys: torch.Tensor,
        sampling: SamplingParams,
        num_done: int,
        *,
        shared: SamplingParams | None,
    ) -> _Run:
        self._num_runs += 1
        self.rollout.call_worker(
            "open_run", self._num_runs, prompts, keys, sampling, self.rollout.ends(sampling), num_done
        )
        return _Run(self._num_runs, list(range(len(keys))), shared)

    def step(self) -> list[TokenOutput]:
        with process_left_alone():
            outputs = self.rollout.engine.step()
        done = []
        for output in outputs:
            # A request that was aborted in this very step may still be reported.
            entry = self._open.get(output.request_id)
            if entry is None:
                continue
            entry.tokens += output.outputs[0].token_ids
            if output.finished:
                done.append(self._close(entry, "length" if output.outputs[0].finish_reason == "length" else "stop"))
        return done

    def abort(self, request_id: str) -> TokenOutput | None:
        entry = self._open.get(request_id)
        if entry is None:
            return None
        with process_left_alone():
            self.rollout.engine.abort_request([request_id])
        return self._close(entry, "abort")

    def _close(self, entry: _Open, reason: FinishReason) -> TokenOutput:
        """Return what was drawn, after checking that vLLM returned the same tokens, and give the row back."""
        name, run = entry.request.request_id, entry.run
        tokens, log_probs = self.rollout.call_worker("drawn", run.number, entry.row, len(entry.tokens))
        if tokens != entry.tokens[: len(tokens)]:
            raise RuntimeError(
                f"vllm rollout: vLLM returned other tokens than were drawn for request {name}; its "
                "log-probs would be wrong"
            )
        del self._open[name]
        if len(tokens) < len(entry.tokens):  # a stop string ended it, and then vLLM needed a token of its own to end
            reason = "stop"
        run.free.append(entry.row)
        if run.shared is None or (
            self._shared.get(run.shared) is not run and len(run.free) == self.rollout.setup.config.max_num_seqs
        ):
            self.rollout.call_worker("close_run", run.number)
        return TokenOutput(name, tokens, log_probs, reason, entry.version)
