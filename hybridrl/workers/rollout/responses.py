"""Results of a rollout: generated tokens, and the batch of prompts and responses that training reads.

`Rollout.generate` and `partial` build the batch in the rollout's worker process. Engines fill `GeneratedTokens`.

Shapes: B prompt rows, P prompt width, n samples per prompt, S = B * n sequences, R response width (max_new_tokens).
"""

from dataclasses import dataclass

import numpy as np
import torch

from hybridrl.algos.partition.row_images import IMAGE_INPUTS
from hybridrl.data_plane.columns import one_object_per_row
from hybridrl.data_plane.futures import stored
from hybridrl.errors import DataError
from hybridrl.protocol import DataProto
from hybridrl.workers.engine.base import ROUTED_EXPERTS
from hybridrl.workers.rollout.sampling.sampler import SamplingParams


@dataclass
class GeneratedTokens:
    """Generated sequences, padded on the right.

    tokens: (S, R) int64. mask: (S, R) int64, 1 on generated tokens. log_probs: (S, R) float32, 0 on padding.
    routes: S entries of the column `routed_experts`, of all tokens of prompt and response but the last; None without.
    """

    tokens: torch.Tensor
    mask: torch.Tensor
    log_probs: torch.Tensor
    routes: list[np.ndarray] | None = None

    @classmethod
    def empty(
        cls, num_sequences: int, width: int, *, pad_token_id: int, device: torch.device | str = "cpu"
    ) -> "GeneratedTokens":
        shape = (num_sequences, width)
        return cls(
            tokens=torch.full(shape, pad_token_id, dtype=torch.int64, device=device),
            mask=torch.zeros(shape, dtype=torch.int64, device=device),
            log_probs=torch.zeros(shape, dtype=torch.float32, device=device),
        )

    def to(self, device: torch.device | str) -> "GeneratedTokens":
        return GeneratedTokens(self.tokens.to(device), self.mask.to(device), self.log_probs.to(device), self.routes)


def with_responses(
    prompts: DataProto, generated: GeneratedTokens, *, sampling: SamplingParams, version: int
) -> DataProto:
    """Return the batch of S rows for the trainer: the prompts' columns repeated, and the response columns.

    Adds `prompts` (S, P), `responses` (S, R), `response_mask` (S, R), `weights_version` (S,) and, with
    sampling.logprobs, `rollout_log_probs` (S, R); `input_ids`, `attention_mask` and `position_ids` grow to (S, P + R).
    Routes are the column `routed_experts`. `prompts` itself is not changed. Images are left out: the driver has them.
    """
    rows = prompts.repeat(sampling.n, interleave=True)
    columns = {str(name): rows.batch[name] for name in rows.batch.keys()}
    num_sequences, width = generated.tokens.shape
    positions = columns["position_ids"][:, -1:] + torch.arange(1, width + 1)
    columns |= {
        "prompts": columns["input_ids"],
        "responses": generated.tokens,
        "input_ids": torch.cat([columns["input_ids"], generated.tokens], dim=1),
        "attention_mask": torch.cat(
            [columns["attention_mask"], generated.mask.to(columns["attention_mask"].dtype)], dim=1
        ),
        "position_ids": torch.cat([columns["position_ids"], positions], dim=1),
        "response_mask": generated.mask,
        "weights_version": torch.full((num_sequences,), version, dtype=torch.int64),
    }
    if sampling.logprobs:
        columns["rollout_log_probs"] = generated.log_probs
    others = {name: column for name, column in rows.non_tensor_batch.items() if name != IMAGE_INPUTS}
    if generated.routes is not None:
        others |= {ROUTED_EXPERTS: one_object_per_row(stored(generated.routes))}
    return DataProto.from_dict(tensors=columns, non_tensors=others, meta_info=dict(prompts.meta_info))


def token_lists(prompts: DataProto) -> list[list[int]]:
    """Return the prompts' token ids without padding; raise DataError for a prompt without tokens."""
    masks = prompts.batch["attention_mask"].bool()
    lists = [ids[mask].tolist() for ids, mask in zip(prompts.batch["input_ids"], masks, strict=True)]
    empty = [row for row, tokens in enumerate(lists) if not tokens]
    if empty:
        raise DataError(f"prompt rows {empty[:8]} have no token (attention_mask is all 0); a model needs at least one")
    return lists
