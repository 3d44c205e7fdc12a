"""Rules of the settings that decide which samples a step trains on."""

from hybridrl.config.checks.rollout import Problems
from hybridrl.config.schema.ppo import PPOConfig


def sampling_problems(config: PPOConfig) -> Problems:
    """Yield settings of dynamic sampling without effect, or with which no batch gets full."""
    data, algorithm, samples = config.data, config.algorithm, config.actor_rollout_ref.rollout.n
    filters, generated = algorithm.filter_groups, data.gen_batch_size or data.train_batch_size
    if not filters.enable:
        if generated != data.train_batch_size:
            yield (
                f"data.gen_batch_size={generated}: has no effect without algorithm.filter_groups.enable=true; leave it "
                f"out, or set data.train_batch_size={generated}"
            )
        return
    if samples == 1:
        yield (
            "actor_rollout_ref.rollout.n=1: algorithm.filter_groups.enable=true compares several samples of a prompt; "
            "set actor_rollout_ref.rollout.n=2 or more"
        )
    if filters.metric == "seq_final_reward" and algorithm.use_kl_in_reward:
        yield (
            "algorithm.filter_groups.metric=seq_final_reward: groups are filtered before log-probs are computed, so "
            "without the KL of algorithm.use_kl_in_reward=true; use algorithm.filter_groups.metric=seq_reward"
        )
    limit = filters.max_num_gen_batches
    if limit and limit * generated < data.train_batch_size:
        yield (
            f"algorithm.filter_groups.max_num_gen_batches={limit}: so many generation batches of {generated} prompts "
            f"(data.gen_batch_size) never fill data.train_batch_size={data.train_batch_size}; set "
            f"{-(-data.train_batch_size // generated)} or more, or 0 for no limit"
        )
