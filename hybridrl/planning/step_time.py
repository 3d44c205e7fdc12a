"""Expected seconds of the stages of a step, by the sizes of the job and the speeds of a device (`costs.py`).

All responses count with the same length. What is left out: rewards, waits for the longest response, and the driver.
The schedule with lengths that differ is `benchmarks/simulation`.
"""

from collections.abc import Collection

import numpy as np

from hybridrl.config import PPOConfig
from hybridrl.planning.costs import Costs

SCORES, UPDATES = ("old_log_prob", "ref", "values"), ("update_critic", "update_actor")


def stage_seconds(config: PPOConfig, costs: Costs, *, tokens: int, stages: Collection[str]) -> dict[str, float]:
    """Return stage -> seconds, in the order of the step.

    Args:
        config: The job. A critic and a reference count as models of the actor's size.
        costs: Of the actor's model on one device.
        tokens: Mean tokens of a response.
        stages: Those of `SCORES` and `UPDATES` that the job has.
    """
    policy, trainer = config.actor_rollout_ref, config.trainer
    rows = config.data.train_batch_size * policy.rollout.n
    trains = trainer.n_gpus_per_node * trainer.nnodes
    generates = policy.rollout.n_gpus_per_node * policy.rollout.nnodes or trains
    replica = policy.rollout.tensor_model_parallel_size
    own = np.full(-(-rows // trains), tokens)
    steps = -(-config.data.train_batch_size // policy.actor.ppo_mini_batch_size) * policy.actor.ppo_epochs
    shares = [tokens] * -(-rows * replica // generates)
    seconds = {"gen": costs.generate_s(shares, devices=replica)}
    seconds |= {name: costs.score_s(own) + costs.call_overhead_s for name in SCORES if name in stages}
    update_s = policy.actor.ppo_epochs * costs.update_s(own) + steps * costs.update_overhead_s
    return seconds | {name: update_s for name in UPDATES if name in stages} | {"update_weights": costs.push_s()}


def step_seconds(config: PPOConfig, seconds: dict[str, float]) -> float:
    """Return the seconds of a step: generation runs beside the rest with `trainer.lag` and a pool of its own."""
    rest = sum(seconds.values()) - seconds["gen"]
    ahead = config.trainer.lag > 0 and config.actor_rollout_ref.rollout.n_gpus_per_node > 0
    return max(seconds["gen"], rest) if ahead else seconds["gen"] + rest
