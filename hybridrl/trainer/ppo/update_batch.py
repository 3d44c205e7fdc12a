"""Select the rows and columns that workers get, and count optimizer steps.

Pure functions, called by the trainer in the driver. `workers/mini_batch.py` cuts the selected rows into mini-batches.
"""

import logging
import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate, pairwise

import numpy as np
import torch

from hybridrl import algos
from hybridrl.algos import advantages, policy_losses
from hybridrl.algos.partition import balanced_partition
from hybridrl.algos.partition.row_images import IMAGE_INPUTS, images_of, prefix_rows
from hybridrl.config import PPOConfig
from hybridrl.config.schema.ppo import SelectSamplesConfig
from hybridrl.data_plane.futures import DataProtoFuture
from hybridrl.data_plane.meta_info import UpdatePlan
from hybridrl.protocol import DataProto
from hybridrl.trainer.data.seeds import Purpose, call_seed
from hybridrl.trainer.ppo.columns import EPISODE, OLD_LOG_PROBS, ROLLOUT_RS_MASK, ROUTED_EXPERTS
from hybridrl.trainer.ppo.sampling.off_policy import fresh_mask
from hybridrl.trainer.ppo.step_settings import max_token_age, samples_per_group
from hybridrl.trainer.roles import Role

logger = logging.getLogger(__name__)


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


def choose_samples(
    batch: DataProto, config: SelectSamplesConfig, *, n: int, seed: int
) -> tuple[DataProto, dict[str, float]]:
    """Return the chosen rows in their order, k adjacent ones per prompt, and metrics.

    A step calls it before actor, critic or reference compute anything. So only k samples cost a forward and a backward
    pass, and advantages compare the chosen ones, as in PODS.

    Args:
        batch: Scored samples, n adjacent rows per prompt.
        config: Settings `algorithm.select_samples`, with a k.
        n: Samples per prompt.
        seed: Seed of `method=random`.
    """
    assert config.k is not None, "the stage runs only with a k"
    scores_GN = batch.batch["token_level_scores"].double().sum(-1).reshape(-1, n).numpy()
    valid_GN = batch.batch["reward_valid"].bool().reshape(-1, n).numpy()
    places_Gk = algos.sample_selection.SELECTIONS[config.method](scores_GN, valid_GN, k=config.k, seed=seed)
    rows = (np.arange(len(places_Gk))[:, None] * n + places_Gk).reshape(-1)
    scores = scores_GN[valid_GN]
    metrics = {
        "training/select_samples/seq_reward_mean": float(scores.mean()) if len(scores) else float("nan"),
        "training/select_samples/left_out_samples": float(len(batch) - len(rows)),
    }
    return batch.select_idxs(torch.from_numpy(rows)), metrics


def select_training_rows(
    batch: DataProto, columns: Sequence[str], config: PPOConfig, *, role: str, step: int
) -> DataProto:
    """Return these columns of the rows with a valid reward, ready for an update.

    The `UpdatePlan` in `meta_info` says how `workers/mini_batch.py` cuts the rows. Their `response_mask` is without the
    tokens that the rollout correction rejects (if `rollout_rs_mask` is among the columns), and with
    `trainer.stale_tokens=drop` without tokens older than `trainer.staleness` in this step. Rows whose mask is empty
    stay. The loss, its divisors and all its terms see this mask. With `algorithm.use_pf_ppo` rows are drawn again, the
    same ones for actor and critic. The actor gets `nll_weights` (rows,) float32 with `positive_nll_coef`, and without
    `old_log_probs` the number of each row in the batch, `batch_row` (rows,) int64. A mini-batch has whole episodes, if
    the batch has the column `episode`.
    """
    data, trainer = select_columns(batch, columns), config.trainer
    if (max_age := max_token_age(config)) is not None:
        data.batch["response_mask"] = fresh_mask(batch, version=step - 1, staleness=max_age)
    if ROLLOUT_RS_MASK in columns:
        data.batch["response_mask"] = data.batch["response_mask"] * data.batch.pop(ROLLOUT_RS_MASK)
    rows, episodes = training_rows(batch, config, step=step)
    data = data.select_idxs(rows)
    if EPISODE in batch.batch.keys():
        data.batch[EPISODE] = episodes
    if role == Role.Actor and config.actor_rollout_ref.actor.positive_nll_coef:
        right, lengths = batch.batch["token_level_scores"].sum(-1)[rows] > 0, data.batch["response_mask"].sum(-1)
        data.batch["nll_weights"] = advantages.rejection.mean_over_kept(right, lengths).float()
    if role == Role.Actor and OLD_LOG_PROBS not in columns:
        data.batch["batch_row"] = rows
    shuffle = config.actor_rollout_ref.actor.shuffle
    plan = UpdatePlan(
        mini_batch_size=prompts_per_update(config, role) * samples_per_group(config),
        shuffle_seed=call_seed(seed=trainer.seed, purpose=Purpose.SHUFFLE, step=step) if shuffle else None,
        balance=trainer.balance_batch,
        share_prefixes=config.actor_rollout_ref.actor.use_prefix_grouper and role == Role.Actor,
    )
    data.meta_info = {UpdatePlan.KEY: plan}
    return data


