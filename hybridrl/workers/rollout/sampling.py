"""The sampling parameters that a job's settings ask for."""

from typing import Any

from hybridrl.config.ppo import PPOConfig
from hybridrl.workers.rollout.sampler import SamplingParams


def sampling_of(config: PPOConfig, *, validate: bool, seed: int) -> SamplingParams:
    """Return how responses are sampled in training or in validation. seed: of batches whose rows bring no seeds."""
    rollout, length = config.actor_rollout_ref.rollout, config.data.max_response_length
    common: dict[str, Any] = {
        "max_new_tokens": length,
        "seed": seed,
        "repetition_penalty": rollout.repetition_penalty,
        "presence_penalty": rollout.presence_penalty,
        "frequency_penalty": rollout.frequency_penalty,
        "min_tokens": rollout.min_tokens,
        "stop": tuple(rollout.stop),
        "stop_token_ids": tuple(rollout.stop_token_ids),
        "ignore_eos": rollout.ignore_eos,
    }
    if validate:
        val = rollout.val_kwargs
        return SamplingParams(
            n=val.n, do_sample=val.do_sample, temperature=val.temperature, top_k=val.top_k, top_p=val.top_p, logprobs=False, **common
        )
    return SamplingParams(
        n=rollout.n,
        temperature=rollout.temperature,
        top_k=rollout.top_k,
        top_p=rollout.top_p,
        min_p=rollout.min_p,
        logprobs=rollout.calculate_log_probs,
        **common,
    )
