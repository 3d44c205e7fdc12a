"""Token-in/token-out requests that come and go: what one rollout process does for the router and its agent loops.

Its caller drives it: `Server.serve` takes new requests, works for a moment and returns what has ended meanwhile.
Between two such calls the process does whatever else it is told, a push of weights for instance, and a call that does
not return says that the process is stuck. The `hf` engine works on batches of what waits, in pieces (`PieceEngine`);
vLLM batches continuously (`serving_vllm`).

A request's tokens depend on its seed, sample and place in the response, and not on who makes them, beside what, in how
many pieces: so a request may be given up and made again elsewhere, and its answer is the same.
"""

import time
from collections.abc import Sequence

from hybridrl.errors import DataError
from hybridrl.workers.rollout.base import VersionedRollout
from hybridrl.workers.rollout.requests import Request, TokenOutput

SLICE_S = (
    0.05  # a replica works so long before it takes up new requests; about what a decode step of a large model takes
)


class Server:
    """The serving side of a rollout that also generates whole batches, one or the other at a time."""

    def __init__(self, rollout: VersionedRollout):
        self.rollout, self.engine = rollout, rollout.request_engine()

    def serve(self, requests: Sequence[Request], aborted: Sequence[str], *, slice_s: float) -> list[TokenOutput]:
        """Take up requests, end those in `aborted`, work for about `slice_s` seconds or until one has ended; return
        what has ended.
        """
        for request in requests:
            self._require_room(request)
        for request in requests:
            if self.engine.is_open(request.request_id):
                raise ValueError(f"request {request.request_id} is open already; ids must differ")
            self.engine.add(request)
        done = [output for name in aborted if (output := self.engine.abort(name)) is not None]
        until = time.monotonic() + slice_s
        while self.engine.num_open():
            self.rollout.current_version()
            done += self.engine.step()
            if time.monotonic() >= until:
                break
        return done

    def _require_room(self, request: Request) -> None:
        setup, new = self.rollout.setup, request.sampling.max_new_tokens
        if new > setup.max_response_length or len(request.prompt_ids) + new > setup.max_length:
            raise DataError(
                f"request {request.request_id}: {len(request.prompt_ids)} tokens and {new} to come; the "
                "rollout was built for "
                f"{setup.max_length} in all, at most {setup.max_response_length} of them new (data.max_prompt_length, "
                "data.max_response_length)"
            )
