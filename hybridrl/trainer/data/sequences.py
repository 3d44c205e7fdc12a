"""Whole sequences, prompt and response together, to a batch of a training engine.

Used by the datasets of SFT and of preferences, in the driver. Shapes: B rows, L tokens of the batch's longest sequence,
R = L - 1.
"""

import torch

from hybridrl.algos.partition.row_images import IMAGE_INPUTS
from hybridrl.data_plane.columns import one_object_per_row
from hybridrl.protocol import DataProto


def end_of_turn(tokens: list[int], start: int, eos: int | None) -> int:
    """Return the end of the assistant's tokens.

    It is after the last end-of-sequence token, or the end of all tokens.

    Tokens after an end-of-sequence token are the template's.
    """
    return max((t + 1 for t in range(start, len(tokens)) if tokens[t] == eos), default=len(tokens))


def collate_sequences(rows: list[dict], pad_token_id: int) -> DataProto:
    """Return a batch in the format of training engines.

    `input_ids`, `attention_mask`, `position_ids` are (B, L) int64, padded on the right. `responses` (B, R) int64 are
    the tokens after the first. `response_mask` (B, R) int64 is 1 where `loss_mask` is. Rows with images have the column
    `multi_modal_inputs`, see `algos/partition/row_images.py`.
    """
    input_ids = pad_right([row["input_ids"] for row in rows], pad_token_id)
    attention_mask = pad_right([torch.ones_like(row["input_ids"]) for row in rows], 0)
    loss_mask = pad_right([row["loss_mask"] for row in rows], 0)
    tensors = {
        "input_ids": input_ids,
        "attention_mask": attention_mask,
        "position_ids": (attention_mask.cumsum(-1) - 1).clamp(min=0),
        "responses": input_ids[:, 1:].clone(),
        "response_mask": loss_mask[:, 1:].clone(),
    }
    if not any(IMAGE_INPUTS in row for row in rows):
        return DataProto.from_dict(tensors)
    return DataProto.from_dict(tensors, {IMAGE_INPUTS: one_object_per_row([row.get(IMAGE_INPUTS) for row in rows])})


def pad_right(rows: list[torch.Tensor], value: int) -> torch.Tensor:
    """Return rows as one tensor, padded with `value` to the longest."""
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=value)
