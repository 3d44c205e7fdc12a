"""PPO, GRPO and relatives: the driver of one training step.

    next_batch -> generate -> reward -> [reward_baselines] -> [update_sampler] -> [filter_groups] -> [select_samples]
      prompts     responses   scores     reward_baselines

    -> [replay] -> [add_branches]
                    episode

    -> [old_log_prob] -> [rollout_correction] -> [ref_log_prob] -> [teacher_log_prob] -> [values] -> advantage
       old_log_probs      rollout_is_weights      ref_log_prob      teacher_log_prob      values     advantages, returns

    -> [update_critic] -> update_actor -> update_weights -> validate -> log -> save_checkpoint

A step is the list `RayPPOTrainer.step`, in order; stages in brackets depend on the settings. Each stage is a method
that adds the columns under it to `ctx.batch` (all of them: `columns.py`). To change a step, override a stage or change
the list. Overlap, graph and failover are derived from the list. Data, workers and state are in `ppo_loop.py`; resume,
retry and commit, which supervised fine-tuning shares, in `trainer/loop.py`.

    trainer = RayPPOTrainer(
        config=config, tokenizer=tokenizer, role_worker_mapping=..., resource_pool_manager=..., reward_fn=...
    )
    trainer.init_workers()
    trainer.fit()

`main_ppo` creates the trainer. Workers run nothing of this module.
"""

import copy
import functools
import os
import time
from collections.abc import Collection

import numpy as np

from hybridrl.config import PPOConfig
from hybridrl.config.schema.rollout_correction import correction_plan
from hybridrl.errors import ConfigError
from hybridrl.framework.stage import Stage, spec_of
from hybridrl.framework.step_runner import run_once
from hybridrl.protocol import DataProto
from hybridrl.trainer import ppo
from hybridrl.trainer.data.prompt_loader import ROW
from hybridrl.trainer.data.seeds import Purpose, call_seed
from hybridrl.trainer.data.tokenizer import pad_token_id
from hybridrl.trainer.ppo import columns as c
from hybridrl.trainer.ppo.advantages import add_advantages, add_token_rewards
from hybridrl.trainer.ppo.metrics import log_prob_metrics, metrics_of_update, reward_extra_metrics, step_metrics
from hybridrl.trainer.ppo.ppo_loop import PPOLoop
from hybridrl.trainer.ppo.rewards import RewardFn, apply_agent_results, score_batch
from hybridrl.trainer.ppo.sampling.group_metrics import group_metrics
from hybridrl.trainer.ppo.sampling.off_policy import apply_rollout_correction, staleness_metrics
from hybridrl.trainer.ppo.step_settings import (
    StepSettings,
    bypasses_old_log_prob,
    computes_old_log_probs,
    corrects_samples,
    filters_groups,
    has_reference_stage,
    scores_reference_with_actor,
    stage_roles,
    trains_branches,
    uses_components,
    uses_critic,
    uses_greedy_baseline,
    uses_sum_pi_squared,
)
from hybridrl.trainer.ppo.update_batch import (
    add_covariance_selection,
    choose_samples,
    has_tokens,
    routes_of,
    select_training_rows,
)
from hybridrl.trainer.ppo.validation import check_evaluator, validate
from hybridrl.trainer.roles import Role
from hybridrl.trainer.run.metrics import mean_over_batches
from hybridrl.trainer.run.middleware import BatchContext
from hybridrl.trainer.run.samples import keep_samples, sample_rows, write_samples
from hybridrl.trainer.run.setup import run_directory
from hybridrl.trainer.submitted_call import Submitting
from hybridrl.trainer.utilization import COMPUTED


