"""Continue a response behind the tokens that it has.

Random numbers depend on the position in the response. With unchanged weights the tokens are therefore those of a single
request. It makes no difference what interrupted the response: a weight push (`ReplicaRouter.pause`), a move to another
replica, the limit of a partial rollout (`RowClient`), or the end of a chunk that is streamed (`generate_in_chunks`).
"""

from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import Protocol

from hybridrl.workers.rollout.requests import Request, TokenOutput


class PolicyClient(Protocol):
    """Anything that answers token requests: a `ReplicaRouter`, or a wrapper around one."""

    async def generate(self, request: Request, *, conversation: str | None = None) -> TokenOutput: ...


def continued(request: Request, token_ids: Sequence[int], *, request_id: str, max_new_tokens: int) -> Request:
    """Return the request for the next part of a response that has these tokens already."""
    return replace(
        request,
        request_id=request_id,
        prompt_ids=(*request.prompt_ids, *token_ids),
        sampling=replace(request.sampling, max_new_tokens=max_new_tokens),
        num_done=request.num_done + len(token_ids),
    )


def with_reason(output: TokenOutput, *, has_all: bool) -> TokenOutput:
    """Return a part of a response with the reason "pause" if it must be continued.

    Args:
        output: As a `PolicyClient` returned it.
        has_all: Whether the response has as many tokens as it may have.
    """
    if output.finish_reason in ("stop", "abort"):
        return output
    return replace(output, finish_reason="length" if has_all else "pause")


async def generate_in_chunks(
    client: PolicyClient, request: Request, *, conversation: str | None = None, chunk_tokens: int | None = None
) -> AsyncIterator[TokenOutput]:
    """Yield the tokens of a response as they are generated. Only the last chunk has another reason than "pause".

    Args:
        client: Answers each part of the response.
        request: The whole response to generate.
        conversation: Routing key; default: the request's id.
        chunk_tokens: Most tokens per chunk; None ends a chunk only where a pause does.
    """
    limit, name = request.sampling.max_new_tokens, request.request_id
    done, number = list[int](), 0
    is_over = False
    while not is_over:
        left = limit - len(done)
        part = continued(request, done, request_id=f"{name}+{number}", max_new_tokens=min(left, chunk_tokens or left))
        output = await client.generate(part, conversation=conversation or name)
        done += output.token_ids
        number += 1
        chunk = with_reason(output, has_all=len(done) == limit)
        is_over = chunk.finish_reason != "pause"
        yield chunk


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
        routes=next((chunk.routes for chunk in reversed(chunks) if chunk.routes is not None), None),
    )
