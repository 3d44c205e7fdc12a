"""`RayPPOTrainer`: the driver of PPO and its relatives, which calls groups of workers stage by stage.

    trainer = RayPPOTrainer(
        config=config, tokenizer=tokenizer, role_worker_mapping=..., resource_pool_manager=..., reward_fn=...
    )
    trainer.init_workers()
    trainer.fit()

A step is the list `RayPPOTrainer.stages()`, in order. Each stage adds columns to `ctx.batch`. To change a step,
override a stage or change the list. `main_ppo` creates the trainer. Workers run nothing of this module. Placement is in
`roles.py`, data in `data/`, checkpointed state in `state.py`.
"""

import functools
import logging
import os
import time
from collections.abc import Callable
from typing import Any

from hybridrl.algos.advantages import get_adv_estimator
from hybridrl.algos.masked import masked_mean
from hybridrl.algos.partition import balanced_partition
from hybridrl.config import PPOConfig
from hybridrl.config.checks.megatron import data_parallel_size
from hybridrl.driver.termination import TERMINATION
from hybridrl.framework import OnlineRLContext
from hybridrl.framework.stage import with_spec
from hybridrl.protocol import DataProto
from hybridrl.single_controller.launch import launch
from hybridrl.single_controller.monitoring.tracing import stop_recording
from hybridrl.single_controller.ray_worker_group import RayClassWithInitArgs, RayWorkerGroup
from hybridrl.trainer.checkpoint.compatibility import check_compatible, run_fingerprint
from hybridrl.trainer.checkpoint.saver import CheckpointSaver, min_checkpoint_bytes
from hybridrl.trainer.checkpoint.step_ledger import StepLedger
from hybridrl.trainer.checkpoint.store import CheckpointStore, find_resume_checkpoint
from hybridrl.trainer.data.prompt_dataset import collate_fn, load_prompt_data
from hybridrl.trainer.data.prompt_loader import ROW, StepPrompts
from hybridrl.trainer.data.seeds import Purpose, call_seed
from hybridrl.trainer.data.tokenizer import pad_token_id
from hybridrl.trainer.ppo.metrics import global_seqlen_metrics, rollout_mismatch_metrics, step_metrics
from hybridrl.trainer.ppo.off_policy import apply_rollout_correction, staleness_metrics
from hybridrl.trainer.ppo.policy import make_policy
from hybridrl.trainer.ppo.replay_buffer import ReplayBuffer
from hybridrl.trainer.ppo.rewards import (
    NoRewardGuard,
    RewardFn,
    add_advantages,
    add_token_rewards,
    make_kl_controller,
    score_batch,
)
from hybridrl.trainer.ppo.rollout_pipeline import join_responses, make_pipeline
from hybridrl.trainer.ppo.stages import MODEL_INPUT, PROMPT_INPUT, check_roles, corrects_rollout, ppo_stages
from hybridrl.trainer.ppo.state import load_trainer, save_trainer
from hybridrl.trainer.ppo.update_batch import call_balanced, num_optimizer_steps, select_columns, select_training_rows
from hybridrl.trainer.ppo.validation import RemoteEvaluator, validate, validate_on_evaluator
from hybridrl.trainer.recovery.nonfinite import NonFiniteGuard, train_with_rollbacks
from hybridrl.trainer.recovery.step_retry import StepRetry
from hybridrl.trainer.recovery.step_snapshot import load_resume_state
from hybridrl.trainer.roles import ResourcePoolManager, Role, worker_role
from hybridrl.trainer.run.metrics import mean_metrics
from hybridrl.trainer.run.middleware import apply_middleware, load_middleware
from hybridrl.trainer.run.samples import sample_rows, write_samples
from hybridrl.trainer.run.setup import (
    enable_tracing,
    is_due,
    open_tracking,
    run_directory,
    run_stages,
    warn_about_small_batches,
)

logger = logging.getLogger(__name__)