class RayPPOTrainer(PPOLoop):
    """The driver of PPO and its relatives.

    Args:
        config: Settings of the job.
        tokenizer: The policy's tokenizer.
        role_worker_mapping: `Role` -> worker class.
        resource_pool_manager: Pools, and the role -> pool mapping.
        ray_worker_group_cls: `RayWorkerGroup`, the default, or `LocalWorkerGroup` for one process without Ray.
        reward_fn: Called with a batch, returns a `RewardOutput` (see `rewards/`).
        val_reward_fn: The same for validation. Default: `reward_fn`.
        train_dataset: Default: the dataset of `config.data`.
        val_dataset: Default: the dataset of `config.data`.
        collate_fn: Makes a batch of rows.
        train_sampler: Default: the sampler of `config.data`.
        agent_loops: An `AgentLoopManager`, or another `Generator`, with rollout.mode=async.
        context: The run's state in this process. Default: one without a supervisor.
    """

    # ---- the step

    @classmethod
    @c.columns_in_use
    def step(cls, config: PPOConfig, roles: Collection[Role]) -> list[Stage]:
        """Return the stages of a step in order. `Stage.when` says which settings leave one out.

        A stage lists all columns that it may read and write; it keeps those that `columns.py` has with these settings.
        """
        on, settings = stage_roles(roles), StepSettings(config, roles, cls)
        is_on_policy = not config.trainer.rollout_lag and not config.algorithm.filter_groups.defers
        return [
            # 1. Prompts of the step that is `trainer.lag` ahead.
            Stage(cls.next_batch, writes=c.PROMPT_INPUT, pure=False),
            # 2. n responses to each prompt.
            Stage(cls.generate, "gen", on.rollout, c.PROMPT_INPUT, c.SAMPLES, pure=is_on_policy),
            # 3. A score for each response. Groups of equal scores are replaced, samples left out, earlier ones added.
            Stage(cls.reward, "", on.reward_model, c.RESPONSE, c.REWARDED),
            Stage(cls.reward_baselines, "", on.reward_model, (c.REWARD_VALID,), c.BASELINES).when(
                uses_greedy_baseline(config)
            ),
            Stage(cls.update_sampler, reads=c.SCORES, pure=False).when(config.data.sampler.class_path),
            Stage(cls.filter_groups, "", on.rollout, c.STORED, c.STORED, pure=False).when(filters_groups(config)),
            Stage(cls.select_samples, reads=c.STORED, writes=c.STORED, pure=False).when(
                config.algorithm.select_samples.k
            ),
            Stage(cls.replay, reads=c.STORED, writes=c.STORED, pure=False).when(config.trainer.replay.groups),
            Stage(cls.add_branches, reads=c.STORED, writes=c.ROWS, pure=False).when(trains_branches(config)),
            # 4. What policy, reference and critic make of the tokens, before the update.
            Stage(cls.reuse_log_probs, reads=(c.ROLLOUT_LOG_PROBS,), writes=(c.OLD_LOG_PROBS,)).when(
                bypasses_old_log_prob(config)
            ),
            Stage(cls.old_log_prob, "", on.actor, c.SCORED_INPUT, c.ACTOR_SCORES, submits=True).when(
                computes_old_log_probs(settings)
            ),
            Stage(cls.rollout_correction, reads=c.LOG_PROB_PAIR, writes=c.CORRECTION).when(corrects_samples(config)),
            Stage(cls.ref_log_prob, "ref", on.reference, c.MODEL_INPUT, (c.REF_LOG_PROB,), submits=True).when(
                has_reference_stage(settings)
            ),
            Stage(cls.teacher_log_prob, "teacher", on.teacher, c.MODEL_INPUT, c.TEACHER, submits=True).when(
                config.distillation.enabled
            ),
            Stage(cls.values, "", on.critic, c.MODEL_INPUT, (c.VALUES,), submits=True).when(uses_critic(config)),
            # 5. From scores to advantages.
            Stage(cls.advantage, "adv", reads=c.JUDGED, writes=c.ESTIMATES, pure=False),
            # 6. The update: critic, policy, then the rollout's copy of the policy.
            Stage(cls.update_critic, "", on.critic, c.FOR_CRITIC, pure=False, submits=True).when(uses_critic(config)),
            Stage(cls.update_actor, "", on.actor, c.FOR_ACTOR, pure=False),
            Stage(cls.update_weights, role=on.rollout, pure=False),
            # 7. Outputs.
            Stage(cls.validate, "testing", on.rollout),
            Stage(cls.log, pure=False),
            Stage(cls.save_checkpoint, pure=False),
        ]

    def next_batch(self, ctx: BatchContext) -> None:
        """Load the prompts of the step that is `trainer.lag` ahead. None near the end of the run."""
        ctx.started_at = time.perf_counter()
        self.global_steps += 1
        ctx.batch = self._next_prompts()

    def _next_prompts(self) -> DataProto | None:
        return self.prompts.next_batch() if len(self.pipeline) <= self.num_ahead else None

    def generate(self, ctx: BatchContext) -> None:
        """Generate `rollout.n` responses per prompt, in adjacent rows. With a lag, those of prompts loaded earlier."""
        self.pipeline.continue_partial()
        if ctx.batch is not None:
            self.pipeline.submit(ctx.batch)
        generated = self.pipeline.pop()
        ctx.batch, ctx.greedy = generated.samples, generated.greedy
        ctx.prompt_rows = generated.prompts.non_tensor_batch.get(ROW, ())
        self.prompts.defer_others(generated.chosen, ctx)
        ctx.metrics |= {"training/global_step": self.global_steps, "training/epoch": generated.epoch}
        ctx.metrics |= self.generator.metrics
        self.policy.sleep_rollout()
        ctx.metrics |= self._sample_metrics(ctx.batch)

    def reward(self, ctx: BatchContext) -> None:
        """Score every response with a reward model, a rule, or a rule that reads the model's score.

        A distillation without task rewards scores nothing.
        """
        if not self.config.distillation.task_rewards:
            ppo.add_no_scores(ctx.batch)
            ctx.reward_extra = {}
            return
        ctx.reward_extra = self.score(ctx.batch, self.reward_fn, metrics=ctx.metrics)
        if coef := self.config.reward_model.length_reward_coef:
            ctx.reward_extra["length_reward"] = ppo.add_length_rewards(ctx.batch, ctx.reward_extra, coef=coef)
        ctx.metrics |= reward_extra_metrics(ctx.reward_extra)
        if uses_components(self.config):
            ppo.add_reward_components(ctx.batch, ctx.reward_extra, self.config.algorithm.gdpo_reward_keys)
        ctx.metrics |= group_metrics(ctx.batch, ctx.reward_extra, n=self.config.actor_rollout_ref.rollout.n)
        self.reward_guard.check(ctx.batch.batch["reward_valid"])
        if self.config.trainer.rollout_data_dir:
            part = f".{ctx.gen_batch}" if "gen_batch" in ctx else ""
            path = os.path.join(self.config.trainer.rollout_data_dir, f"{self.global_steps}{part}.jsonl")
            write_samples(path, sample_rows(ctx.batch, self.tokenizer, step=self.global_steps, extra=ctx.reward_extra))
        elif "jsonl" in self.config.trainer.logger and "gen_batch" not in ctx:
            directory, extra = run_directory(self.config.trainer), ctx.reward_extra
            keep_samples(directory, ctx.batch, self.tokenizer, step=self.global_steps, extra=extra)

    def reward_baselines(self, ctx: BatchContext) -> None:
        """Score the greedy responses: the baseline of every sample of their prompts."""
        if ctx.greedy is None:
            raise ConfigError(
                "the checkpoint's pending batches have no greedy responses: it was written by another "
                "algorithm.adv_estimator; resume with that one, or start a run with remax"
            )
        self.score(ctx.greedy, self.reward_fn, metrics={})
        ctx.metrics |= ppo.add_reward_baselines(ctx.batch, ctx.greedy)

    def score(self, batch: DataProto, reward_fn: RewardFn | None, *, metrics: dict[str, float]) -> dict[str, list]:
        """Add `token_level_scores` and `reward_valid` to the batch, see `rewards.score_batch`."""
        extra = score_batch(batch, reward_fn, reward_model=self.groups.get(Role.RewardModel), metrics=metrics)
        apply_agent_results(batch)
        return extra

    def update_sampler(self, ctx: BatchContext) -> None:
        """Show the results of all generated samples to the sampler, for the order of later prompts."""
        results = ctx.batch.select()
        results.non_tensor_batch = results.non_tensor_batch | {
            name: np.fromiter(column, dtype=object, count=len(column)) for name, column in ctx.reward_extra.items()
        }
        self.train_loader.update_sampler(results)

    def filter_groups(self, ctx: BatchContext) -> None:
        """Drop groups of equal rewards; draw, generate and score more prompts until the batch is full."""
        assert self.group_filter is not None, "the stage runs only with a filter"
        groups = self.group_filter.begin(version=self.global_steps - 1)
        sampled = [ctx]
        while not groups.add(sampled[-1].batch, sampled[-1].reward_extra, epoch=_epoch(sampled[-1])):
            sampled.append(self._sample_again(ctx, gen_batch=len(sampled) + 1))
        ctx.batch, ctx.reward_extra, ctx.group_outcomes = groups.take(), {}, groups.outcomes
        ctx.prompt_rows = ctx.batch.non_tensor_batch[ROW][:: self.config.actor_rollout_ref.rollout.n]
        ctx.metrics |= mean_over_batches([part.metrics for part in sampled]) | groups.metrics()
        self.prompts.add_deferred(ctx)
        ctx.metrics |= self._sample_metrics(ctx.batch) | {"training/epoch": _epoch(sampled[-1])}

    def _sample_again(self, ctx: BatchContext, *, gen_batch: int) -> BatchContext:
        """Run the stages between `next_batch` and `filter_groups` for another generation batch; return its context."""
        more = copy.copy(ctx)
        more.gen_batch = gen_batch
        more.batch = self._next_prompts()
        more.metrics = {}
        stages = self.stages()
        names = [spec_of(fn).name for fn in stages]
        run_once(stages[names.index("next_batch") + 1 : names.index("filter_groups")], more)
        return more

    def select_samples(self, ctx: BatchContext) -> None:
        """Keep k samples of each prompt, by their scores."""
        seed = call_seed(seed=self.config.trainer.seed, purpose=Purpose.SELECTION, step=self.global_steps)
        settings, n = self.config.algorithm.select_samples, self.config.actor_rollout_ref.rollout.n
        ctx.batch, metrics = choose_samples(ctx.batch, settings, n=n, seed=seed)
        ctx.reward_extra = {}
        ctx.metrics |= metrics | self._sample_metrics(ctx.batch)

    def replay(self, ctx: BatchContext) -> None:
        """Append sample groups of earlier steps to the batch, and store its own groups for later steps."""
        ctx.num_new, version = len(ctx.batch), self.global_steps - 1
        seed = call_seed(seed=self.config.trainer.seed, purpose=Purpose.REPLAY, step=self.global_steps)
        assert self.replay_buffer is not None, "the stage runs only with a buffer"
        ctx.batch = self.replay_buffer.mix_into(ctx.batch, version=version, seed=seed)
        ctx.metrics |= {"replay/kept": len(self.replay_buffer), "replay/rows": len(ctx.batch) - ctx.num_new}
        ctx.metrics |= staleness_metrics(ctx.batch, version=version)

    def add_branches(self, ctx: BatchContext) -> None:
        """Append the rows of agents' other conversations. Metrics of samples stay those of the main ones."""
        num_samples = len(ctx.batch)
        ctx.num_new = ctx.get("num_new", num_samples)
        ctx.batch = ppo.add_branch_rows(ctx.batch, pad_token_id=pad_token_id(self.tokenizer))
        ctx.metrics["training/rows_per_episode"] = len(ctx.batch) / max(1, num_samples)

    def old_log_prob(self, ctx: BatchContext) -> Submitting:
        """Compute log-probs under the policy that is about to be trained, and their difference to the rollout's.

        An actor with adapters computes those of its reference, the model without them, in the same call.
        """
        reference = scores_reference_with_actor(StepSettings(self.config, self.roles, type(self)))
        options = {"sum_pi_squared": uses_sum_pi_squared(self.config), "reference": reference}
        wanted = {name: True for name, is_wanted in options.items() if is_wanted}
        compute = functools.partial(self.policy.actor.compute_log_prob.submit, **wanted)
        more = routes_of(ctx.batch)
        ctx.batch.union((yield from self.score_rows(ctx, self.policy.actor, compute, stage="old_log_prob", more=more)))
        ctx.metrics |= log_prob_metrics(ctx.batch, ctx.batch.batch.pop("entropys"))

    def reuse_log_probs(self, ctx: BatchContext) -> None:
        """Take the rollout's log-probs for those of the policy before the update (`bypass_mode`)."""
        ctx.batch.batch["old_log_probs"] = ctx.batch.batch["rollout_log_probs"].clone()

    def rollout_correction(self, ctx: BatchContext) -> None:
        """Weigh or reject tokens sampled by older weights or by another engine."""
        ctx.metrics |= apply_rollout_correction(ctx.batch, correction_plan(self.config.algorithm.rollout_correction))

    def ref_log_prob(self, ctx: BatchContext) -> Submitting:
        """Compute log-probs under the reference policy."""
        compute = self.policy.ref.compute_ref_log_prob.submit
        ctx.batch.union((yield from self.score_rows(ctx, self.policy.ref, compute, stage="ref")))

    def teacher_log_prob(self, ctx: BatchContext) -> Submitting:
        """Compute log-probs under the teacher of each row, and what else of it the divergence needs."""
        group, config = self.groups[Role.TeacherModel], self.config.distillation
        submit = functools.partial(
            ppo.submit_to_teachers,
            ctx.batch,
            group,
            config,
            num_ranks=self._num_dp(group.world_size),
            balance=self.config.trainer.balance_batch,
            share_prefixes=self.config.actor_rollout_ref.actor.use_prefix_grouper,
        )
        yield (call := self.submit(group, submit))
        ctx.batch.union(ppo.join_teachers(ctx.batch, call.get(), config))

    def values(self, ctx: BatchContext) -> Submitting:
        """Compute the critic's value before each response token."""
        critic = self.groups[Role.Critic]
        ctx.batch.union((yield from self.score_rows(ctx, critic, critic.compute_values.submit, of_policy=False)))

    def advantage(self, ctx: BatchContext) -> None:
        """Compute token rewards (with the KL penalty, if configured), advantages and returns.

        A distillation may add its own part to the advantages.
        """
        algorithm = self.config.algorithm
        controller = self.kl_ctrl if algorithm.use_kl_in_reward else None
        if (moments := self.reward_moments) is not None:
            columns, num_new = ctx.batch.batch, ctx.get("num_new", len(ctx.batch))
            moments.update(columns["token_level_scores"].sum(-1)[:num_new][columns["reward_valid"][:num_new]])
        ctx.metrics |= add_token_rewards(
            ctx.batch, controller, kl_penalty=algorithm.kl_penalty, moments=self.reward_moments
        )
        if self.config.distillation.task_rewards:
            add_advantages(ctx.batch, self.estimator, algorithm)
        else:
            ppo.add_no_advantages(ctx.batch)
        if self.config.distillation.enabled:
            ctx.metrics |= ppo.teacher_metrics(ctx.batch)
        if self.config.distillation.in_advantages:
            ctx.metrics |= ppo.add_teacher_advantages(ctx.batch, self.config.distillation)

    def update_critic(self, ctx: BatchContext) -> Submitting:
        """Fit the critic to the returns."""
        data = select_training_rows(ctx.batch, c.CRITIC_INPUT, self.config, role=Role.Critic, step=self.global_steps)
        if not len(data):
            return
        critic = self.groups[Role.Critic]
        yield (call := self.submit(critic, lambda: [critic.update_critic.submit(data)]))
        [updated] = call.get()
        ctx.metrics |= self.update_metrics(updated.meta_info["metrics"], role="critic", prefix="critic")

    def update_actor(self, ctx: BatchContext) -> None:
        """Update the policy, after the critic's warm-up steps. Without `old_log_probs` the update returns its own."""
        has_old = c.OLD_LOG_PROBS in ctx.batch.batch.keys()
        settings = StepSettings(self.config, self.roles, type(self))
        columns = c.used_columns(c.ACTOR_INPUT, settings, stage="update_actor") + (c.OLD_LOG_PROBS,) * has_old
        columns += routes_of(ctx.batch)
        data = select_training_rows(ctx.batch, columns, self.config, role=Role.Actor, step=self.global_steps)
        add_covariance_selection(data, self.config, step=self.global_steps)
        trains = has_tokens(data, step=self.global_steps)
        ctx.updated = self.global_steps > self.config.trainer.critic_warmup and trains
        if ctx.updated:
            updated = self.policy.actor.update_actor(data)
            metrics = updated.meta_info["metrics"]
            ctx.computed["update_actor"] = {name: metrics.pop(name) for name in COMPUTED if name in metrics}
            ctx.metrics |= self.update_metrics(metrics, role="actor", prefix="actor")
            if not has_old:
                ctx.own_log_probs = updated
                ctx.metrics |= metrics_of_update(ctx.batch, updated)

    def update_weights(self, ctx: BatchContext) -> None:
        """Push the new weights to the rollout, with the step number as version. With a lag, do not wait for it."""
        self.pipeline.push_weights(self.global_steps, wait=self.pipeline.lag == 0)
        ctx.metrics |= {} if self.gate is None else self.gate.take_metrics()

    def validate(self, ctx: BatchContext) -> None:
        """Validate every `trainer.test_freq` steps and after the last one."""
        due = self.val_dataset is not None and self.is_due(self.config.trainer.test_freq)
        if self.remote_evaluator is None:
            ctx.metrics |= validate(self, step=self.global_steps) if due else {}
            return
        for metrics in self.remote_evaluator.poll():
            ctx.metrics |= metrics
        if due:
            weights = self.policy.actor.store_weights.submit()[0]
            check_evaluator(self, self.global_steps, weights)
            self.remote_evaluator.submit(self.global_steps, weights)

    def log(self, ctx: BatchContext) -> None:
        """Send the step's metrics to every logger."""
        ctx.timing["step"] = time.perf_counter() - ctx.started_at
        num_gpus, shares = self.resource_pool_manager.get_n_gpus(), self.utilization
        ctx.metrics |= step_metrics(ctx, self.config, num_gpus=num_gpus, step=self.global_steps, utilization=shares)
        ctx.metrics |= self.saver.metrics()
        if not self.config.distillation.in_loss:
            self.no_signal.check(ctx.metrics, step=self.global_steps)
        ctx.metrics |= self.ledger.metrics() | self.step_retry.metrics() | self.rank_policy.metrics()
        if directory := self.config.trainer.rollout_data_dir:
            updated = ctx.get("own_log_probs")
            ppo.record_tokens(directory, ctx.batch, self.tokenizer, step=self.global_steps, updated=updated)
        if self.step_retry.is_first_completion(self.global_steps):
            self.tracking.log(ctx.metrics, self.global_steps)


def _epoch(ctx: BatchContext) -> int:
    return int(ctx.metrics["training/epoch"])
