"""Sample a few tokens right after a push, for the parity gate of the trainer.

`WeightPushMixin` calls it in each rollout's worker process, where no request is open at that time. What is sampled
depends on the rollout alone: no agent loop, no environment.
"""

import time
from collections.abc import Iterator
from typing import Any

import torch

from hybridrl.workers.rollout.base import Rollout
from hybridrl.workers.rollout.requests import Probe, ProbedTokens
from hybridrl.workers.rollout.sampling.sampler import SamplingParams, default_seeds, sequence_keys

COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")  # names of one entry in transformers' configs


def sample_probe(rollout: Rollout, probe: Probe) -> ProbedTokens:
    """Return what the rollout samples for a probe. Engines with keyed sampling draw the same on every rank."""
    began, sampling = time.perf_counter(), SamplingParams(probe.max_new_tokens, temperature=probe.temperature)
    keys = sequence_keys(default_seeds(0, len(probe.prompts)), 1)
    found = rollout.generate_tokens([list(prompt) for prompt in probe.prompts], keys, sampling)
    lengths = found.mask.sum(-1).tolist()
    return ProbedTokens(
        tuple(tuple(row[:length]) for row, length in zip(found.tokens.tolist(), lengths, strict=True)),
        tuple(tuple(row[:length]) for row, length in zip(found.log_probs.tolist(), lengths, strict=True)),
        rollout.setup.dtype,
        torch.device(rollout.setup.device).type,
        time.perf_counter() - began,
    )


def layer_kinds(config: Any) -> list[str]:
    """Return what is special about the layers of a model with this `PretrainedConfig`, in words."""
    return list(_layer_kinds(config.get_text_config()))


def _layer_kinds(config: Any) -> Iterator[str]:
    yield from dict.fromkeys(getattr(config, "layer_types", None) or ["full_attention"])
    window = getattr(config, "sliding_window", None)
    if window and getattr(config, "use_sliding_window", True):
        yield f"a sliding window of {window}"
    for name in COUNTS:
        if count := getattr(config, name, None):
            yield f"{count} experts"
            break
    if config.model_type == "gpt_oss":
        yield "attention sinks"
    if getattr(config, "kv_lora_rank", None):
        yield "latent attention"
    if getattr(config, "attn_logit_softcapping", None) or getattr(config, "final_logit_softcapping", None):
        yield "soft caps"
    if getattr(config, "tie_word_embeddings", False):
        yield "tied embeddings"
