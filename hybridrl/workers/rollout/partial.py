"""Responses that are generated in pieces, with whatever weights the rollout holds when a piece is made.

A response that is still open after a piece has used all of the piece's tokens, so all open rows of a batch are equally
long. Random numbers depend on seed, sample and token (`sampler.py`): with the same weights the pieces are what one
piece would have been.

Shapes: S sequences, P prompt width, R response width so far, N most tokens of the next piece.
"""

from dataclasses import replace

import torch

from hybridrl.protocol import DataProto
from hybridrl.workers.rollout.base import Generated, VersionedRollout, with_responses
from hybridrl.workers.rollout.sampling.logits import Ends
from hybridrl.workers.rollout.sampling.sampler import SamplingParams, advance, sequence_keys

NO_VERSION = -1  # of a token that was not generated


def begin(rollout: VersionedRollout, prompts: DataProto, sampling: SamplingParams) -> DataProto:
    """Return the first `sampling.max_new_tokens` tokens of every response, as `Rollout.generate`, with `token_versions`
    (S, N) int64.

    The batch must bring `seeds`: the next piece goes on in their streams.
    """
    batch = rollout.generate(prompts, sampling)
    versions = batch.batch["weights_version"][:, None].expand_as(batch.batch["responses"])
    batch.batch["token_versions"] = versions.masked_fill(batch.batch["response_mask"] == 0, NO_VERSION)
    return batch


def go_on(rollout: VersionedRollout, batch: DataProto, sampling: SamplingParams) -> DataProto:
    """Return the batch (whole groups of `sampling.n` rows) with `sampling.max_new_tokens` more tokens for the responses
    that are open.

    `weights_version` stays that of a response's first token; `token_versions` (S, R + N) has each token's own.
    """
    version = rollout.current_version()
    columns, width = batch.batch, sampling.max_new_tokens
    open_S = still_open(batch, rollout.ends(sampling), min_tokens=sampling.min_tokens)
    more = Generated.empty(len(batch), width, pad_token_id=rollout.setup.pad_token_id)
    if open_S.any():
        keys = advance(sequence_keys(columns["seeds"][:: sampling.n], sampling.n), columns["responses"].shape[1])
        rows = zip(columns["input_ids"][open_S], columns["attention_mask"][open_S].bool(), strict=True)
        tokens = [ids[mask].tolist() for ids, mask in rows]
        piece = rollout.generate_tokens(
            tokens, keys[open_S], replace(sampling, n=1), num_done=columns["responses"].shape[1]
        )
        more.tokens[open_S], more.mask[open_S], more.log_probs[open_S] = piece.tokens, piece.mask, piece.log_probs
    so_far = (
        columns["rollout_log_probs"]
        if sampling.logprobs
        else torch.zeros_like(columns["responses"], dtype=torch.float32)
    )
    whole = Generated(
        tokens=torch.cat([columns["responses"], more.tokens], dim=1),
        mask=torch.cat([columns["response_mask"], more.mask], dim=1),
        log_probs=torch.cat([so_far, more.log_probs], dim=1),
    )
    result = with_responses(_prompts_of(batch), whole, sampling=replace(sampling, n=1), version=version)
    added = torch.full_like(more.tokens, version).masked_fill(more.mask == 0, NO_VERSION)
    result.batch["token_versions"] = torch.cat([columns["token_versions"], added], dim=1)
    result.batch["weights_version"] = columns["weights_version"]
    return result


def still_open(batch: DataProto, ends: Ends, *, min_tokens: int = 0) -> torch.Tensor:
    """Return which rows (S,) bool used every token they were given and did not end."""
    responses = batch.batch["responses"]
    is_open = (batch.batch["response_mask"][:, -1] == 1) & ~torch.isin(
        responses[:, -1], torch.tensor(ends.ids, dtype=torch.int64)
    )
    if ends.strings is not None and responses.shape[1] > min_tokens:
        tails = responses[:, -ends.strings.window :].tolist()
        is_open &= ~torch.tensor([ends.strings.completed_by_last(tail) for tail in tails])
    return is_open


def _prompts_of(batch: DataProto) -> DataProto:
    """The columns that the rows had before they got responses, one row for each sequence."""
    width = batch.batch["prompts"].shape[1]
    response = ("prompts", "responses", "response_mask", "weights_version", "token_versions", "rollout_log_probs")
    columns = {name: column for name, column in batch.batch.items() if name not in response}
    columns |= {name: columns[name][:, :width] for name in ("input_ids", "attention_mask", "position_ids")}
    return DataProto.from_dict(columns, batch.non_tensor_batch, batch.meta_info)
