"""Generate one response with several requests, each continuing where the previous one stopped.

Random numbers depend on the position in the response. With unchanged weights the tokens are therefore those of a single
request. It makes no difference whether a weight push interrupted the response (`ReplicaRouter.pause`) or streaming
split it into chunks.

Used by agent loops and the OpenAI endpoint, on the router's event loop in the driver process.
"""

from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Protocol

from hybridrl.workers.rollout.requests import Request, TokenOutput


class PolicyClient(Protocol):
    """Anything that answers token requests: a `ReplicaRouter`, or a wrapper around one."""

    async def generate(self, request: Request, *, conversation: str | None = None) -> TokenOutput: ...


async def generate_in_chunks(
    client: PolicyClient, request: Request, *, conversation: str | None = None, chunk_tokens: int | None = None
) -> AsyncIterator[TokenOutput]:
    """Yield the tokens of a response as they are generated.

    The last chunk has the reason why the response ended. Only it may have "stop" or "abort"; it has "length" only when
    all of the request's `max_new_tokens` are generated. Other chunks have "pause" or "length" and may be empty.

    Args:
        client: Answers each part of the response.
        request: The whole response to generate.
        conversation: Routing key; default: the request's id.
        chunk_tokens: Most tokens per chunk; None ends a chunk only where a pause does.
    """
    left, name = request.sampling.max_new_tokens, request.request_id
    number, done = 0, list[int]()
    while True:
        part = replace(
            request,
            request_id=name if number == 0 else f"{name}+{number}",
            prompt_ids=(*request.prompt_ids, *done),
            sampling=replace(request.sampling, max_new_tokens=min(left, chunk_tokens or left)),
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


def join_chunks(request_id: str, chunks: list[TokenOutput]) -> TokenOutput:
    """Return chunks as one output, with the weight version of every token."""
    versions = tuple(version for chunk in chunks for version in chunk.token_versions)
    return TokenOutput(
        request_id,
        [token for chunk in chunks for token in chunk.token_ids],
        [log_prob for chunk in chunks for log_prob in chunk.log_probs],
        chunks[-1].finish_reason,
        min(versions, default=-1),
        mixed=versions if len(set(versions)) > 1 else (),
    )
