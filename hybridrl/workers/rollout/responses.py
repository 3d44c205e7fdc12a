"""Results of a rollout: generated tokens, and the batch of prompts and responses that training reads.

`Rollout.generate` and `partial` build the batch in the rollout's worker process. Engines fill `GeneratedTokens`.
`prompt_columns` and `sequence_columns` are the layout of every such batch, also of agents' sequences.

Shapes: B prompt rows, P prompt width, n samples per prompt, S = B * n sequences, R response width (max_new_tokens).
"""

from collections.abc import Mapping, Sequence
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


def padded(
    lists: Sequence[Sequence[float]],
    width: int | None = None,
    *,
    fill: float = 0,
    left: bool = False,
    device: torch.device | str = "cpu",
) -> torch.Tensor:
    """Return lists as the rows of one tensor (S, width); int64, or float32 where `fill` is a float.

    Args:
        lists: S lists.
        width: None: the longest list's.
        fill: What pads them.
        left: Whether to pad on the left.
        device: Of the tensor.
    """
    width = max(map(len, lists), default=0) if width is None else width
    gaps = [[fill] * (width - len(entries)) for entries in lists]
    rows = [[*gap, *entries] if left else [*entries, *gap] for gap, entries in zip(gaps, lists, strict=True)]
    dtype = torch.float32 if isinstance(fill, float) else torch.int64
    return torch.tensor(rows, dtype=dtype, device=device).reshape(len(lists), width)


def prompt_columns(
    prompts: Sequence[Sequence[int]], *, pad_token_id: int, width: int | None = None, device: torch.device | str = "cpu"
) -> dict[str, torch.Tensor]:
    """Return `input_ids`, `attention_mask` and `position_ids` (S, P) int64 of prompts, padded on the left."""
    ids = padded(prompts, width, fill=pad_token_id, left=True, device=device)
    mask = padded([[1] * len(tokens) for tokens in prompts], width, left=True, device=device)
    return {"input_ids": ids, "attention_mask": mask, "position_ids": (mask.cumsum(-1) - 1).clamp(min=0)}


def sequence_columns(
    prompts: Mapping[str, torch.Tensor], responses: torch.Tensor, is_token: torch.Tensor
) -> dict[str, torch.Tensor]:
    """Return the columns of sequences: `prompts` (S, P), `responses` (S, R), and three of both.

    These are `input_ids`, `attention_mask` and `position_ids` (S, P + R).

    Args:
        prompts: `input_ids`, `attention_mask` and `position_ids` (S, P).
        responses: (S, R) int64, padded on the right.
        is_token: (S, R), 1 or True on tokens of a response.
    """
    ids, mask, positions = (prompts[name] for name in ("input_ids", "attention_mask", "position_ids"))
    after = positions[:, -1:] + torch.arange(1, responses.size(1) + 1)
    return {
        "prompts": ids,
        "responses": responses,
        "input_ids": torch.cat([ids, responses], dim=1),
        "attention_mask": torch.cat([mask, is_token.to(mask.dtype)], dim=1),
        "position_ids": torch.cat([positions, after], dim=1),
    }


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
    columns |= sequence_columns(columns, generated.tokens, generated.mask) | {
        "response_mask": generated.mask,
        "weights_version": torch.full((len(generated.tokens),), version, dtype=torch.int64),
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