def training_rows(batch: DataProto, config: PPOConfig, *, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the rows with a valid reward and a number of the episode of each, both int64.

    With PF-PPO, as many episodes are drawn from them by score. One that is drawn twice is two episodes.
    """
    valid, columns = batch.batch["reward_valid"].nonzero()[:, 0], batch.batch
    episode_B = columns[EPISODE] if EPISODE in columns.keys() else torch.arange(len(batch))
    if not config.algorithm.use_pf_ppo:
        return valid, episode_B[valid]
    rows = valid[episode_B[valid] == valid]
    settings, scores = config.algorithm.pf_ppo, batch.batch["token_level_scores"].sum(-1)[rows].numpy()
    selection = algos.sample_selection
    weights = selection.pf_ppo_weights(scores, method=settings.reweight_method, weight_pow=settings.weight_pow)
    seed = call_seed(seed=config.trainer.seed, purpose=Purpose.RESAMPLING, step=step)
    drawn = rows[torch.from_numpy(selection.draw_rows(weights, seed=seed))]
    parts = [valid[episode_B[valid] == episode] for episode in drawn]
    sizes = torch.tensor([len(part) for part in parts], dtype=torch.int64)
    return torch.cat([drawn[:0], *parts]), torch.arange(len(drawn)).repeat_interleave(sizes)


def has_tokens(data: DataProto, *, step: int) -> bool:
    """Return whether any token is left to train on.

    Logs a warning if there are rows without such a token.
    """
    left = bool(data.batch["response_mask"].any()) if len(data) else False
    if len(data) and not left:
        logger.warning(
            "step %d: rollout correction or staleness left no token of %d responses; the policy is not updated. Raise "
            "the thresholds, or lower trainer.lag",
            *(step, len(data)),
        )
    return left


def add_covariance_selection(data: DataProto, config: PPOConfig, *, step: int) -> None:
    """Add `cov_selected` (rows, R) bool for the losses `clip_cov` and `kl_cov`, in place; nothing for other losses.

    The selection is that of the whole update, before it is cut into mini-batches.
    """
    settings = config.actor_rollout_ref.actor.policy_loss
    if settings.loss_mode not in ("clip_cov", "kl_cov") or not len(data):
        return
    covariance, columns = policy_losses.covariance, data.batch
    samples = columns["old_log_probs"], columns["advantages"], columns["response_mask"]
    if settings.loss_mode == "kl_cov":
        columns["cov_selected"] = covariance.select_by_rank(*samples, ratio=settings.kl_cov_ratio)
        return
    keys = covariance.token_keys(
        columns["input_ids"],
        columns["attention_mask"],
        num_columns=columns["response_mask"].shape[1],
        seed=call_seed(seed=config.trainer.seed, purpose=Purpose.SHUFFLE, step=step),
    )
    columns["cov_selected"] = covariance.select_at_random(
        *samples, ratio=settings.clip_cov_ratio, low=settings.clip_cov_lb, high=settings.clip_cov_ub, keys_BT=keys
    )


def select_columns(batch: DataProto, names: Collection[str]) -> DataProto:
    """Return a batch with these columns and the rows' images only, without `meta_info`."""
    objects = [name for name in {*names, IMAGE_INPUTS} if name in batch.non_tensor_batch]
    tensors = [name for name in names if name not in objects]
    return batch.select(batch_keys=tensors, non_tensor_batch_keys=objects, meta_info_keys=[])


def routes_of(batch: DataProto) -> tuple[str, ...]:
    """Return the name of the column of routes, if the batch has it; only the actor reads it."""
    return (ROUTED_EXPERTS,) if ROUTED_EXPERTS in batch.non_tensor_batch else ()


def call_balanced(
    submit: Callable, data: DataProto, *, num_ranks: int, balance: bool, share_prefixes: bool = False
) -> DataProtoFuture:
    """Submit a pure method of a group with about the same number of tokens for every rank.

    The batch is not reordered, and the result has its row order: which rows form a mini-batch must not depend on the
    number of ranks. With `share_prefixes` rows that begin alike are on one rank, and their common tokens count once.
    """
    if num_ranks == 1 or not balance:
        return submit(data)
    if share_prefixes:
        rows = prefix_rows(data.batch["input_ids"], data.batch["attention_mask"], images_of(data))
        parts = algos.prefix_tree.balanced_tree_parts(rows, num_ranks)
    else:
        parts = balanced_partition(data.batch["attention_mask"].sum(-1).tolist(), num_ranks)
    order = np.array([row for part in parts for row in part], dtype=np.int64)
    bounds = list(pairwise([0, *accumulate(map(len, parts))]))
    shards = data.select_idxs(order).split_at(bounds)
    return replace(submit(shards), dispatch_fn=partial(_reordered, order.argsort()))


def _reordered(rows: np.ndarray, result: DataProto) -> DataProto:
    result.reorder(rows)
    return result