class RayPPOTrainer:
    """The driver of PPO and its relatives.

    Args:
        config: Settings of the job.
        tokenizer: The policy's tokenizer.
        role_worker_mapping: `Role` -> worker class.
        resource_pool_manager: Pools, and the role -> pool mapping.
        ray_worker_group_cls: `RayWorkerGroup`, or `LocalWorkerGroup` for one process without Ray.
        reward_fn: Called with a batch, returns a `RewardOutput` (see `rewards/`).
        val_reward_fn: The same for validation. Default: `reward_fn`.
        train_dataset: Default: the dataset of `config.data`.
        val_dataset: Default: the dataset of `config.data`.
        collate_fn: Makes a batch of rows.
        train_sampler: Default: the sampler of `config.data`.
        agent_loops: An `AgentLoopManager`, with rollout.mode=async.
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
        agent_loops: Any = None,
    ):
        self.config, self.tokenizer = config, tokenizer
        self.role_worker_mapping, self.resource_pool_manager = role_worker_mapping, resource_pool_manager
        self.ray_worker_group_cls = ray_worker_group_cls
        self.reward_fn, self.val_reward_fn = reward_fn, val_reward_fn or reward_fn
        self.agent_loops = agent_loops
        self.estimator = get_adv_estimator(config.algorithm.adv_estimator)
        self.resume_state = load_resume_state(config.trainer)
        self.job = self.resume_state.run_name
        self.middleware = load_middleware(config.trainer.middleware)
        check_roles(
            config, set(role_worker_mapping), has_reward=reward_fn is not None, has_agent_loops=agent_loops is not None
        )
        self.collate = functools.partial(collate_fn, pad_token_id=pad_token_id(tokenizer))
        self.train_loader, self.val_dataset = load_prompt_data(
            config.data, tokenizer, train_dataset, val_dataset, self.collate, train_sampler
        )
        self._plan_steps()
        self.kl_ctrl = make_kl_controller(config.algorithm.kl_ctrl)
        self.store = CheckpointStore(run_directory(config.trainer), keep=config.trainer.max_ckpt_to_keep)
        self.saver = CheckpointSaver(
            self.store, config.trainer, min_checkpoint_bytes=min_checkpoint_bytes(config.actor_rollout_ref.model)
        )
        self.ledger = StepLedger(self.store.root, rows=len(self.train_loader.dataset))
        self.nonfinite_guard, self.reward_guard = NonFiniteGuard(config.trainer.nonfinite), NoRewardGuard()
        self.groups: dict[str, Any] = {}
        self.global_steps = 0  # the step in progress, or the last completed one; also the version of its weights

    def _plan_steps(self) -> None:
        warn_about_small_batches(self.config, num_rows=len(self.train_loader.dataset))
        trainer = self.config.trainer
        self.total_training_steps = (
            trainer.total_training_steps or trainer.total_epochs * self.train_loader.steps_per_epoch
        )
        self.replay_buffer = ReplayBuffer(
            trainer.replay,
            n=self.config.actor_rollout_ref.rollout.n,
            staleness=trainer.staleness or 0,
            pad_token_id=pad_token_id(self.tokenizer),
        )
        self.prompts = StepPrompts(self.train_loader, seed=trainer.seed, total_steps=self.total_training_steps)

    # ---- workers

    def init_workers(self) -> None:
        """Reserve devices, start the worker processes and load their models. A failure stops all of them."""
        manager = self.resource_pool_manager
        classes = {
            str(role): RayClassWithInitArgs(cls, self.config, worker_role(role))
            for role, cls in self.role_worker_mapping.items()
        }
        pool_of_role = {str(role): manager.mapping[role] for role in self.role_worker_mapping}
        trainer = self.config.trainer
        manager.check_colocation(trainer.colocate)
        plan = manager.plan(
            self.job, pool_of_role, colocate=trainer.colocate, worker_env=enable_tracing(trainer, self.job)
        )
        manager.create_resource_pool(plan=plan, detached=self.resume_state.is_supervised)
        try:
            options = {"group_cls": self.ray_worker_group_cls, "reattach": self.resume_state.snapshot is not None}
            self.groups = launch(plan, classes, manager.resource_pool_dict, **options)
            for role, group in self.groups.items():
                group.set_call_timeout(trainer.call_timeout_s)
                if group.is_new:
                    self.init_role(role)
        except BaseException:
            self.shutdown()
            raise
        self.policy = make_policy(self.groups, manager, self.config, agent_loops=self.agent_loops)

    def init_role(self, role: str) -> None:
        """Load this role's model into its newly started processes."""
        sizes = self.train_loader.batch_sizes(self.total_training_steps)
        self.groups[role].init_model(num_optimizer_steps(self.config, sizes, role=role))
        self.groups[role].mark_ready()

    def shutdown(self) -> None:
        """Stop the worker processes and release their devices. Safe to call twice."""
        if self.agent_loops is not None:
            self.agent_loops.close()
        for group in self.groups.values():
            group.shutdown()
        self.groups = {}
        self.resume_state.drop()
        self.resource_pool_manager.release()
        stop_recording()

    # ---- the loop

    def stages(self) -> list[Callable[[OnlineRLContext], None]]:
        """Return the stages of a step in order, see `stages.py`."""
        return [
            with_spec(getattr(self, method), spec) for method, spec in ppo_stages(self.config, self.role_worker_mapping)
        ]

    def fit(self) -> None:
        """Train up to `total_training_steps`, from the newest checkpoint if there is one (`trainer.resume_mode`).

        Raises:
            Terminated: SIGTERM arrived. In the middle of a step, the step is committed first (`driver/termination.py`).
        """
        with TERMINATION.handle_sigterm():
            self._resume()
            policy, go_back = self.config.trainer.nonfinite, functools.partial(load_trainer, self)
            train_with_rollbacks(self._train, policy=policy, newest=lambda: self.saver.committed, roll_back=go_back)

    def _train(self) -> None:
        """Train from the step after `global_steps` to the last one."""
        trainer = self.config.trainer
        self.step_retry = StepRetry(
            self, snapshot_freq=trainer.snapshot_freq if trainer.backend == "ray" else 0, directory=self.store.root
        )
        self.remote_evaluator = (
            RemoteEvaluator(functools.partial(validate_on_evaluator, self))
            if str(Role.Evaluator) in self.groups
            else None
        )
        self.step_retry.start(self.resume_state.pop_snapshot())
        with open_tracking(
            self.config, start_step=self.global_steps, total_steps=self.total_training_steps
        ) as self.tracking:
            if trainer.val_only or (
                trainer.val_before_train and self.global_steps == 0 and self.val_dataset is not None
            ):
                self.tracking.log(validate(self, step=self.global_steps), self.global_steps)
            if self.global_steps < self.total_training_steps and not trainer.val_only:
                self._fill_pipeline()
                self.step_retry.take_snapshot(force=True)
                self.step_retry.run_with_retry(self._run)
            elif not trainer.val_only:
                logger.info("nothing to train: step %d of %d is complete", self.global_steps, self.total_training_steps)

    def _run(self) -> None:
        first, places = (
            self.global_steps + 1,
            self.resource_pool_manager.pools_by_role() if self.config.trainer.overlap else None,
        )
        change, num_steps = (
            functools.partial(apply_middleware, trainer=self),
            self.total_training_steps - self.global_steps,
        )
        with TERMINATION.defer_sigterm(grace_s=self.config.trainer.grace_s):
            run_stages(
                self.stages(),
                max_step=num_steps,
                first_step=first,
                change=change,
                device_slots=places,
                wrappers=[self.ledger],
            )
            for metrics in self.remote_evaluator.drain() if self.remote_evaluator is not None else ():
                self.tracking.log(metrics, self.global_steps)
        if self.global_steps < self.total_training_steps:
            TERMINATION.raise_if_received()

    def _fill_pipeline(self) -> None:
        """Submit the first `lag` batches, so that the first steps find them pending."""
        while (batch := self.prompts.next_batch(until=self.global_steps + self.pipeline.lag)) is not None:
            self._submit(batch)

    def next_batch(self, ctx: OnlineRLContext) -> None:
        """Load the prompts of the step that is `trainer.lag` ahead. None near the end of the run."""
        ctx.started_at = time.perf_counter()
        self.global_steps += 1
        ctx.batch = self.prompts.next_batch(until=self.global_steps + self.pipeline.lag)

    def generate(self, ctx: OnlineRLContext) -> None:
        """Generate `rollout.n` responses per prompt, in adjacent rows. With a lag, those of prompts loaded earlier."""
        self.pipeline.continue_partial()
        if ctx.batch is not None:
            self._submit(ctx.batch)
        pending, responses = self.pipeline.pop()
        ctx.prompt_rows = pending.other_columns.non_tensor_batch.get(ROW, ())
        ctx.batch = join_responses(pending.other_columns, responses, n=self.config.actor_rollout_ref.rollout.n)
        ctx.metrics |= {"training/global_step": self.global_steps, "training/epoch": pending.epoch}
        if self.pipeline.lag:
            ctx.metrics |= staleness_metrics(ctx.batch, version=self.global_steps - 1)
        if self.agent_loops is not None:
            ctx.metrics |= self.agent_loops.metrics
        self.policy.sleep_rollout()
        if self.config.trainer.balance_batch:
            lengths = ctx.batch.batch["attention_mask"].sum(-1).tolist()
            ctx.metrics |= global_seqlen_metrics(
                lengths, balanced_partition(lengths, self._num_dp(self.policy.actor.world_size))
            )

    def _submit(self, batch: DataProto) -> None:
        step, epoch = batch.meta_info.pop("step"), batch.meta_info.pop("epoch")
        prompts = self._split_generation_inputs(batch)
        prompts.meta_info = {
            "seed": call_seed(seed=self.config.trainer.seed, purpose=Purpose.TRAIN_ROLLOUT, step=step),
            "validate": False,
        }
        self.pipeline.submit(prompts, batch, step=step, epoch=epoch)

    def _split_generation_inputs(self, batch: DataProto) -> DataProto:
        """Remove the generation inputs from the batch and return them.

        For agent loops they include the rows' other columns, which also stay in the batch.
        """
        prompts = batch.pop(batch_keys=list(PROMPT_INPUT))
        if self.agent_loops is not None:
            prompts.non_tensor_batch = dict(batch.non_tensor_batch)
        return prompts

    def generate_responses(
        self, batch: DataProto, *, n: int, seed: int, generate: Callable[[DataProto], DataProto] | None = None
    ) -> DataProto:
        """Return the batch with `n` responses per prompt, sampled with the validation settings.

        Args:
            batch: Prompts.
            n: Responses per prompt.
            seed: Seed of the sampling.
            generate: Generates the responses. None: the rollout, with the newest weights.
        """
        prompts = self._split_generation_inputs(batch)
        prompts.meta_info = {"seed": seed, "validate": True}
        return join_responses(batch, (generate or self.policy.generate)(prompts), n=n)

    def reward(self, ctx: OnlineRLContext) -> None:
        """Score every response with a reward model, a rule, or a rule that reads the model's score."""
        ctx.reward_extra = self.score(ctx.batch, self.reward_fn, metrics=ctx.metrics)
        self.reward_guard.check(ctx.batch.batch["reward_valid"])
        if self.config.trainer.rollout_data_dir:
            path = os.path.join(self.config.trainer.rollout_data_dir, f"{self.global_steps}.jsonl")
            write_samples(path, sample_rows(ctx.batch, self.tokenizer, step=self.global_steps, extra=ctx.reward_extra))

    def score(self, batch: DataProto, reward_fn: RewardFn | None, *, metrics: dict[str, float]) -> dict[str, list]:
        """Add `token_level_scores` and `reward_valid` to the batch, see `rewards.score_batch`."""
        return score_batch(
            batch,
            reward_fn,
            reward_model=self.groups.get(str(Role.RewardModel)),
            model_input=MODEL_INPUT,
            metrics=metrics,
        )

    def replay(self, ctx: OnlineRLContext) -> None:
        """Append sample groups of earlier steps to the batch, and store its own groups for later steps."""
        ctx.num_new, version = len(ctx.batch), self.global_steps - 1
        seed = call_seed(seed=self.config.trainer.seed, purpose=Purpose.REPLAY, step=self.global_steps)
        ctx.batch = self.replay_buffer.mix_into(ctx.batch, version=version, seed=seed)
        ctx.metrics |= {"replay/kept": len(self.replay_buffer), "replay/rows": len(ctx.batch) - ctx.num_new}
        ctx.metrics |= staleness_metrics(ctx.batch, version=version)

    def old_log_prob(self, ctx: OnlineRLContext) -> None:
        """Compute log-probs under the policy that is about to be trained, and their difference to the rollout's."""
        ctx.batch.union(self._call_balanced(ctx, self.policy.actor.compute_log_prob, self.policy.actor.world_size))
        entropys = ctx.batch.batch.pop("entropys")
        ctx.metrics["actor/entropy"] = float(masked_mean(entropys, ctx.batch.batch["response_mask"]))
        if "rollout_log_probs" in ctx.batch.batch.keys():
            ctx.metrics |= rollout_mismatch_metrics(ctx.batch)

    def rollout_correction(self, ctx: OnlineRLContext) -> None:
        """Add importance weights for tokens sampled by older weights or by another engine."""
        ctx.metrics |= apply_rollout_correction(ctx.batch, self.config.algorithm.rollout_correction)

    def ref_log_prob(self, ctx: OnlineRLContext) -> None:
        """Compute log-probs under the reference policy."""
        ctx.batch.union(self._call_balanced(ctx, self.policy.ref.compute_ref_log_prob, self.policy.ref.world_size))

    def values(self, ctx: OnlineRLContext) -> None:
        """Compute the critic's value before each response token."""
        critic = self.groups[str(Role.Critic)]
        ctx.batch.union(self._call_balanced(ctx, critic.compute_values, critic.world_size))

    def _call_balanced(self, ctx: OnlineRLContext, method: Callable, num_ranks: int) -> DataProto:
        return call_balanced(
            method,
            select_columns(ctx.batch, MODEL_INPUT),
            num_ranks=self._num_dp(num_ranks),
            balance=self.config.trainer.balance_batch,
        )

    def _num_dp(self, num_ranks: int) -> int:
        """Return the data-parallel size of the engines of this many processes."""
        return data_parallel_size(self.config.actor_rollout_ref.actor, world_size=num_ranks)

    def advantage(self, ctx: OnlineRLContext) -> None:
        """Compute token rewards (with the KL penalty, if configured), advantages and returns."""
        algorithm = self.config.algorithm
        controller = self.kl_ctrl if algorithm.use_kl_in_reward else None
        ctx.metrics |= add_token_rewards(ctx.batch, controller, kl_penalty=algorithm.kl_penalty)
        add_advantages(ctx.batch, self.estimator, algorithm)

    def update_critic(self, ctx: OnlineRLContext) -> None:
        """Fit the critic to the returns."""
        data = select_training_rows(
            ctx.batch, (*MODEL_INPUT, "values", "returns"), self.config, role=str(Role.Critic), step=self.global_steps
        )
        if len(data):
            ctx.metrics |= self._checked_metrics(self.groups[str(Role.Critic)].update_critic(data), prefix="critic")

    def update_actor(self, ctx: OnlineRLContext) -> None:
        """Update the policy, after the critic's warm-up steps."""
        actor = self.config.actor_rollout_ref.actor
        columns = (*MODEL_INPUT, "old_log_probs", "advantages", *(("ref_log_prob",) if actor.use_kl_loss else ()))
        if corrects_rollout(self.config):
            columns += ("rollout_is_weights",)
        data = select_training_rows(ctx.batch, columns, self.config, role=str(Role.Actor), step=self.global_steps)
        ctx.updated = self.global_steps > self.config.trainer.critic_warmup and len(data) > 0
        if "rollout_is_weights" in data.batch.keys():
            data.batch["advantages"] = data.batch["advantages"] * data.batch.pop("rollout_is_weights")
        if ctx.updated:
            ctx.metrics |= self._checked_metrics(self.policy.actor.update_actor(data), prefix="actor")

    def _checked_metrics(self, updated: DataProto, *, prefix: str) -> dict[str, float]:
        """Return an update's metrics; raise NonFiniteError according to `trainer.nonfinite`."""
        updates = updated.meta_info["metrics"]
        self.nonfinite_guard.check(updates, prefix=prefix, step=self.global_steps)
        self.ledger.record_update(prefix, updates, prefix=prefix)
        return mean_metrics(updates)

    def update_weights(self, ctx: OnlineRLContext) -> None:
        """Push the new weights to the rollout, with the step number as version."""
        self.pipeline.push_weights(self.global_steps)

    def validate(self, ctx: OnlineRLContext) -> None:
        """Validate every `trainer.test_freq` steps and after the last one."""
        due = self.val_dataset is not None and self._due(self.config.trainer.test_freq)
        if self.remote_evaluator is None:
            ctx.metrics |= validate(self, step=self.global_steps) if due else {}
            return
        for metrics in self.remote_evaluator.poll():
            ctx.metrics |= metrics
        if due:
            self.remote_evaluator.submit(self.global_steps, self.policy.export_weights_async())

    def log(self, ctx: OnlineRLContext) -> None:
        """Send the step's metrics to every logger."""
        ctx.timing["step"] = time.perf_counter() - ctx.started_at
        ctx.metrics |= (
            step_metrics(ctx, self.config, num_gpus=self.resource_pool_manager.get_n_gpus()) | self.saver.metrics()
        )
        ctx.metrics |= self.ledger.metrics() | self.step_retry.metrics()
        if self.step_retry.is_first_completion(self.global_steps):
            self.tracking.log(ctx.metrics, self.global_steps)

    def save_checkpoint(self, ctx: OnlineRLContext) -> None:
        """Commit a checkpoint every `trainer.save_freq` steps, after the last one, and before an exit by SIGTERM."""
        self.ledger.end_step(
            self.global_steps, epoch=ctx.metrics.get("training/epoch"), prompts=ctx.get("prompt_rows", ())
        )
        terminating = TERMINATION.received
        due = terminating or self.commit_is_due()
        self.step_retry.take_snapshot(force=due)
        if due:
            self.commit(required=terminating)
        ctx.finish = ctx.finish or terminating

    def commit_is_due(self) -> bool:
        return self._due(self.config.trainer.save_freq)

    def commit(self, *, required: bool = False) -> None:
        """Commit a checkpoint of the present state.

        Args:
            required: Whether a failure ends the run whatever `trainer.save_failure` is, as it does after the last step.
        """
        required = required or self.global_steps == self.total_training_steps
        write = functools.partial(save_trainer, self)
        self.step_retry.run_with_retry(functools.partial(self.saver.save, self.global_steps, write, required=required))

    def _due(self, freq: int) -> bool:
        return is_due(freq, self.global_steps, total_steps=self.total_training_steps)

    # ---- checkpoint, see `state.py`

    def _resume(self) -> None:
        self.identity, self.pipeline = run_fingerprint(self.config), make_pipeline(self.policy, self.config)
        path = find_resume_checkpoint(self.store, self.config.trainer)
        if self.resume_state.snapshot is not None:
            self.saver.committed = path
            return self.ledger.resume_from(None, path=None, step=self.resume_state.snapshot.step, num_updates={})
        if path is None:
            self.ledger.start()
            return
        check_compatible(path, self.config)
        load_trainer(self, path)
        logger.info("resumed from %s, step %d of %d", path, self.global_steps, self.total_training_steps)

    def trained_groups(self) -> dict[str, Any]:
        """Return the groups with a trained engine, by their name in a checkpoint."""
        critic = self.groups.get(str(Role.Critic))
        return {"actor": self.policy.actor} | ({"critic": critic} if critic is not None else {})
