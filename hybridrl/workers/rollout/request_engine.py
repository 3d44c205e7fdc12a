"""Serve token-in/token-out requests with a rollout, in time slices.

A rollout worker (`ActorRolloutRefWorker`, `ReplicaWorker`) owns one `RequestEngine`. The router calls it again and
again: each call adds requests, works for one time slice and returns the finished ones. Between two calls the process
can serve other calls, for example a weight push. A call that does not return means that the process is stuck.

An engine over several processes has a `RequestEngine` in each of them, and all get the same calls (`EnginePeers`).

The `hf` engine generates in batches (`BatchedRequestEngine`), vLLM batches continuously (`VLLMRequestEngine`).

A request's tokens depend only on its seed, its sample number and their position in the response. They do not depend on
the process, on concurrent requests or on the number of chunks. A request can therefore be aborted and repeated on
another replica with the same result. For the same reason an error of one request is found by serving the open
requests in halves, and answers that request alone.
"""

import logging
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from typing import Any, Protocol

import torch

from hybridrl.errors import DataError, StaleWeightsError
from hybridrl.workers.rollout.engine_peers import EnginePeers
from hybridrl.workers.rollout.requests import Request, TokenOutput
from hybridrl.workers.rollout.sampling.sampler import SamplingParams, StopCondition

logger = logging.getLogger(__name__)

# Errors of the process, whatever the request: it has no weights, or its device cannot be used any more.
ERRORS_OF_PROCESS = (StaleWeightsError, torch.AcceleratorError)
SLICE_S = 0.05  # Seconds a replica works before it accepts new requests; about one decode step of a large model.


class EngineHost(Protocol):
    """The part of a `Rollout` that every request engine uses."""

    setup: Any  # a `RolloutSetup`

    def current_version(self) -> int: ...

    def require_sampling(self, sampling: SamplingParams) -> None: ...

    def stop_condition(self, sampling: SamplingParams) -> StopCondition: ...


class RequestEngine(ABC):
    """Serves requests with a rollout. Whole batches can be generated too, but not at the same time.

    `serve` is for every engine. A subclass says how a request is added, what one short step computes, and how a request
    ends early. What it raises, the requests that it then has or has lost included, is sorted out here.

    Args:
        rollout: What generates.

    Attributes:
        peers: The processes of the rollout's engine; None for an engine in this process alone.
    """

    def __init__(self, rollout: EngineHost):
        self.rollout = rollout
        self.peers: EnginePeers | None = None
        self._unanswered: dict[str, Request] = {}  # added, whatever the subclass still has of them
        self._suspects: deque[list[Request]] = deque()  # groups to serve one after the other: one has raised
        self._waiting: list[Request] = []  # came while there were suspects

    @abstractmethod
    def add(self, request: Request) -> None:
        """Open a request."""

    @abstractmethod
    def step(self) -> list[TokenOutput]:
        """Run one short step on the open requests and return those that finished."""

    @abstractmethod
    def abort(self, request_id: str) -> TokenOutput | None:
        """End an open request and return its output, or None if no such request is open."""

    def serve(self, requests: Sequence[Request], aborted: Sequence[str], *, slice_s: float) -> list[TokenOutput]:
        """Add requests, abort others, work for one time slice, and return what finished.

        A request that cannot be served is finished with reason "error".

        Consumes: New requests and aborts; then the open requests, one step after another.
        Waits for: The engine's step, and with `peers` for the same step of the other ranks.
        Unblocked by: The device; the other ranks. It returns when the slice is over or no request is open.

        Args:
            requests: to add; their ids must not be open.
            aborted: ids of requests to end now. Unknown ids are ignored.
            slice_s: seconds to work, at least one engine step; returns earlier when no request is open.

        Raises:
            StaleWeightsError: The rollout holds no complete weights. Other errors are of the process, too.
        """
        if requests:
            self.rollout.current_version()
        self._waiting += requests
        done = self._open_waiting()
        done += [output for name in aborted if (output := self._abort(name)) is not None]
        deadline = time.monotonic() + slice_s
        while self.num_open():
            self.rollout.current_version()
            finished = self._step() if self._unanswered else self._open_waiting()
            done += finished
            if self._is_over(time.monotonic() >= deadline, finished):
                break
        return done

    def _is_over(self, own: bool, finished: list[TokenOutput]) -> bool:
        """Return whether the time slice is over: this process's, or that of the engine's first rank."""
        if self.peers is None:
            return own
        return self.peers.is_over(own, finished, num_open=(len(self._unanswered), self.num_open()))

    def num_open(self) -> int:
        """Return the number of requests that have no answer yet."""
        return len(self._unanswered) + len(self._waiting) + sum(map(len, self._suspects))

    def _open_waiting(self) -> list[TokenOutput]:
        """Hand requests to the engine: the next group of suspects alone, else all; return those that fail."""
        if self._suspects:
            return [] if self._unanswered else self._add(self._suspects.popleft())
        waiting, self._waiting = self._waiting, []
        return self._add(waiting)

    def _add(self, requests: list[Request]) -> list[TokenOutput]:
        """Add requests to the engine; return those that fail."""
        failed = []
        for request in requests:
            if request.request_id in self._unanswered:
                raise ValueError(f"request {request.request_id} is open already; ids must differ")
            try:
                self.rollout.require_sampling(request.sampling)
                self._require_lengths_fit(request)
                self.add(request)
            except ERRORS_OF_PROCESS:
                raise
            except Exception as error:
                failed.append(_failed(request, error))
            else:
                self._unanswered[request.request_id] = request
        return failed

    def _abort(self, name: str) -> TokenOutput | None:
        self._unanswered.pop(name, None)
        if (output := self.abort(name)) is not None:
            return output
        for group in (self._waiting, *self._suspects):
            for request in group:
                if request.request_id == name:
                    group.remove(request)
                    return TokenOutput(name, [], [], "abort", -1)
        return None

    def _step(self) -> list[TokenOutput]:
        try:
            finished = self.step()
        except ERRORS_OF_PROCESS:
            raise
        except Exception as error:
            return self._part(error)
        for output in finished:
            self._unanswered.pop(output.request_id, None)
        return finished

    def _part(self, error: Exception) -> list[TokenOutput]:
        """Take the open requests out of the engine and serve them in halves; a single one has failed."""
        suspects, self._unanswered = list(self._unanswered.values()), {}
        for request in suspects:
            self.abort(request.request_id)
        if len(suspects) == 1:
            return [_failed(suspects[0], error)]
        logger.warning("one of %d requests raised %s; they are served apart", len(suspects), type(error).__name__)
        middle = len(suspects) // 2
        self._suspects.extendleft([suspects[middle:], suspects[:middle]])
        return []

    def _require_lengths_fit(self, request: Request) -> None:
        setup, new = self.rollout.setup, request.sampling.max_new_tokens
        if new > setup.max_response_length or len(request.prompt_ids) + new > setup.max_length:
            raise DataError(
                f"request {request.request_id}: {len(request.prompt_ids)} tokens and up to {new} new ones; the rollout "
                f"was built for {setup.max_length} in all, at most {setup.max_response_length} of them new "
                "(data.max_prompt_length, data.max_response_length)"
            )


def _failed(request: Request, error: Exception) -> TokenOutput:
    logger.warning("request %s cannot be served", request.request_id, exc_info=error)
    return TokenOutput.of_error(request.request_id, error)
