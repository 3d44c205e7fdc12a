"""One response made by several requests, each going on where the one before it stopped.

Random numbers depend on the place in the response, so as long as the weights are the same the tokens are those of a
single request: whether it was cut by a push of weights (`Router.pause`), cut into pieces to be shown as they come, or
not cut at all.
"""

from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Protocol

from hybridrl.workers.rollout.requests import Request, TokenOutput


class PolicyClient(Protocol):
    """Whoever answers requests: a `Router`, or what stands before one."""

    async def generate(self, request: Request, *, conversation: str | None = None) -> TokenOutput: ...


async def pieces(
    client: PolicyClient, request: Request, *, conversation: str | None = None, width: int | None = None
) -> AsyncIterator[TokenOutput]:
    """Yield the tokens of a response as they are made, `width` at a time (None: all that no pause cuts).

    The last piece has the reason why the response ended; it alone may be "stop" or "abort", and "length" only if all of
    the request's `max_new_tokens` are there. Others have "pause" or "length", and may be empty.
    """
    left, name = request.sampling.max_new_tokens, request.request_id
    number, done = 0, list[int]()
    while True:
        part = replace(
            request,
            request_id=name if number == 0 else f"{name}+{number}",
            prompt_ids=(*request.prompt_ids, *done),
            sampling=replace(request.sampling, max_new_tokens=min(left, width or left)),
            num_done=request.num_done + len(done),
        )
        output = await client.generate(part, conversation=conversation or name)
        done += output.token_ids
        left -= len(output.token_ids)
        number += 1
        if output.finish_reason == "pause" and not left:
            output = replace(output, finish_reason="length")
        yield output
        if output.finish_reason in ("stop", "abort") or not left:
            return


def joined(request_id: str, parts: list[TokenOutput]) -> TokenOutput:
    """Return pieces as one output, with the version of every token."""
    versions = tuple(version for part in parts for version in part.token_versions)
    return TokenOutput(
        request_id,
        [token for part in parts for token in part.token_ids],
        [log_prob for part in parts for log_prob in part.log_probs],
        parts[-1].finish_reason,
        min(versions, default=-1),
        mixed=versions if len(set(versions)) > 1 else (),
    )
