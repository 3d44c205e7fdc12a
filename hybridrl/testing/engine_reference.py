"""A tiny model, batches and losses for conformance suites, and what plain torch computes from them.

`check_engine` and the tests of the engines use it. It knows no engine. Importing it loads no transformers.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from hybridrl.protocol import DataProto
from hybridrl.workers.engine.base import LossFn

PROMPT, RESPONSE, VOCAB = 9, 7, 64
# Softmax does not change when all keys move by the same vector, so this gradient is zero but for rounding, and Adam's
# first steps blow rounding up to the full learning rate. It is the one parameter that need not agree.
UNDETERMINED = "k_proj.bias"
MODELS = {
    "causal_lm": "Qwen2ForCausalLM",
    "value": "Qwen2ForTokenClassification",
    "score": "Qwen2ForSequenceClassification",
}


def save_tiny_qwen2(path: Any, *, tied: bool = True, kind: str = "causal_lm", **overrides: Any) -> str:
    """Write a two-layer Qwen2 with random weights, always the same, and return its directory."""
    import transformers

    settings = dict(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        initializer_range=0.1,
        tie_word_embeddings=tied,
    )
    torch.manual_seed(0)
    config = transformers.Qwen2Config(**settings | ({} if kind == "causal_lm" else {"num_labels": 1}) | overrides)
    getattr(transformers, MODELS[kind])(config).save_pretrained(path)
    return str(path)


def make_batch(num_rows: int = 24, seed: int = 0) -> DataProto:
    """Return prompts of 2 to PROMPT tokens, left-padded, and responses of 1 to RESPONSE tokens.

    Some response tokens are masked out.
    """
    draw = torch.Generator().manual_seed(seed)
    prompts = torch.randint(2, PROMPT + 1, (num_rows, 1), generator=draw)
    responses = torch.randint(1, RESPONSE + 1, (num_rows, 1), generator=draw)
    real = torch.cat([torch.arange(PROMPT) >= PROMPT - prompts, torch.arange(RESPONSE) < responses], dim=1).long()
    ids = torch.randint(0, VOCAB, real.shape, generator=draw) * real
    kept = torch.rand(num_rows, RESPONSE, generator=draw) > 0.1
    return DataProto.from_single_dict(
        {
            "input_ids": ids,
            "attention_mask": real,
            "response_mask": real[:, PROMPT:] * kept,
            "advantages": torch.randn(num_rows, RESPONSE, generator=draw),
        }
    )


def num_response_tokens(batch: DataProto) -> float:
    """Return the number of tokens that the losses of a batch count."""
    return float(batch.batch["response_mask"].sum())


def policy_loss(num_tokens: float) -> LossFn:
    """Return a policy-gradient loss with an entropy term, divided by a count over all ranks and micro-batches."""

    def loss_fn(outputs: dict[str, torch.Tensor], rows: DataProto) -> tuple[torch.Tensor, dict]:
        mask = rows.batch["response_mask"]
        loss = -((outputs["log_probs"] * rows.batch["advantages"] + 0.1 * outputs["entropy"]) * mask).sum() / num_tokens
        return loss, {"loss": loss, "rows": len(rows)}

    return loss_fn


def plain_outputs(model: Any, batch: DataProto, *, temperature: float = 1.0) -> dict[str, torch.Tensor]:
    """Return log-probs and entropy computed without an engine: row by row, no padding, all logits."""
    log_probs, entropy = torch.zeros(len(batch), RESPONSE), torch.zeros(len(batch), RESPONSE)
    for i in range(len(batch)):
        real = batch.batch["attention_mask"][i].bool()
        ids = batch.batch["input_ids"][i][real]
        logp = F.log_softmax(model(input_ids=ids[None]).logits[0].float() / temperature, dim=-1)
        first = int(real[:PROMPT].sum())  # index of the first response token
        for t in batch.batch["response_mask"][i].nonzero()[:, 0].tolist():
            state = logp[first + t - 1]
            log_probs[i, t] = state[ids[first + t]]
            entropy[i, t] = -(state.exp() * state).sum()
    return {"log_probs": log_probs, "entropy": entropy}


def plain_numbers(path: str, batch: DataProto, *, kind: str) -> torch.Tensor:
    """Return what the head of a tiny Qwen2 for values or scores computes, row by row without padding.

    Values (rows,R) are of the state before each counted response token, scores (rows,) of the last token.
    """
    import transformers

    model = getattr(transformers, MODELS[kind]).from_pretrained(path, dtype=torch.float32).eval()
    values, scores = torch.zeros(len(batch), RESPONSE), torch.zeros(len(batch))
    for i in range(len(batch)):
        real = batch.batch["attention_mask"][i].bool()
        logits = model(input_ids=batch.batch["input_ids"][i][real][None]).logits[0, ..., 0]
        if kind == "score":
            scores[i] = logits
            continue
        first = int(real[:PROMPT].sum())  # index of the first response token
        for t in batch.batch["response_mask"][i].nonzero()[:, 0].tolist():
            values[i, t] = logits[first + t - 1]
    return values if kind == "value" else scores


def assert_same_weights(
    found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor], *, atol: float
) -> None:
    """Raise AssertionError unless names and values agree; the message has the name of a tensor that differs."""
    assert found.keys() == expected.keys(), f"names differ: {sorted(found.keys() ^ expected.keys())}"
    for name in expected:
        if not name.endswith(UNDETERMINED):
            about = "{}: {}".format
            torch.testing.assert_close(found[name], expected[name], atol=atol, rtol=0, msg=partial(about, name))
