"""Serve token-in/token-out requests from a rollout, in time slices.

A rollout worker (`ActorRolloutRefWorker`, `ReplicaWorker`) owns one `RequestServer`. The router calls it again and
again: each call adds requests, works for one time slice and returns the finished ones. Between two calls the process
can serve other calls, for example a weight push. A call that does not return means that the process is stuck.

The `hf` engine generates in batches (`BatchedRequestEngine`), vLLM batches continuously (`VLLMRequestEngine`).

A request's tokens depend only on its seed, its sample number and their position in the response. They do not depend on
the process, on concurrent requests or on the number of chunks. A request can therefore be aborted and repeated on
another replica with the same result.
"""

import time
from collections.abc import Sequence

from hybridrl.errors import DataError
from hybridrl.workers.rollout.base import Rollout
from hybridrl.workers.rollout.requests import Request, TokenOutput

SLICE_S = 0.05  # Seconds a replica works before it accepts new requests; about one decode step of a large model.


class RequestServer:
    """Serves requests with a rollout. Whole batches can be generated too, but not at the same time."""

    def __init__(self, rollout: Rollout):
        self.rollout, self.engine = rollout, rollout.request_engine()

    def serve(self, requests: Sequence[Request], aborted: Sequence[str], *, slice_s: float) -> list[TokenOutput]:
        """Add requests, abort others, work for one time slice, and return what finished.

        Args:
            requests: to add; their ids must not be open.
            aborted: ids of requests to end now. Unknown ids are ignored.
            slice_s: seconds to work, at least one engine step; returns earlier when no request is open.
        """
        for request in requests:
            self.rollout.require_sampling(request.sampling)
            self._require_lengths_fit(request)
        for request in requests:
            if self.engine.is_open(request.request_id):
                raise ValueError(f"request {request.request_id} is open already; ids must differ")
            self.engine.add(request)
        done = [output for name in aborted if (output := self.engine.abort(name)) is not None]
        deadline = time.monotonic() + slice_s
        while self.engine.num_open():
            self.rollout.current_version()
            done += self.engine.step()
            if time.monotonic() >= deadline:
                break
        return done

    def _require_lengths_fit(self, request: Request) -> None:
        setup, new = self.rollout.setup, request.sampling.max_new_tokens
        if new > setup.max_response_length or len(request.prompt_ids) + new > setup.max_length:
            raise DataError(
                f"request {request.request_id}: {len(request.prompt_ids)} tokens and up to {new} new ones; the rollout "
                f"was built for {setup.max_length} in all, at most {setup.max_response_length} of them new "
                "(data.max_prompt_length, data.max_response_length)"
            )
