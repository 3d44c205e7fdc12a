"""Rules on token budgets: each must be at least as large as the longest sequence.

A budget is a hard limit on a micro-batch, so a longer sequence could not be processed.
"""

import functools
from collections.abc import Iterator
from typing import Any

from hybridrl.config.schema.ppo import PPOConfig
from hybridrl.config.schema.sft import SupervisedConfig

Problems = Iterator[str]


def token_budget_problems(config: PPOConfig, *, with_critic: bool) -> Problems:
    """Yield budgets below the longest sequence, wherever micro-batches are cut by tokens."""
    longest = config.data.max_prompt_length + config.data.max_response_length
    policy, critic, reward_model = config.actor_rollout_ref, config.critic, config.reward_model
    actor, ref, generation = policy.actor, policy.ref, policy.rollout
    with_ref = actor.use_kl_loss or config.algorithm.use_kl_in_reward or config.distillation.enabled
    log_probs = "log_prob_max_token_len_per_gpu"
    # (key, whether the role exists, whether it cuts micro-batches by tokens, rows per micro-batch)
    roles = [
        (
            "actor_rollout_ref.actor.ppo_max_token_len_per_gpu",
            True,
            actor.use_dynamic_bsz,
            actor.ppo_micro_batch_size_per_gpu,
        ),
        (
            f"actor_rollout_ref.rollout.{log_probs}",
            True,
            generation.log_prob_use_dynamic_bsz,
            generation.log_prob_micro_batch_size_per_gpu,
        ),
        (
            f"actor_rollout_ref.ref.{log_probs}",
            with_ref,
            ref.log_prob_use_dynamic_bsz,
            ref.log_prob_micro_batch_size_per_gpu,
        ),
        ("critic.ppo_max_token_len_per_gpu", with_critic, critic.use_dynamic_bsz, critic.ppo_micro_batch_size_per_gpu),
        (
            "reward_model.forward_max_token_len_per_gpu",
            reward_model.enable,
            False,
            reward_model.micro_batch_size_per_gpu,
        ),
    ]
    for key, exists, dynamic, rows in roles:
        budget = _value(config, key)
        if (dynamic or (exists and rows is None)) and budget < longest:
            yield (
                f"{key}={budget}: one sequence may have data.max_prompt_length + data.max_response_length = "
                f"{longest} tokens; raise it"
            )


def sft_token_budget_problems(config: SupervisedConfig) -> Problems:
    """Yield a token budget below the longest sequence."""
    budget, longest = config.data.max_token_len_per_gpu, config.data.max_length
    by_tokens = config.data.use_dynamic_bsz or config.data.micro_batch_size_per_gpu is None
    if by_tokens and budget < longest:
        yield (
            f"data.max_token_len_per_gpu={budget}: one sequence may have data.max_length = {longest} tokens; raise it"
        )


def _value(config: PPOConfig, key: str) -> Any:
    return functools.reduce(getattr, key.split("."), config)
