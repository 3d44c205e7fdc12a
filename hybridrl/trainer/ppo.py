"""`RayPPOTrainer`: the driver of PPO and its relatives. One program commands groups of workers; what is computed stands in `stages`.

    trainer = RayPPOTrainer(config=config, tokenizer=tokenizer, role_worker_mapping=..., resource_pool_manager=..., reward_fn=...)
    trainer.init_workers()
    trainer.fit()

A step is the list `RayPPOTrainer.stages()`, in order; each stage adds columns to `ctx.batch`. Change a step by overriding a stage,
or by changing the list; nothing else needs to be copied. Placement is `roles.py`, data `data.py`, durable state `checkpoint.py`.
"""

import functools
import logging
import math
import os
import time
import uuid
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from hybridrl.algos.advantages import get_adv_estimator
from hybridrl.algos.kl import AdaptiveKLController, FixedKLController, apply_kl_penalty
from hybridrl.algos.masked import masked_mean
from hybridrl.algos.partition import balanced_partition
from hybridrl.config import PPOConfig, to_yaml
from hybridrl.config.ppo import KLCtrlConfig
from hybridrl.errors import ConfigError, DataError
from hybridrl.framework import OnlineRLContext, stage
from hybridrl.protocol import DataProto
from hybridrl.single_controller.plan import launch, plan_processes
from hybridrl.single_controller.ray_worker_group import RayClassWithInitArgs, RayWorkerGroup
from hybridrl.trainer.checkpoint import CheckpointStore, find_resume, read_trainer_state, write_run_state
from hybridrl.trainer.data import collate_fn, load_dataset
from hybridrl.trainer.metrics import (
    compute_data_metrics,
    compute_throughput_metrics,
    compute_timing_metrics,
    global_seqlen_metrics,
    mean_metrics,
    rollout_mismatch_metrics,
)
from hybridrl.trainer.policy import PolicyGroups
from hybridrl.trainer.prompt_loader import PromptLoader
from hybridrl.trainer.roles import ResourcePoolManager, Role
from hybridrl.trainer.run import is_due, open_tracking, run_directory, run_stages
from hybridrl.trainer.samples import sample_rows, write_samples
from hybridrl.trainer.seeds import Purpose, call_seed, row_seeds
from hybridrl.trainer.tokenizer import pad_token_id
from hybridrl.trainer.validation import validate

logger = logging.getLogger(__name__)
RewardFn = Callable[[DataProto], Any]

# Columns that a model reads; whatever else a batch has stays with the driver.
MODEL_INPUT = ("input_ids", "attention_mask", "position_ids", "responses", "response_mask")
PROMPT_INPUT = ("input_ids", "attention_mask", "position_ids", "seeds")


