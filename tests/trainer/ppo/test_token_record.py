"""Tokens of the samples of a step: each with what the update saw of it."""

import json

import numpy as np
import pytest
import torch

from hybridrl.protocol import DataProto
from hybridrl.trainer.ppo import token_record
from hybridrl.trainer.run.samples import sample_ids


def batch_of(**columns: torch.Tensor) -> DataProto:
    """Two rows with prompts of 2 tokens and responses of 3 and 2, one token of a tool."""
    ones = {
        "responses": torch.tensor([[1, 2, 3], [4, 5, 0]]),
        "attention_mask": torch.tensor([[0, 1, 1, 1, 1], [1, 1, 1, 1, 0]]),
        "response_mask": torch.tensor([[1, 0, 1], [1, 1, 0]]),
        "advantages": torch.tensor([[0.5, 0.0, 0.5], [-0.5, -0.5, 0.0]]),
    }
    return DataProto.from_dict(tensors=ones | columns, non_tensors={"uid": np.array(["1-0", "1-1"], dtype=object)})


class Texts:
    def decode(self, tokens: list[int]) -> str:
        return "".join(chr(ord("a") + token) for token in tokens)


def written(tmp_path, batch, **more) -> list[dict]:
    token_record.record_tokens(str(tmp_path), batch, Texts(), step=7, **more)
    return [json.loads(line) for line in (tmp_path / "tokens" / "7.jsonl").read_text().splitlines()]


def test_every_token_has_its_text_and_its_numbers(tmp_path):
    old, rollout = torch.full((2, 3), -0.25), torch.full((2, 3), -0.123456)
    batch = batch_of(old_log_probs=old, rollout_log_probs=rollout)
    first, second = written(tmp_path, batch)
    assert first == {
        "step": 7,
        "id": sample_ids(batch)[0],
        "tokens": ["b", "c", "d"],
        "mask": [1, 0, 1],
        "rollout": [-0.1235] * 3,
        "old": [-0.25] * 3,
        "advantage": [0.5, 0.0, 0.5],
    }
    assert second["tokens"] == ["e", "f"] and second["advantage"] == [-0.5, -0.5]


def test_log_probs_that_the_update_returned_stand_beside_their_rows(tmp_path):
    updated = DataProto.from_dict(
        tensors={"batch_row": torch.tensor([1]), "old_log_probs": torch.tensor([[-1.0, -2.0, 0.0]])}
    )
    first, second = written(tmp_path, batch_of(), updated=updated)
    assert (first["old"], second["old"]) == ([None] * 3, [-1.0, -2.0]) and "rollout" not in first


def test_the_number_of_tokens_of_a_step_is_limited(tmp_path, monkeypatch):
    monkeypatch.setattr(token_record, "MAX_TOKENS", 4)
    assert len(written(tmp_path, batch_of())) == 1


@pytest.mark.parametrize(("other", "same"), [([[1, 2, 3], [4, 5, 0]], True), ([[1, 2, 9], [4, 5, 0]], False)])
def test_an_id_names_prompt_and_response(other, same):
    ids = sample_ids(batch_of())
    assert ids[0].startswith("1-0:") and ids[1].startswith("1-1:")
    assert (sample_ids(batch_of(responses=torch.tensor(other)))[0] == ids[0]) is same
