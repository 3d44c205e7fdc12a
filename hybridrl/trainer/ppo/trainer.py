"""`RayPPOTrainer`: the driver of PPO and its relatives. One program commands groups of workers; what is computed stands
in `stages`.

    trainer = RayPPOTrainer(config=config, tokenizer=tokenizer, role_worker_mapping=..., resource_pool_manager=...,
    reward_fn=...) trainer.init_workers() trainer.fit()

A step is the list `RayPPOTrainer.stages()`, in order; each stage adds columns to `ctx.batch`. Change a step by
overriding a stage, or by changing the list; nothing else needs to be copied. Placement is `roles.py`, data `data.py`,
durable state `checkpoint.py`.
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
from hybridrl.driver.termination import NOTICE
from hybridrl.framework import OnlineRLContext
from hybridrl.framework.stage import with_spec
from hybridrl.protocol import DataProto
from hybridrl.single_controller.launch import launch
from hybridrl.single_controller.monitoring.tracing import stop_recording
from hybridrl.single_controller.ray_worker_group import RayClassWithInitArgs, RayWorkerGroup
from hybridrl.trainer.checkpoint.compatibility import compare_run, identity
from hybridrl.trainer.checkpoint.saver import Saver, least_bytes
from hybridrl.trainer.checkpoint.step_ledger import StepLedger
from hybridrl.trainer.checkpoint.store import CheckpointStore, find_resume
from hybridrl.trainer.data.prompt_dataset import collate_fn, open_data
from hybridrl.trainer.data.prompt_loader import ROW, StepPrompts
from hybridrl.trainer.data.seeds import Purpose, call_seed
from hybridrl.trainer.data.tokenizer import pad_token_id
from hybridrl.trainer.ppo.metrics import global_seqlen_metrics, rollout_mismatch_metrics, step_metrics
from hybridrl.trainer.ppo.off_policy import correct, staleness_metrics
from hybridrl.trainer.ppo.policy import make_policy
from hybridrl.trainer.ppo.replay_buffer import ReplayBuffer
from hybridrl.trainer.ppo.rewards import (
    RewardFn,
    RewardWatch,
    add_advantages,
    add_token_rewards,
    make_kl_controller,
    score,
)
from hybridrl.trainer.ppo.rollout_pipeline import join_responses, make_pipeline
from hybridrl.trainer.ppo.stages import MODEL_INPUT, PROMPT_INPUT, check_roles, corrects_rollout, ppo_stages
from hybridrl.trainer.ppo.state import restore, write_checkpoint
from hybridrl.trainer.ppo.update_batch import columns_of, num_optimizer_steps, on_ranks, training_rows
from hybridrl.trainer.ppo.validation import Evaluation, validate, validate_elsewhere
from hybridrl.trainer.recovery.nonfinite import UpdateWatch, train_with_rollbacks
from hybridrl.trainer.recovery.step_retry import Failover
from hybridrl.trainer.recovery.step_snapshot import look_back
from hybridrl.trainer.roles import ResourcePoolManager, Role, worker_role
from hybridrl.trainer.run.metrics import mean_metrics
from hybridrl.trainer.run.middleware import apply_middleware, load_middleware
from hybridrl.trainer.run.samples import sample_rows, write_samples
from hybridrl.trainer.run.setup import (
    is_due,
    open_trace,
    open_tracking,
    run_directory,
    run_stages,
    tell_what_is_smaller,
)

logger = logging.getLogger(__name__)


class RayPPOTrainer:
    """The driver of PPO and its relatives.

    config: the job's settings. role_worker_mapping: `Role` -> worker class. resource_pool_manager: which role works
    where. ray_worker_group_cls: `RayWorkerGroup`, or `LocalWorkerGroup` for one process without Ray. reward_fn,
    val_reward_fn: called with a batch, return a `RewardOutput` (see `workers/reward`). agent_loops: an
    `AgentLoopManager`, with rollout.mode=async. Datasets and sampler default to what `config.data` names.
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
        self.past = look_back(config.trainer)
        self.job = self.past.run
        self.middleware = load_middleware(config.trainer.middleware)
        check_roles(
            config, set(role_worker_mapping), has_reward=reward_fn is not None, has_agent_loops=agent_loops is not None
        )
        self.collate = functools.partial(collate_fn, pad_token_id=pad_token_id(tokenizer))
        self.train_loader, self.val_dataset = open_data(
            config.data, tokenizer, train_dataset, val_dataset, self.collate, train_sampler
        )
        self._plan_steps()
        self.kl_ctrl = make_kl_controller(config.algorithm.kl_ctrl)
        self.store = CheckpointStore(run_directory(config.trainer), keep=config.trainer.max_ckpt_to_keep)
        self.saver = Saver(self.store, config.trainer, least_bytes=least_bytes(config.actor_rollout_ref.model))
        self.ledger = StepLedger(self.store.root, rows=len(self.train_loader.dataset))
        self.update_watch, self.reward_watch = UpdateWatch(config.trainer.nonfinite), RewardWatch()
        self.groups: dict[str, Any] = {}
        self.global_steps = 0  # the step in progress, or the last one done; also the version of the weights it leaves

    def _plan_steps(self) -> None:
        tell_what_is_smaller(self.config, num_rows=len(self.train_loader.dataset))
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
        """Reserve devices, start the worker processes and load their models. When one fails, none is left running."""
        manager = self.resource_pool_manager
        classes = {
            str(role): RayClassWithInitArgs(cls, self.config, worker_role(role))
            for role, cls in self.role_worker_mapping.items()
        }
        pool_of_role = {str(role): manager.mapping[role] for role in self.role_worker_mapping}
        trainer = self.config.trainer
        manager.check_colocation(trainer.colocate)
        plan = manager.plan(self.job, pool_of_role, colocate=trainer.colocate, worker_env=open_trace(trainer, self.job))
        manager.create_resource_pool(plan=plan, detached=self.past.is_kept)
        try:
            how = {"group_cls": self.ray_worker_group_cls, "take_up": self.past.moment is not None}
            self.groups = launch(plan, classes, manager.resource_pool_dict, **how)
            for role, group in self.groups.items():
                group.set_deadline(trainer.call_timeout_s)
                if group.is_new:
                    self.init_role(role)
        except BaseException:
            self.shutdown()
            raise
        self.policy = make_policy(self.groups, manager, self.config, agent_loops=self.agent_loops)

    def init_role(self, role: str) -> None:
        """Load this role's model into its processes, which have just been started."""
        sizes = self.train_loader.batch_sizes(self.total_training_steps)
        self.groups[role].init_model(num_optimizer_steps(self.config, sizes, role=role))
        self.groups[role].mark_ready()

    def shutdown(self) -> None:
        """End the worker processes and give their devices back. Safe to call twice."""
        if self.agent_loops is not None:
            self.agent_loops.close()
        for group in self.groups.values():
            group.shutdown()
        self.groups = {}
        self.past.forget()
        self.resource_pool_manager.release()
        stop_recording()

    # ---- the loop

    def stages(self) -> list[Callable[[OnlineRLContext], None]]:
        """The step: its stages in order, see `stages.py`."""
        return [
            with_spec(getattr(self, method), spec) for method, spec in ppo_stages(self.config, self.role_worker_mapping)
        ]

    def fit(self) -> None:
        """Train up to `total_training_steps`, from the newest commit if there is one (`trainer.resume_mode`).

        SIGTERM raises Terminated: at once, or in the middle of a step when that is committed (see `leaving.py`).
        """
        with NOTICE.heard():
            self._resume()
            policy, go_back = self.config.trainer.nonfinite, functools.partial(restore, self)
            train_with_rollbacks(self._train, policy=policy, newest=lambda: self.saver.committed, go_back=go_back)

    def _train(self) -> None:
        """Train from the step that is done to the last one."""
        trainer = self.config.trainer
        self.failover = Failover(
            self, every=trainer.snapshot_freq if trainer.backend == "ray" else 0, directory=self.store.root
        )
        self.evaluation = (
            Evaluation(functools.partial(validate_elsewhere, self)) if str(Role.Evaluator) in self.groups else None
        )
        self.failover.begin(self.past.take_moment())
        with open_tracking(
            self.config, start_step=self.global_steps, total_steps=self.total_training_steps
        ) as self.tracking:
            if trainer.val_only or (
                trainer.val_before_train and self.global_steps == 0 and self.val_dataset is not None
            ):
                self.tracking.log(validate(self, step=self.global_steps), self.global_steps)
            if self.global_steps < self.total_training_steps and not trainer.val_only:
                self._fill_pipeline()
                self.failover.remember(whatever_step=True)
                self.failover.run(self._run)
            elif not trainer.val_only:
                logger.info("nothing to train: step %d of %d is done", self.global_steps, self.total_training_steps)

    def _run(self) -> None:
        first, places = (
            self.global_steps + 1,
            self.resource_pool_manager.places() if self.config.trainer.overlap else None,
        )
        change, num_steps = (
            functools.partial(apply_middleware, trainer=self),
            self.total_training_steps - self.global_steps,
        )
        with NOTICE.kept(grace_s=self.config.trainer.grace_s):
            run_stages(
                self.stages(),
                max_step=num_steps,
                first_step=first,
                change=change,
                places=places,
                wrappers=[self.ledger],
            )
            for metrics in self.evaluation.finish() if self.evaluation is not None else ():
                self.tracking.log(metrics, self.global_steps)
        if self.global_steps < self.total_training_steps:
            NOTICE.leave_if_received()

    def _fill_pipeline(self) -> None:
        """Begin the batches that the first steps find on their way."""
        while (batch := self.prompts.draw(until=self.global_steps + self.pipeline.lag)) is not None:
            self._begin(batch)

    def next_batch(self, ctx: OnlineRLContext) -> None:
        """The next prompts of the epoch, for the step that is `trainer.lag` ahead; none near the end of the run."""
        ctx.started_at = time.perf_counter()
        self.global_steps += 1
        ctx.batch = self.prompts.draw(until=self.global_steps + self.pipeline.lag)

    def generate(self, ctx: OnlineRLContext) -> None:
        """`rollout.n` responses per prompt, in adjacent rows: these prompts' own, or with a lag those of prompts drawn
        earlier.
        """
        self.pipeline.go_on()
        if ctx.batch is not None:
            self._begin(ctx.batch)
        taken, responses = self.pipeline.take()
        ctx.prompt_rows = taken.rest.non_tensor_batch.get(ROW, ())
        ctx.batch = join_responses(taken.rest, responses, n=self.config.actor_rollout_ref.rollout.n)
        ctx.metrics |= {"training/global_step": self.global_steps, "training/epoch": taken.epoch}
        if self.pipeline.lag:
            ctx.metrics |= staleness_metrics(ctx.batch, version=self.global_steps - 1)
        if self.agent_loops is not None:
            ctx.metrics |= self.agent_loops.metrics
        self.policy.rest()
        if self.config.trainer.balance_batch:
            lengths = ctx.batch.batch["attention_mask"].sum(-1).tolist()
            ctx.metrics |= global_seqlen_metrics(
                lengths, balanced_partition(lengths, self._num_dp(self.policy.actor.world_size))
            )

    def _begin(self, batch: DataProto) -> None:
        step, epoch = batch.meta_info.pop("step"), batch.meta_info.pop("epoch")
        prompts = self._pop_prompts(batch)
        prompts.meta_info = {
            "seed": call_seed(seed=self.config.trainer.seed, purpose=Purpose.TRAIN_ROLLOUT, step=step),
            "validate": False,
        }
        self.pipeline.begin(prompts, batch, step=step, epoch=epoch)

    def _pop_prompts(self, batch: DataProto) -> DataProto:
        """Take what generation needs out of the batch: tokens, and for agent loops also a look at the rows' other
        columns.
        """
        prompts = batch.pop(batch_keys=list(PROMPT_INPUT))
        if self.agent_loops is not None:
            prompts.non_tensor_batch = dict(batch.non_tensor_batch)
        return prompts

    def respond(
        self, batch: DataProto, *, n: int, seed: int, generate: Callable[[DataProto], DataProto] | None = None
    ) -> DataProto:
        """Return the batch with every prompt repeated `n` times and responses added, sampled as validation does.

        generate: who responds; by default the rollout, with the newest weights.
        """
        prompts = self._pop_prompts(batch)
        prompts.meta_info = {"seed": seed, "validate": True}
        return join_responses(batch, (generate or self.policy.generate)(prompts), n=n)

    def reward(self, ctx: OnlineRLContext) -> None:
        """A score for every response, from a reward model, a rule, or a rule that reads the model's score."""
        ctx.reward_extra = self.score(ctx.batch, self.reward_fn, metrics=ctx.metrics)
        self.reward_watch.look_at(ctx.batch.batch["reward_valid"])
        if self.config.trainer.rollout_data_dir:
            path = os.path.join(self.config.trainer.rollout_data_dir, f"{self.global_steps}.jsonl")
            write_samples(path, sample_rows(ctx.batch, self.tokenizer, step=self.global_steps, extra=ctx.reward_extra))

    def score(self, batch: DataProto, reward_fn: RewardFn | None, *, metrics: dict[str, float]) -> dict[str, list]:
        """Add `token_level_scores` and `reward_valid` to the batch; return what the reward function added per row."""
        return score(
            batch, reward_fn, judge=self.groups.get(str(Role.RewardModel)), model_input=MODEL_INPUT, metrics=metrics
        )

    def replay(self, ctx: OnlineRLContext) -> None:
        """Add groups of earlier steps to the batch, behind its own, which are kept for later ones."""
        ctx.num_new, version = len(ctx.batch), self.global_steps - 1
        seed = call_seed(seed=self.config.trainer.seed, purpose=Purpose.REPLAY, step=self.global_steps)
        ctx.batch = self.replay_buffer.filled_up(ctx.batch, version=version, seed=seed)
        ctx.metrics |= {"replay/kept": len(self.replay_buffer), "replay/rows": len(ctx.batch) - ctx.num_new}
        ctx.metrics |= staleness_metrics(ctx.batch, version=version)

    def old_log_prob(self, ctx: OnlineRLContext) -> None:
        """Log-probs of the responses under the policy that is about to be trained, and how far the rollout's own are
        from them.
        """
        ctx.batch.union(self._on_ranks(ctx, self.policy.actor.compute_log_prob, self.policy.actor.world_size))
        entropys = ctx.batch.batch.pop("entropys")
        ctx.metrics["actor/entropy"] = float(masked_mean(entropys, ctx.batch.batch["response_mask"]))
        if "rollout_log_probs" in ctx.batch.batch.keys():
            ctx.metrics |= rollout_mismatch_metrics(ctx.batch)

    def rollout_correction(self, ctx: OnlineRLContext) -> None:
        """Importance weights for what older weights or another engine drew."""
        ctx.metrics |= correct(ctx.batch, self.config.algorithm.rollout_correction)

    def ref_log_prob(self, ctx: OnlineRLContext) -> None:
        """Log-probs under the reference policy."""
        ctx.batch.union(self._on_ranks(ctx, self.policy.ref.compute_ref_log_prob, self.policy.ref.world_size))

    def values(self, ctx: OnlineRLContext) -> None:
        """The critic's value before each response token."""
        critic = self.groups[str(Role.Critic)]
        ctx.batch.union(self._on_ranks(ctx, critic.compute_values, critic.world_size))

    def _on_ranks(self, ctx: OnlineRLContext, method: Callable, num_ranks: int) -> DataProto:
        return on_ranks(
            method,
            columns_of(ctx.batch, MODEL_INPUT),
            num_ranks=self._num_dp(num_ranks),
            balance=self.config.trainer.balance_batch,
        )

    def _num_dp(self, num_ranks: int) -> int:
        """How many parts a batch has for the engines of this many processes."""
        return data_parallel_size(self.config.actor_rollout_ref.actor, world_size=num_ranks)

    def advantage(self, ctx: OnlineRLContext) -> None:
        """Token rewards (with the KL penalty, if configured), advantages and returns."""
        algorithm = self.config.algorithm
        controller = self.kl_ctrl if algorithm.use_kl_in_reward else None
        ctx.metrics |= add_token_rewards(ctx.batch, controller, kl_penalty=algorithm.kl_penalty)
        add_advantages(ctx.batch, self.estimator, algorithm)

    def update_critic(self, ctx: OnlineRLContext) -> None:
        """Fit the critic to the returns."""
        data = training_rows(
            ctx.batch, (*MODEL_INPUT, "values", "returns"), self.config, role=str(Role.Critic), step=self.global_steps
        )
        if len(data):
            ctx.metrics |= self._looked_at(self.groups[str(Role.Critic)].update_critic(data), prefix="critic")

    def update_actor(self, ctx: OnlineRLContext) -> None:
        """Improve the policy, once the critic has warmed up."""
        actor = self.config.actor_rollout_ref.actor
        columns = (*MODEL_INPUT, "old_log_probs", "advantages", *(("ref_log_prob",) if actor.use_kl_loss else ()))
        if corrects_rollout(self.config):
            columns += ("rollout_is_weights",)
        data = training_rows(ctx.batch, columns, self.config, role=str(Role.Actor), step=self.global_steps)
        ctx.updated = self.global_steps > self.config.trainer.critic_warmup and len(data) > 0
        if "rollout_is_weights" in data.batch.keys():
            data.batch["advantages"] = data.batch["advantages"] * data.batch.pop("rollout_is_weights")
        if ctx.updated:
            ctx.metrics |= self._looked_at(self.policy.actor.update_actor(data), prefix="actor")

    def _looked_at(self, updated: DataProto, *, prefix: str) -> dict[str, float]:
        """Return an update's metrics, or raise NonFiniteError as `trainer.nonfinite` says."""
        updates = updated.meta_info["metrics"]
        self.update_watch.look_at(updates, prefix=prefix, step=self.global_steps)
        self.ledger.note(prefix, updates, prefix=prefix)
        return mean_metrics(updates)

    def update_weights(self, ctx: OnlineRLContext) -> None:
        """Push the new weights to the rollout, with this step's number as their version."""
        self.pipeline.push(self.global_steps)

    def testing(self, ctx: OnlineRLContext) -> None:
        """Validate every `trainer.test_freq` steps and after the last one."""
        due = self.val_dataset is not None and self._due(self.config.trainer.test_freq)
        if self.evaluation is None:
            ctx.metrics |= validate(self, step=self.global_steps) if due else {}
            return
        for metrics in self.evaluation.finished():
            ctx.metrics |= metrics
        if due:
            self.evaluation.request(self.global_steps, self.policy.gather_later())

    def log(self, ctx: OnlineRLContext) -> None:
        """Tell the step's numbers to every logger."""
        ctx.timing["step"] = time.perf_counter() - ctx.started_at
        ctx.metrics |= (
            step_metrics(ctx, self.config, num_gpus=self.resource_pool_manager.get_n_gpus()) | self.saver.metrics()
        )
        ctx.metrics |= self.ledger.metrics() | self.failover.metrics()
        if self.failover.is_news(self.global_steps):
            self.tracking.log(ctx.metrics, self.global_steps)

    def save_checkpoint(self, ctx: OnlineRLContext) -> None:
        """Commit every `trainer.save_freq` steps, after the last one, and before the run leaves because of SIGTERM."""
        self.ledger.end_step(
            self.global_steps, epoch=ctx.metrics.get("training/epoch"), prompts=ctx.get("prompt_rows", ())
        )
        leaving = NOTICE.received
        due = leaving or self.commit_is_due()
        self.failover.remember(whatever_step=due)
        if due:
            self.commit(must=leaving)
        ctx.finish = ctx.finish or leaving

    def commit_is_due(self) -> bool:
        return self._due(self.config.trainer.save_freq)

    def commit(self, *, must: bool = False) -> None:
        """Commit what is there now.

        must: a failure ends the run whatever `trainer.save_failure` says, as that of the last step does.
        """
        must, write = must or self.global_steps == self.total_training_steps, functools.partial(write_checkpoint, self)
        self.failover.run(functools.partial(self.saver.save, self.global_steps, write, must=must))

    def _due(self, freq: int) -> bool:
        return is_due(freq, self.global_steps, total_steps=self.total_training_steps)

    # ---- durable state: what is in it says `durable.py`

    def _resume(self) -> None:
        self.identity, self.pipeline = identity(self.config), make_pipeline(self.policy, self.config)
        path = find_resume(self.store, self.config.trainer)
        if self.past.moment is not None:
            self.saver.committed = path
            return self.ledger.go_on_from(None, path=None, step=self.past.moment.step, taken={})
        if path is None:
            self.ledger.begin()
            return
        compare_run(path, self.config)
        restore(self, path)
        logger.info("resumed from %s, step %d of %d", path, self.global_steps, self.total_training_steps)

    def trained_groups(self) -> dict[str, Any]:
        """The groups that have a state of their own, by the name it has in a checkpoint."""
        critic = self.groups.get(str(Role.Critic))
        return {"actor": self.policy.actor} | ({"critic": critic} if critic is not None else {})
