"""Generate responses in chunks, each chunk with the weights that the rollout holds at that time.

`ActorRolloutRefWorker` calls this for `begin_sequences` and `continue_sequences`. A response that is still open after a
chunk has used all of the chunk's tokens, so all open rows of a batch are equally long. Random numbers depend on seed,
sample and token (`sampler.py`): while the weights stay the same, the chunks equal one uninterrupted call.

Shapes: S sequences, P prompt width, R response width so far, N maximum tokens of the next chunk.
"""

from dataclasses import replace

import torch

from hybridrl.protocol import DataProto
from hybridrl.workers.rollout.base import Rollout
from hybridrl.workers.rollout.responses import GeneratedTokens, with_responses
from hybridrl.workers.rollout.sampling.logits import StopCondition
from hybridrl.workers.rollout.sampling.sampler import SamplingParams, advance, sequence_keys

NO_VERSION = -1  # of a token that was not generated


def begin_partial(rollout: Rollout, prompts: DataProto, sampling: SamplingParams) -> DataProto:
    """Return the first `sampling.max_new_tokens` tokens of every response.

    The columns are those of `Rollout.generate`, and `token_versions` (S, N) int64.

    Args:
        prompts: must have `seeds`, because the next chunk continues their random streams.
    """
    batch = rollout.generate(prompts, sampling)
    versions = batch.batch["weights_version"][:, None].expand_as(batch.batch["responses"])
    batch.batch["token_versions"] = versions.masked_fill(batch.batch["response_mask"] == 0, NO_VERSION)
    return batch


def continue_partial(rollout: Rollout, batch: DataProto, sampling: SamplingParams) -> DataProto:
    """Return the batch with `sampling.max_new_tokens` more tokens for the open responses.

    Args:
        batch: whole groups of `sampling.n` rows.

    Returns:
        `weights_version` stays that of a response's first token; `token_versions` (S, R + N) has each token's own.
    """
    version = rollout.current_version()
    columns, width = batch.batch, sampling.max_new_tokens
    open_S = open_rows(batch, rollout.stop_condition(sampling), min_tokens=sampling.min_tokens)
    new = GeneratedTokens.empty(len(batch), width, pad_token_id=rollout.setup.pad_token_id)
    if open_S.any():
        keys = advance(sequence_keys(columns["seeds"][:: sampling.n], sampling.n), columns["responses"].shape[1])
        rows = zip(columns["input_ids"][open_S], columns["attention_mask"][open_S].bool(), strict=True)
        tokens = [ids[mask].tolist() for ids, mask in rows]
        chunk = rollout.generate_tokens(
            tokens, keys[open_S], replace(sampling, n=1), num_done=columns["responses"].shape[1]
        )
        new.tokens[open_S], new.mask[open_S], new.log_probs[open_S] = chunk.tokens, chunk.mask, chunk.log_probs
    old_log_probs = (
        columns["rollout_log_probs"]
        if sampling.logprobs
        else torch.zeros_like(columns["responses"], dtype=torch.float32)
    )
    generated = GeneratedTokens(
        tokens=torch.cat([columns["responses"], new.tokens], dim=1),
        mask=torch.cat([columns["response_mask"], new.mask], dim=1),
        log_probs=torch.cat([old_log_probs, new.log_probs], dim=1),
    )
    result = with_responses(_prompt_columns(batch), generated, sampling=replace(sampling, n=1), version=version)
    new_versions = torch.full_like(new.tokens, version).masked_fill(new.mask == 0, NO_VERSION)
    result.batch["token_versions"] = torch.cat([columns["token_versions"], new_versions], dim=1)
    result.batch["weights_version"] = columns["weights_version"]
    return result


def open_rows(batch: DataProto, stop_condition: StopCondition, *, min_tokens: int = 0) -> torch.Tensor:
    """Return which rows (S,) bool used all tokens of their chunks and did not stop."""
    responses = batch.batch["responses"]
    is_open = (batch.batch["response_mask"][:, -1] == 1) & ~torch.isin(
        responses[:, -1], torch.tensor(stop_condition.ids, dtype=torch.int64)
    )
    if stop_condition.strings is not None and responses.shape[1] > min_tokens:
        tails = responses[:, -stop_condition.strings.window :].tolist()
        is_open &= ~torch.tensor([stop_condition.strings.completed_by_last(tail) for tail in tails])
    return is_open


def _prompt_columns(batch: DataProto) -> DataProto:
    """Return the columns that the rows had before generation, one row per sequence."""
    width = batch.batch["prompts"].shape[1]
    response = ("prompts", "responses", "response_mask", "weights_version", "token_versions", "rollout_log_probs")
    columns = {str(name): batch.batch[name] for name in batch.batch.keys() if name not in response}
    columns |= {name: columns[name][:, :width] for name in ("input_ids", "attention_mask", "position_ids")}
    return DataProto.from_dict(columns, batch.non_tensor_batch, batch.meta_info)
