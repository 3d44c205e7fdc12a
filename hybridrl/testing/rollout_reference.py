"""A tiny causal language model with a tokenizer, and plain greedy decoding, against which rollouts are compared.

Its initial weights are large, so that the next token depends on the prompt and greedy decoding does not repeat one.
"""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen2Config

from hybridrl.workers.rollout.sampling.sampler import SamplingParams

VOCABULARY_SIZE = 94  # the visible characters of ASCII: each token is one of them
MAX_LENGTH = 256
FIRST_LETTER = ord("!")


def save_tiny_model(folder: Path) -> str:
    """Write a model of two layers and its tokenizer; return the directory.

    The weights are random, from a fixed seed.
    """
    config = Qwen2Config(
        vocab_size=VOCABULARY_SIZE,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,  # of size 32, the smallest that vLLM has on the CPU
        num_key_value_heads=1,
        tie_word_embeddings=True,
        max_position_embeddings=MAX_LENGTH,
        initializer_range=0.2,
        bos_token_id=None,
        eos_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    _tokenizer().save_pretrained(folder)
    return str(folder)


def load_tiny_model(path: str, *, changed_by: int | None = None) -> Any:
    """Return the model in float32; `changed_by` is the seed of a large random change of every weight."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval().requires_grad_(False)
    if changed_by is not None:
        generator = torch.Generator().manual_seed(changed_by)
        for parameter in model.parameters():
            parameter += 0.3 * torch.randn(parameter.shape, generator=generator)
    return model


def letters(tokens: list[int]) -> str:
    """Return the text of these tokens."""
    return "".join(chr(FIRST_LETTER + token) for token in tokens)


@torch.no_grad()
def greedy(model: Any, prompt: list[int], sampling: SamplingParams, *, eos: tuple[int, ...] = ()) -> list[int]:
    """Return the greedy response to a prompt, one plain forward pass for each token."""
    ends = (() if sampling.ignore_eos else eos) + sampling.stop_token_ids
    response: list[int] = []
    while len(response) < sampling.max_new_tokens:
        scores = model(input_ids=torch.tensor([[*prompt, *response]])).logits[0, -1].float()
        scores = _penalised(scores, prompt, response, sampling)
        if len(response) < sampling.min_tokens:
            scores[list(ends)] = float("-inf")
        response.append(int(scores.argmax()))
        text = letters(response)
        if response[-1] in ends or (len(response) > sampling.min_tokens and text.endswith(sampling.stop or ("\0",))):
            break
    return response


@torch.no_grad()
def log_probs(model: Any, prompt: list[int], response: list[int], *, temperature: float) -> torch.Tensor:
    """Return log softmax(logits / temperature) of the response's tokens (R,), from one plain forward pass."""
    logits = model(input_ids=torch.tensor([[*prompt, *response]])).logits[0, len(prompt) - 1 : -1].float()
    return (logits / temperature).log_softmax(-1).gather(-1, torch.tensor(response)[:, None]).squeeze(-1)


def _penalised(scores: torch.Tensor, prompt: list[int], response: list[int], sampling: SamplingParams) -> torch.Tensor:
    """Return the logits (V,) with the penalties of `SamplingParams`."""
    scores = scores.clone()
    seen = torch.tensor(sorted({*prompt, *response}))
    picked = scores[seen]
    factor = sampling.repetition_penalty
    scores[seen] = torch.where(picked > 0, picked / factor, picked * factor)
    for token in response:
        scores[token] -= sampling.frequency_penalty
    for token in set(response):
        scores[token] -= sampling.presence_penalty
    return scores


def _tokenizer() -> PreTrainedTokenizerFast:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    words = {letters([token]): token for token in range(VOCABULARY_SIZE)}
    tokenizer = Tokenizer(models.BPE(words, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=letters([0]))
