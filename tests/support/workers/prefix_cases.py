"""Batches whose rows share prefixes, for the tests of shared prefixes. Not a test file."""

import torch

from hybridrl.protocol import DataProto
from tests.support.workers.engine_cases import VOCAB

# name: (tokens of the prompt, tokens of each response) of every prompt
GROUPS = {
    "1 sample, 4:1": [(16, [4])],
    "1 sample, 1:4": [(8, [32])],
    "4 samples, 4:1": [(16, [4] * 4)],
    "4 samples, 1:1": [(12, [12] * 4)],
    "4 samples, 1:4": [(8, [32] * 4)],
    "16 samples, 4:1": [(16, [4] * 16)],
    "16 samples, 1:1": [(12, [12] * 16)],
    "16 samples, 1:4": [(8, [32] * 16)],
    "ragged": [(16, [1, 9, 30, 2, 17]), (9, [3, 3])],
    "rows without a partner": [(16, [4, 6]), (10, [5]), (3, [8]), (1, [2])],
}


def grouped_batch(groups: list[tuple[int, list[int]]], seed: int = 0) -> DataProto:
    """Return rows of these prompts and responses in random order, prompts padded on the left."""
    draw = torch.Generator().manual_seed(seed)
    pairs = []
    for prompt_length, response_lengths in groups:
        prompt = torch.randint(VOCAB, (prompt_length,), generator=draw)
        pairs += [(prompt, torch.randint(VOCAB, (length,), generator=draw)) for length in response_lengths]
    return batch_of([pairs[number] for number in torch.randperm(len(pairs), generator=draw)], draw)


def conversation_batch(seed: int = 0) -> DataProto:
    """Return the turns of conversations: each row's prompt is all that was said before, of one or two branches."""
    draw = torch.Generator().manual_seed(seed)
    pairs = []
    for _ in range(2):
        said = torch.randint(VOCAB, (10,), generator=draw)
        for _ in range(3):
            answers = [torch.randint(VOCAB, (length,), generator=draw) for length in (9, 5)]
            pairs += [(said, answer) for answer in answers]
            said = torch.cat([said, answers[0]])
    return batch_of(pairs, draw)


def batch_of(pairs: list[tuple[torch.Tensor, torch.Tensor]], draw: torch.Generator) -> DataProto:
    """Return a batch of (prompt, response); some response tokens are masked out."""
    width = max(len(prompt) for prompt, _ in pairs), max(len(response) for _, response in pairs)
    ids, real = (torch.zeros(len(pairs), sum(width), dtype=torch.int64) for _ in range(2))
    for number, (prompt, response) in enumerate(pairs):
        cells = slice(width[0] - len(prompt), width[0] + len(response))
        ids[number, cells], real[number, cells] = torch.cat([prompt, response]), 1
    kept = torch.rand(len(pairs), width[1], generator=draw) > 0.1
    columns = {"input_ids": ids, "attention_mask": real, "response_mask": real[:, width[0] :] * kept}
    return DataProto.from_dict(tensors=columns | {"advantages": torch.randn(len(pairs), width[1], generator=draw)})
