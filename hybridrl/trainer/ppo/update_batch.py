"""Select the rows and columns that workers get, and count optimizer steps.

Pure functions, called by the trainer in the driver. `workers/mini_batch.py` cuts the selected rows into mini-batches.
"""

import math
from collections.abc import Callable, Collection, Sequence

import torch

from hybridrl.algos.partition import balanced_partition
from hybridrl.config import PPOConfig
from hybridrl.data_plane.meta_info import UpdatePlan
from hybridrl.protocol import DataProto
from hybridrl.trainer.data.seeds import Purpose, call_seed
from hybridrl.trainer.ppo.off_policy import fresh_mask
from hybridrl.trainer.roles import Role


def num_optimizer_steps(config: PPOConfig, batch_sizes: Sequence[int], *, role: str) -> int:
    """Return the number of optimizer steps of a whole run, for learning-rate schedules.

    Args:
        config: Settings of the job.
        batch_sizes: Prompts in each training step.
        role: Role that is updated; all but the critic skip the critic's warm-up steps.
    """
    num_skipped = 0 if role == Role.Critic else config.trainer.critic_warmup
    replayed = config.trainer.replay.groups
    steps = sum(math.ceil((size + replayed) / prompts_per_update(config, role)) for size in batch_sizes[num_skipped:])
    return steps * config.actor_rollout_ref.actor.ppo_epochs


def prompts_per_update(config: PPOConfig, role: str) -> int:
    """Return the prompts, with all their samples, in one optimizer step of this role."""
    actor = config.actor_rollout_ref.actor.ppo_mini_batch_size
    return config.critic.ppo_mini_batch_size or actor if role == Role.Critic else actor


def select_training_rows(
    batch: DataProto, columns: Sequence[str], config: PPOConfig, *, role: str, step: int
) -> DataProto:
    """Return these columns of the rows with a valid reward, ready for an update.

    The `UpdatePlan` in `meta_info` says how `workers/mini_batch.py` cuts the rows. With `trainer.stale_tokens=drop`,
    tokens older than `trainer.staleness` in this step are masked.
    """
    data, trainer = select_columns(batch, columns), config.trainer
    if trainer.stale_tokens == "drop" and trainer.staleness is not None:
        data.batch["response_mask"] = fresh_mask(batch, version=step - 1, staleness=trainer.staleness)
    data = data.select_idxs(batch.batch["reward_valid"])
    shuffle = config.actor_rollout_ref.actor.shuffle
    plan = UpdatePlan(
        mini_batch_size=prompts_per_update(config, role) * config.actor_rollout_ref.rollout.n,
        shuffle_seed=call_seed(seed=trainer.seed, purpose=Purpose.SHUFFLE, step=step) if shuffle else None,
        balance=trainer.balance_batch,
    )
    data.meta_info = {UpdatePlan.KEY: plan}
    return data


def select_columns(batch: DataProto, names: Collection[str]) -> DataProto:
    """Return a batch with these columns only, without `meta_info`."""
    return batch.select(batch_keys=list(names), non_tensor_batch_keys=[], meta_info_keys=[])


def call_balanced(method: Callable, data: DataProto, *, num_ranks: int, balance: bool) -> DataProto:
    """Call a pure method of a group with about the same number of tokens on every rank.

    The batch is not reordered, and the result has its row order: which rows form a mini-batch must not depend on the
    number of ranks.
    """
    if num_ranks == 1 or not balance:
        return method(data)
    parts = balanced_partition(data.batch["attention_mask"].sum(-1).tolist(), num_ranks)
    result = method([data.select_idxs(part) for part in parts])
    result.reorder(torch.tensor([row for part in parts for row in part]).argsort())
    return result