class RayPPOTrainer:
    """The driver of PPO and its relatives.

    config: the job's settings. role_worker_mapping: `Role` -> worker class. resource_pool_manager: which role works where.
    ray_worker_group_cls: `RayWorkerGroup`, or `LocalWorkerGroup` for one process without Ray. reward_fn, val_reward_fn: called with
    a batch, return a `RewardOutput` (see `workers/reward`). Datasets and sampler default to what `config.data` names.
    """

    def __init__(
        self,
        config: PPOConfig,
        tokenizer: Any,
        role_worker_mapping: dict[Role, type],
        resource_pool_manager: ResourcePoolManager,
        ray_worker_group_cls: type = RayWorkerGroup,
        *,
        reward_fn: RewardFn | None = None,
        val_reward_fn: RewardFn | None = None,
        train_dataset: Any = None,
        val_dataset: Any = None,
        collate_fn: Callable = collate_fn,
        train_sampler: Any = None,
    ):
        self.config, self.tokenizer = config, tokenizer
        self.role_worker_mapping, self.resource_pool_manager = role_worker_mapping, resource_pool_manager
        self.ray_worker_group_cls = ray_worker_group_cls
        self.reward_fn, self.val_reward_fn = reward_fn, val_reward_fn or reward_fn
        self.estimator = get_adv_estimator(config.algorithm.adv_estimator)
        self.job = f"{config.trainer.experiment_name}-{uuid.uuid4().hex[:6]}"
        self._check_roles()
        self._make_loaders(train_dataset, val_dataset, collate_fn, train_sampler)
        self.kl_ctrl = make_kl_controller(config.algorithm.kl_ctrl)
        self.store = CheckpointStore(run_directory(config.trainer), keep=config.trainer.max_ckpt_to_keep)
        self.groups: dict[str, Any] = {}
        self._rewarded = False  # whether any sample has had a reward yet
        self.global_steps = 0  # the step in progress, or the last one done; also the version of the weights it leaves

    @property
    def use_critic(self) -> bool:
        enabled = self.config.critic.enable
        return self.estimator.needs_critic if enabled is None else enabled

    @property
    def use_reference(self) -> bool:
        return self.config.actor_rollout_ref.actor.use_kl_loss or self.config.algorithm.use_kl_in_reward

    def _check_roles(self) -> None:
        roles = set(self.role_worker_mapping)
        if self.use_critic and Role.Critic not in roles:
            raise ConfigError(f"algorithm.adv_estimator={self.estimator.name} needs a critic; map Role.Critic to a worker class")
        if self.use_reference and not roles & {Role.RefPolicy, Role.ActorRolloutRef}:
            raise ConfigError("KL to the reference policy is on, but no role holds one; map Role.RefPolicy to a worker class")
        if self.reward_fn is None and Role.RewardModel not in roles:
            raise ConfigError("there is no reward: give reward_fn, or map Role.RewardModel to a worker class")

    def _make_loaders(self, train_dataset: Any, val_dataset: Any, collate: Callable, sampler: Any) -> None:
        data = self.config.data
        train = train_dataset if train_dataset is not None else load_dataset(data, data.train_files, self.tokenizer)
        self.val_dataset = val_dataset
        if val_dataset is None and data.val_files:
            self.val_dataset = load_dataset(data, data.val_files, self.tokenizer, max_samples=data.val_max_samples)
        self.collate = functools.partial(collate, pad_token_id=pad_token_id(self.tokenizer))
        self.train_loader = PromptLoader(
            train, batch_size=data.train_batch_size, shuffle=data.shuffle, seed=data.seed, collate=self.collate, sampler=sampler
        )
        trainer = self.config.trainer
        self.total_training_steps = trainer.total_training_steps or trainer.total_epochs * self.train_loader.steps_per_epoch

    # ---- workers

    def init_workers(self) -> None:
        """Reserve devices, start the worker processes and load their models. When one fails, none is left running."""
        manager = self.resource_pool_manager
        manager.create_resource_pool(job=self.job)
        classes = {str(role): RayClassWithInitArgs(cls, self.config, str(role)) for role, cls in self.role_worker_mapping.items()}
        pool_of_role = {str(role): manager.mapping[role] for role in self.role_worker_mapping}
        plan = plan_processes(self.job, pool_of_role, colocate=self.config.trainer.colocate)
        try:
            self.groups = launch(plan, classes, manager.resource_pool_dict, group_cls=self.ray_worker_group_cls)
            for role, group in self.groups.items():
                group.init_model(self._total_optimizer_steps(role))
        except BaseException:
            self.shutdown()
            raise
        on_cuda = any(getattr(pool, "use_gpu", False) for pool in manager.resource_pool_dict.values())
        self.policy = PolicyGroups(self.groups, sleep=on_cuda and self.config.actor_rollout_ref.rollout.free_cache_engine)

    def _total_optimizer_steps(self, role: str) -> int:
        per_batch = math.ceil(self.config.data.train_batch_size / self._prompts_per_update(role))
        return self.total_training_steps * per_batch * self.config.actor_rollout_ref.actor.ppo_epochs

    def _prompts_per_update(self, role: str) -> int:
        actor = self.config.actor_rollout_ref.actor.ppo_mini_batch_size
        return self.config.critic.ppo_mini_batch_size or actor if role == str(Role.Critic) else actor

    def shutdown(self) -> None:
        """End the worker processes and give their devices back. Safe to call twice."""
        for group in self.groups.values():
            group.shutdown()
        self.groups = {}
        self.resource_pool_manager.release()

    # ---- the loop

    def stages(self) -> list[Callable[[OnlineRLContext], None]]:
        """The step: its stages in order, with the columns each reads and writes. Those that are not pure run exactly once a step."""
        policy, critic = "actor_rollout", "critic"
        judge = "rm" if Role.RewardModel in self.role_worker_mapping else None
        scores = ("token_level_scores", "reward_valid")
        values = ("values",) if self.use_critic else ()
        kl_loss = ("ref_log_prob",) if self.config.actor_rollout_ref.actor.use_kl_loss else ()
        kl_reward = ("old_log_probs", "ref_log_prob") if self.config.algorithm.use_kl_in_reward else ()
        trained, valued = (*MODEL_INPUT, "old_log_probs", "advantages", *kl_loss), (*MODEL_INPUT, "values", "returns")
        once = {"pure": False}
        table = [
            stage("next_batch", writes=PROMPT_INPUT, **once)(self.next_batch),
            stage("gen", role=policy, reads=PROMPT_INPUT, writes=("prompts", *MODEL_INPUT, "rollout_log_probs"))(self.generate),
            stage("reward", role=judge, reads=("prompts", "responses", "response_mask"), writes=scores)(self.reward),
            stage("old_log_prob", role=policy, reads=MODEL_INPUT, writes=("old_log_probs",))(self.old_log_prob),
            self.use_reference and stage("ref", role="ref", reads=MODEL_INPUT, writes=("ref_log_prob",))(self.ref_log_prob),
            self.use_critic and stage("values", role=critic, reads=MODEL_INPUT, writes=values)(self.values),
            stage("adv", reads=(*scores, *kl_reward, *values), writes=("advantages", "returns"), **once)(self.advantage),
            self.use_critic and stage("update_critic", role=critic, reads=valued, **once)(self.update_critic),
            stage("update_actor", role=policy, reads=trained, **once)(self.update_actor),
            stage("update_weights", role=policy, **once)(self.update_weights),
            stage("testing", role=policy)(self.testing),
            stage("log", **once)(self.log),
            stage("save_checkpoint", **once)(self.save_checkpoint),
        ]
        return [s for s in table if s]

    def fit(self) -> None:
        """Train up to `total_training_steps`, from the newest commit if there is one (`trainer.resume_mode`)."""
        trainer = self.config.trainer
        self._resume()
        self.policy.push_weights(self.global_steps)
        remaining = 0 if trainer.val_only else self.total_training_steps - self.global_steps
        with open_tracking(self.config, start_step=self.global_steps, total_steps=self.total_training_steps) as self.tracking:
            if trainer.val_only or (trainer.val_before_train and self.global_steps == 0 and self.val_dataset is not None):
                self.tracking.log(self._validate(), self.global_steps)
            if remaining > 0:
                run_stages(self.stages(), max_step=remaining)
            elif not trainer.val_only:
                logger.info("nothing to train: step %d of %d is done", self.global_steps, self.total_training_steps)

    def next_batch(self, ctx: OnlineRLContext) -> None:
        """The next prompts of the epoch."""
        ctx.started_at = time.perf_counter()
        self.global_steps += 1
        ctx.metrics |= {"training/global_step": self.global_steps, "training/epoch": self.train_loader.epoch}
        ctx.batch = self.train_loader.next_batch()
        self.identify(ctx.batch, purpose=Purpose.TRAIN_ROLLOUT, step=self.global_steps)

    def identify(self, batch: DataProto, *, purpose: Purpose, step: int) -> None:
        """Give every prompt an id that its samples share, and a seed that depends only on run, purpose, step and row."""
        batch.non_tensor_batch["uid"] = np.array([f"{step}-{i}" for i in range(len(batch))], dtype=object)
        batch.batch["seeds"] = row_seeds(len(batch), seed=self.config.trainer.seed, purpose=purpose, step=step)

    def generate(self, ctx: OnlineRLContext) -> None:
        """`rollout.n` responses per prompt, in adjacent rows."""
        seed = call_seed(seed=self.config.trainer.seed, purpose=Purpose.TRAIN_ROLLOUT, step=self.global_steps)
        ctx.batch = self.respond(ctx.batch, n=self.config.actor_rollout_ref.rollout.n, seed=seed, validate=False)
        self.policy.rest()
        if self.config.trainer.balance_batch:
            lengths = ctx.batch.batch["attention_mask"].sum(-1).tolist()
            ctx.metrics |= global_seqlen_metrics(lengths, balanced_partition(lengths, self.policy.actor.world_size))

    def respond(self, batch: DataProto, *, n: int, seed: int, validate: bool) -> DataProto:
        """Return the batch with every prompt repeated `n` times and its responses added."""
        prompts = batch.pop(batch_keys=list(PROMPT_INPUT))
        prompts.meta_info = {"seed": seed, "validate": validate}
        responses = self.policy.generate(prompts)
        responses.meta_info = {}
        return batch.repeat(n, interleave=True).union(responses.select(batch_keys=[k for k in responses.batch.keys() if k != "seeds"]))

    def reward(self, ctx: OnlineRLContext) -> None:
        """A score for every response, from a reward model, a rule, or a rule that reads the model's score."""
        ctx.reward_extra = self.score(ctx.batch, self.reward_fn, metrics=ctx.metrics)
        if self.config.trainer.rollout_data_dir:
            path = os.path.join(self.config.trainer.rollout_data_dir, f"{self.global_steps}.jsonl")
            write_samples(path, sample_rows(ctx.batch, self.tokenizer, step=self.global_steps, extra=ctx.reward_extra))

    def score(self, batch: DataProto, reward_fn: RewardFn | None, *, metrics: dict[str, float]) -> dict[str, list]:
        """Add `token_level_scores` and `reward_valid` to the batch; return what the reward function added per row."""
        if str(Role.RewardModel) in self.groups:
            batch.union(
                self.groups[str(Role.RewardModel)].compute_rm_score(batch.select(batch_keys=list(MODEL_INPUT), non_tensor_batch_keys=[]))
            )
        if reward_fn is None:
            batch.batch["token_level_scores"] = batch.batch["rm_scores"]
            batch.batch["reward_valid"] = torch.ones(len(batch), dtype=torch.bool)
            return {}
        out = reward_fn(batch)
        batch.batch["token_level_scores"], batch.batch["reward_valid"] = out.reward_tensor, out.valid
        metrics.update(out.metrics)
        self._rewarded = self._rewarded or bool(out.valid.any())
        if not self._rewarded:
            raise DataError(
                f"none of the first {len(batch)} samples got a reward, so nothing can be learnt; the log above names the reasons. "
                "Mend the reward function (custom_reward_function.path), or raise reward_model.timeout_s"
            )
        return out.extra

    def old_log_prob(self, ctx: OnlineRLContext) -> None:
        """Log-probs of the responses under the policy that is about to be trained, and how far the rollout's own are from them."""
        ctx.batch.union(self._on_ranks(ctx, self.policy.actor.compute_log_prob, self.policy.actor.world_size))
        entropys = ctx.batch.batch.pop("entropys")
        ctx.metrics["actor/entropy"] = float(masked_mean(entropys, ctx.batch.batch["response_mask"]))
        if "rollout_log_probs" in ctx.batch.batch.keys():
            ctx.metrics |= rollout_mismatch_metrics(ctx.batch)

    def ref_log_prob(self, ctx: OnlineRLContext) -> None:
        """Log-probs under the reference policy."""
        ctx.batch.union(self._on_ranks(ctx, self.policy.ref.compute_ref_log_prob, self.policy.ref.world_size))

    def values(self, ctx: OnlineRLContext) -> None:
        """The critic's value before each response token."""
        critic = self.groups[str(Role.Critic)]
        ctx.batch.union(self._on_ranks(ctx, critic.compute_values, critic.world_size))

    def _on_ranks(self, ctx: OnlineRLContext, method: Callable, num_ranks: int) -> DataProto:
        """Call a pure method with rows dealt so that every rank computes about the same tokens; rows come back in their order.

        The batch itself is not reordered: which rows form a mini-batch must not depend on the number of ranks.
        """
        data = self._columns(ctx, MODEL_INPUT)
        if num_ranks == 1 or not self.config.trainer.balance_batch:
            return method(data)
        parts = balanced_partition(data.batch["attention_mask"].sum(-1).tolist(), num_ranks)
        result = method([data.select_idxs(part) for part in parts])
        result.reorder(torch.tensor([row for part in parts for row in part]).argsort())
        return result

    def advantage(self, ctx: OnlineRLContext) -> None:
        """Token rewards (with the KL penalty, if configured), advantages and returns."""
        algorithm, columns = self.config.algorithm, ctx.batch.batch
        columns["token_level_rewards"] = columns["token_level_scores"]
        if algorithm.use_kl_in_reward:
            self._penalize_kl(ctx)
        _, group_B = np.unique(ctx.batch.non_tensor_batch["uid"].astype(str), return_inverse=True)
        columns["advantages"], columns["returns"] = self.estimator(
            columns["token_level_rewards"],
            columns["response_mask"],
            values_BT=columns.get("values", None),
            group_B=torch.from_numpy(group_B),
            valid_B=columns["reward_valid"],
            gamma=algorithm.gamma,
            lam=algorithm.lam,
            norm_by_std=algorithm.norm_adv_by_std_in_grpo,
        )

    def _penalize_kl(self, ctx: OnlineRLContext) -> None:
        columns, coef = ctx.batch.batch, self.kl_ctrl.value
        columns["token_level_rewards"], kl = apply_kl_penalty(
            columns["token_level_scores"],
            columns["old_log_probs"],
            columns["ref_log_prob"],
            columns["response_mask"],
            coef=coef,
            kind=self.config.algorithm.kl_penalty,
        )
        self.kl_ctrl.update(float(kl), len(ctx.batch))
        ctx.metrics |= {"actor/reward_kl_penalty": float(kl), "actor/reward_kl_penalty_coeff": coef}

    def update_critic(self, ctx: OnlineRLContext) -> None:
        """Fit the critic to the returns."""
        data = self._training_rows(ctx, (*MODEL_INPUT, "values", "returns"), role=str(Role.Critic))
        if len(data):
            ctx.metrics |= mean_metrics(self.groups[str(Role.Critic)].update_critic(data).meta_info["metrics"])

    def update_actor(self, ctx: OnlineRLContext) -> None:
        """Improve the policy, once the critic has warmed up."""
        actor = self.config.actor_rollout_ref.actor
        columns = (*MODEL_INPUT, "old_log_probs", "advantages", *(("ref_log_prob",) if actor.use_kl_loss else ()))
        data = self._training_rows(ctx, columns, role=str(Role.Actor))
        ctx.updated = self.global_steps > self.config.trainer.critic_warmup and len(data) > 0
        if ctx.updated:
            ctx.metrics |= mean_metrics(self.policy.actor.update_actor(data).meta_info["metrics"])

    def _training_rows(self, ctx: OnlineRLContext, columns: tuple[str, ...], *, role: str) -> DataProto:
        """The rows whose reward is valid, with what the update needs to cut them into optimizer steps."""
        data = self._columns(ctx, columns).select_idxs(ctx.batch.batch["reward_valid"])
        data.meta_info = {
            "mini_batch_size": self._prompts_per_update(role) * self.config.actor_rollout_ref.rollout.n,
            "balance": self.config.trainer.balance_batch,
        }
        if self.config.actor_rollout_ref.actor.shuffle:
            data.meta_info["shuffle_seed"] = call_seed(seed=self.config.trainer.seed, purpose=Purpose.SHUFFLE, step=self.global_steps)
        return data

    def update_weights(self, ctx: OnlineRLContext) -> None:
        """Push the new weights to the rollout, with this step's number as their version."""
        self.policy.push_weights(self.global_steps)

    def testing(self, ctx: OnlineRLContext) -> None:
        """Validate every `trainer.test_freq` steps and after the last one."""
        if self.val_dataset is not None and self._due(self.config.trainer.test_freq):
            ctx.metrics |= self._validate()

    def _validate(self) -> dict[str, float]:
        return validate(self, step=self.global_steps)

    def log(self, ctx: OnlineRLContext) -> None:
        """Tell the step's numbers to every logger."""
        ctx.timing["step"] = time.perf_counter() - ctx.started_at
        data = self.config.data
        ctx.metrics |= compute_data_metrics(
            ctx.batch, use_critic=self.use_critic, max_response_length=data.max_response_length, max_prompt_length=data.max_prompt_length
        )
        ctx.metrics |= compute_timing_metrics(ctx.batch, ctx.timing)
        ctx.metrics |= compute_throughput_metrics(ctx.batch, ctx.timing, self.resource_pool_manager.get_n_gpus())
        self.tracking.log(ctx.metrics, self.global_steps)

    def save_checkpoint(self, ctx: OnlineRLContext) -> None:
        """Commit a checkpoint every `trainer.save_freq` steps and after the last one."""
        if self._due(self.config.trainer.save_freq):
            path = self.store.commit(self.global_steps, self._write_checkpoint)
            logger.info("committed %s", path)

    def _due(self, freq: int) -> bool:
        return is_due(freq, self.global_steps, total_steps=self.total_training_steps)

    # ---- durable state

    def _write_checkpoint(self, directory: str) -> None:
        for role, group in self._trained_groups().items():
            group.save_checkpoint(os.path.join(directory, role))
        state = {"global_steps": self.global_steps, "data": self.train_loader.state_dict(), "kl_ctrl": self.kl_ctrl.state_dict()}
        write_run_state(directory, state, config_yaml=to_yaml(self.config))

    def _resume(self) -> None:
        trainer = self.config.trainer
        path = find_resume(self.store, trainer)
        if path is None:
            return
        state = read_trainer_state(path)
        for role, group in self._trained_groups().items():
            group.load_checkpoint(os.path.join(path, role))
        self.global_steps = state["global_steps"]
        self.train_loader.load_state_dict(state["data"])
        self.kl_ctrl.load_state_dict(state["kl_ctrl"])
        logger.info("resumed from %s, step %d of %d", path, self.global_steps, self.total_training_steps)

    def _trained_groups(self) -> dict[str, Any]:
        critic = self.groups.get(str(Role.Critic))
        return {"actor": self.policy.actor} | ({"critic": critic} if critic is not None else {})

    def _columns(self, ctx: OnlineRLContext, names: tuple[str, ...]) -> DataProto:
        return ctx.batch.select(batch_keys=list(names), non_tensor_batch_keys=[], meta_info_keys=[])


def make_kl_controller(config: KLCtrlConfig) -> FixedKLController | AdaptiveKLController:
    """Return the controller of the KL coefficient in the reward."""
    if config.type == "adaptive":
        return AdaptiveKLController(config.kl_coef, config.target_kl, config.horizon)
    return FixedKLController(config.kl_coef)
