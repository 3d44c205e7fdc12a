"""PPO's part of the loop around the step: data, workers, state, recovery. The step is `trainer.py`.

`RayPPOTrainer` inherits it, and it fills in `Trainer` (`trainer/loop.py`). Runs in the driver.
"""

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from hybridrl import algos
from hybridrl.algos.advantages import get_adv_estimator
from hybridrl.algos.partition import balanced_partition
from hybridrl.config import PPOConfig
from hybridrl.config.engines import critic_engine_settings, engine_settings
from hybridrl.data_plane.futures import DataProtoFuture
from hybridrl.driver.run_context import RunContext
from hybridrl.errors import CheckpointError
from hybridrl.framework.context import OnlineRLContext
from hybridrl.framework.stage import DeviceSlots, Wrapper
from hybridrl.framework.status import reporting
from hybridrl.protocol import DataProto
from hybridrl.single_controller.worker_group import RayClassWithInitArgs
from hybridrl.trainer import ppo, recovery, step_record
from hybridrl.trainer.checkpoint.step_ledger import LEDGER
from hybridrl.trainer.data.prompt_dataset import collate_fn, load_prompt_data
from hybridrl.trainer.data.prompt_loader import StepPrompts
from hybridrl.trainer.data.tokenizer import pad_token_id
from hybridrl.trainer.loop import Trainer
from hybridrl.trainer.ppo import advantages, rewards, step_settings
from hybridrl.trainer.ppo.columns import COLUMNS, MODEL_INPUT
from hybridrl.trainer.ppo.metrics import global_seqlen_metrics
from hybridrl.trainer.ppo.policy.generator import Generator
from hybridrl.trainer.ppo.policy.parity_gate import make_parity_gate
from hybridrl.trainer.ppo.policy.policy_workers import image_processor, make_policy_workers
from hybridrl.trainer.ppo.policy.remote_evaluator import RemoteEvaluator
from hybridrl.trainer.ppo.policy.rollout_pipeline import BatchedGenerator, RolloutPipeline
from hybridrl.trainer.ppo.sampling.off_policy import staleness_metrics
from hybridrl.trainer.ppo.sampling.replay_buffer import ReplayBuffer
from hybridrl.trainer.ppo.update_batch import call_balanced, num_optimizer_steps, select_columns
from hybridrl.trainer.ppo.validation import validate, validate_on_evaluator
from hybridrl.trainer.recovery.policies import ResumeState
from hybridrl.trainer.roles import ResourcePoolManager, Role, check_worker_classes, worker_role
from hybridrl.trainer.run.middleware import BatchContext, load_middleware
from hybridrl.trainer.run.state import StatefulObjects
from hybridrl.trainer.submitted_call import SubmittedCall, Submitting
from hybridrl.trainer.utilization import ModelUse
from hybridrl.workers.engine.utilization.model_flops import ADAPTER_UPDATE, UPDATE, ModelFlops


class NoGroupFilter:
    """A run without `algorithm.filter_groups`; it refuses a checkpoint with groups that were kept for a next step."""

    def state_dict(self) -> None:
        """Return None: no group is kept."""

    def load_state_dict(self, state: None) -> None:
        """Do nothing."""

    def save(self, directory: str) -> dict[str, int]:
        """Return what a filter returns that keeps no group."""
        return {"rows": 0}

    def load(self, directory: str, state: Mapping[str, int] | None) -> None:
        """Raise CheckpointError if a filter has kept groups."""
        if state and state["rows"]:
            raise CheckpointError(
                f"{directory} has {state['rows']} samples that were kept for the next step, and "
                "algorithm.filter_groups.enable=false never trains them: set it to true (or "
                "algorithm.filter_groups.order=shortest) as in the run that kept them, or resume from a checkpoint "
                "without kept groups (training/filter_groups/kept_groups=0)"
            )


class PPOLoop(Trainer):
    """Everything of `RayPPOTrainer` but its step; the arguments are described there."""

    columns = COLUMNS

    def __init__(
        self,
        config: PPOConfig,
        tokenizer: Any,
        role_worker_mapping: dict[Role, type],
        resource_pool_manager: ResourcePoolManager,
        ray_worker_group_cls: type | None = None,
        *,
        reward_fn: rewards.RewardFn | None = None,
        val_reward_fn: rewards.RewardFn | None = None,
        train_dataset: Any = None,
        val_dataset: Any = None,
        collate_fn: Callable = collate_fn,
        train_sampler: Any = None,
        agent_loops: Generator | None = None,
        context: RunContext | None = None,
    ):
        context = context or RunContext()
        self.role_worker_mapping = role_worker_mapping
        self.reward_fn, self.val_reward_fn = reward_fn, val_reward_fn or reward_fn
        self.generator: Generator = agent_loops or BatchedGenerator()
        self.estimator = get_adv_estimator(config.algorithm.adv_estimator)
        check_worker_classes(role_worker_mapping)
        lifecycle, run_name = context.lifecycle, f"{config.trainer.experiment_name}-{context.run_id}"
        resume_state = (
            recovery.load_surviving_state(run_name, lifecycle) if lifecycle.is_supervised else ResumeState(run_name)
        )
        middleware = load_middleware(config.trainer.middleware)
        step_settings.check_roles(
            config, set(role_worker_mapping), has_reward=reward_fn is not None, has_agent_loops=agent_loops is not None
        )
        self.collate = functools.partial(collate_fn, pad_token_id=pad_token_id(tokenizer))
        defers = config.algorithm.filter_groups.defers
        data = replace(config.data, gen_batch_size=None) if defers else config.data  # all drawn prompts are trained
        processor = image_processor(config, tokenizer)
        train_loader, self.val_dataset = load_prompt_data(
            data, tokenizer, train_dataset, val_dataset, self.collate, train_sampler, processor=processor
        )
        if Role.RewardModel not in role_worker_mapping:
            rewards.check_data_sources(train_loader.dataset, self.reward_fn)
            rewards.check_data_sources(self.val_dataset, self.val_reward_fn)
        super().__init__(
            config,
            tokenizer,
            resource_pool_manager=resource_pool_manager,
            ray_worker_group_cls=ray_worker_group_cls,
            train_loader=train_loader,
            resume_state=resume_state,
            model=config.actor_rollout_ref.model,
            context=context,
        )
        self.middleware = middleware
        self.prompts = self._tail_prompts() if defers else StepPrompts(train_loader, seed=config.trainer.seed)
        self.replay_buffer = self._make_replay_buffer() if config.trainer.replay.groups else None
        self.group_filter = self._make_group_filter() if step_settings.filters_groups(config) else None
        self.kl_ctrl = advantages.make_kl_controller(config.algorithm.kl_ctrl)
        self.reward_moments = algos.reward_moments.RewardMoments() if config.algorithm.normalize_reward else None
        self.reward_guard = rewards.NoRewardGuard()
        self.no_signal = rewards.NoSignalWarning()
        self.remote_evaluator: RemoteEvaluator | None = None
        self.recorder = step_record.StepRecorder(self) if config.trainer.recorded_kinds else None
        self._calls: dict[str, SubmittedCall] = {}  # pool -> the newest one

    # ---- workers

    def init_workers(self) -> None:
        """Reserve devices, start the worker processes and load their models. A failure stops all of them."""
        manager = self.resource_pool_manager
        classes: dict[str, RayClassWithInitArgs] = {
            str(role): RayClassWithInitArgs(cls, self.config, worker_role(role))
            for role, cls in self.role_worker_mapping.items()
        }
        manager.check_colocation(self.config.trainer.colocate)
        self.launch_workers(
            classes,
            {str(role): manager.mapping[role] for role in self.role_worker_mapping},
            detached=self.resume_state.outlives_driver,
            reattach=self.resume_state.snapshot is not None,
        )
        self.policy = make_policy_workers(self.groups, manager, self.config)
        self.gate = make_parity_gate(self.config, self.tokenizer, self.policy.actor)
        self.pipeline = RolloutPipeline(self.policy, self.config, self.generator, gate=self.gate)

    def init_role(self, role: str) -> None:
        """Load this role's model into its newly started processes."""
        sizes = self._batch_sizes()
        self.groups[role].init_model(num_optimizer_steps(self.config, sizes, role=role))
        self.groups[role].mark_ready()

    def _batch_sizes(self) -> list[int]:
        """Return the number of prompts that each step trains on."""
        if self.config.algorithm.filter_groups.fills_batches:
            return [self.config.data.train_batch_size] * self.total_training_steps
        return self.train_loader.batch_sizes(self.total_training_steps)

    def shutdown(self) -> None:
        """Stop the worker processes and release their devices. Safe to call twice."""
        self.generator.close()
        super().shutdown()

    # ---- what `Trainer` asks for

    @property
    def roles(self) -> Collection[Role]:
        """The roles that have workers."""
        return self.role_worker_mapping.keys()

    @property
    def stateful(self) -> StatefulObjects:
        """The stateful objects, in the order in which they are saved and loaded. Names are a format on disk."""
        return {
            "data": self.train_loader,
            "prompts": self.prompts,
            "kl_ctrl": self.kl_ctrl,
            "ahead": self.pipeline,
            "surplus": self.group_filter or NoGroupFilter(),
            **({"replay": self.replay_buffer} if self.replay_buffer is not None else {}),
            LEDGER: self.ledger,
            **({"reward_moments": self.reward_moments} if self.reward_moments is not None else {}),
        }

    def model_uses(self) -> Mapping[str, ModelUse]:
        """Return stage -> what it computes.

        Omits `gen` when responses and trained rows differ, because its FLOPs are then unknown.
        """
        config, policy, on = self.config, self.config.actor_rollout_ref, step_settings.stage_roles(self.roles)
        actor, trust = engine_settings(policy.actor).dtype, policy.model.trust_remote_code
        model = ModelFlops.read(
            policy.model.path, override_config=policy.model.override_config, trust_remote_code=trust
        )
        settings = step_settings.StepSettings(config, self.roles, type(self))
        with_reference = step_settings.scores_reference_with_actor(settings)
        epochs, update = policy.actor.ppo_epochs, ADAPTER_UPDATE if policy.model.uses_lora else UPDATE
        uses = {
            "old_log_prob": ModelUse(str(on.actor), model, actor, times=1 + with_reference),
            "ref": ModelUse(str(on.reference), model, actor),
            "update_actor": ModelUse(str(on.actor), model, actor, update, times=epochs),
        }
        if step_settings.trains_what_it_generates(config):
            uses["gen"] = ModelUse(str(on.rollout), model, policy.rollout.dtype)
        return uses | (self._critic_uses(on.critic, times=epochs) if Role.Critic in self.roles else {})

    def _critic_uses(self, role: str, *, times: int) -> dict[str, ModelUse]:
        critic, policy = self.config.critic.model.path, self.config.actor_rollout_ref.model
        model = ModelFlops.read(
            critic or policy.path,
            override_config=policy.override_config if critic in (None, policy.path) else {},
            trust_remote_code=policy.trust_remote_code,
            outputs=1,
        )
        dtype = critic_engine_settings(self.config).dtype
        return {
            "values": ModelUse(role, model, dtype),
            "update_critic": ModelUse(role, model, dtype, UPDATE, times=times),
        }

    def trained_groups(self) -> dict[str, Any]:
        """Return the groups with a trained engine, by their name in a checkpoint."""
        trained = {"actor": self.policy.actor, "critic": self.groups.get(Role.Critic)}
        return {name: group for name, group in trained.items() if group is not None}

    @property
    def snapshot_freq(self) -> int:
        """Steps between two snapshots; 0 means that a lost worker ends the run.

        Not below the lag: a snapshot waits for all submitted responses, and the lag exists so that a step need not.
        """
        trainer = self.config.trainer
        takes_some = trainer.backend == "ray" and trainer.snapshot_freq
        return max(trainer.snapshot_freq, trainer.rollout_lag) if takes_some else 0

    def device_slots(self) -> DeviceSlots | None:
        """Return role -> device slots if work that was submitted runs beside other stages, else None."""
        return self.resource_pool_manager.pools_by_role() if self.config.trainer.overlap else None

    def begin(self) -> None:
        """Bring all roles to the same step: the trainer's, or that of a previous driver's snapshot."""
        if Role.Evaluator in self.groups:
            if self.remote_evaluator is not None:  # after a rollback, or with other ranks
                self.remote_evaluator.close()
            self.remote_evaluator = RemoteEvaluator(functools.partial(validate_on_evaluator, self))
        snapshot = self.resume_state.pop_snapshot()
        if snapshot is None:
            self.pipeline.push_weights(self.global_steps)
            return
        self.step_retry.resume(snapshot)
        if snapshot.step and self.commit_is_due() and snapshot.step not in self.store.steps():
            self.commit()

    def run_remaining_steps(self) -> None:
        """Validate if configured, and train."""
        trainer = self.config.trainer
        if trainer.val_only or (trainer.val_before_train and self.global_steps == 0 and self.val_dataset is not None):
            with reporting("validation"):
                metrics = validate(self, step=self.global_steps)
            self.tracking.log(metrics, self.global_steps)
        if trainer.val_only:
            return
        super().run_remaining_steps()

    def _run_stages(self) -> None:
        """Submit the first `lag` batches so that the first steps find them, and run the steps."""
        while len(self.pipeline) < self.num_ahead:
            self.pipeline.submit(self.prompts.next_batch())
        super()._run_stages()

    def step_wrappers(self) -> Sequence[Wrapper]:
        """Return the recorder of steps, if some are to be kept."""
        if self.recorder is None:
            return ()
        self.recorder.reset()
        return (self.recorder,)

    def save_checkpoint(self, ctx: OnlineRLContext) -> None:
        """Keep the step for `hybridrl replay` and commit a checkpoint, each if due."""
        if self.recorder is not None:
            self.recorder.end_step(ctx)
        super().save_checkpoint(ctx)

    def end(self) -> None:
        """Wait for the last evaluations."""
        for metrics in self.remote_evaluator.drain() if self.remote_evaluator is not None else ():
            self.tracking.log(metrics, self.global_steps)

    @property
    def weight_channel(self) -> Any:
        """Channel that weights are pushed over; None without one."""
        return self.pipeline.weight_channel

    def disconnect(self, reason: str) -> None:
        """Cancel pushes and close agent loops. Safe to call twice."""
        self.pipeline.disconnect(reason)

    def reconnect(self) -> None:
        """Push the restored weights to the rollout, and start again what was lost with a process."""
        self.pipeline.reconnect()
        self.pipeline.push_weights(self.global_steps)
        if self.remote_evaluator is not None:
            self.remote_evaluator.resubmit()

    # ---- prompts

    @property
    def num_ahead(self) -> int:
        """Generation batches that are pending for later steps: the lag, and fewer near the end of the run."""
        return min(self.pipeline.lag, self.total_training_steps - self.global_steps)

    def _tail_prompts(self) -> StepPrompts:
        data = self.config.data
        return ppo.TailPrompts(
            self.train_loader,
            seed=self.config.trainer.seed,
            batch_size=data.train_batch_size,
            gen_batch_size=data.gen_batch_size,
            step=lambda: self.global_steps,
            total_steps=self.total_training_steps,
        )

    # ---- samples

    def _make_replay_buffer(self) -> ReplayBuffer:
        return ReplayBuffer(
            self.config.trainer.replay,
            n=step_settings.samples_per_group(self.config),
            staleness=self.config.trainer.staleness or 0,
            pad_token_id=pad_token_id(self.tokenizer),
        )

    def _make_group_filter(self) -> "ppo.GroupFilter":
        return ppo.GroupFilter(
            self.config.algorithm.filter_groups,
            n=self.config.actor_rollout_ref.rollout.n,
            batch_size=self.config.data.train_batch_size,
            max_age=step_settings.max_sample_age(self.config),
            pad_token_id=pad_token_id(self.tokenizer),
        )

    def _sample_metrics(self, batch: DataProto) -> dict[str, float]:
        """Return ages and lengths of the samples that the step trains on."""
        version, may_be_old = self.global_steps - 1, step_settings.max_sample_age(self.config) > 0
        metrics = staleness_metrics(batch, version=version) if may_be_old else {}
        if self.config.trainer.balance_batch:
            lengths = batch.batch["attention_mask"].sum(-1).tolist()
            parts = balanced_partition(lengths, self._num_dp(self.policy.actor.world_size))
            metrics |= global_seqlen_metrics(lengths, parts)
        return metrics

    def submit(self, group: Any, submit: Callable[[], list[DataProtoFuture]]) -> SubmittedCall:
        """Make calls of a group without waiting, after what the processes of its pool have to do."""
        pool = self.resource_pool_manager.mapping[Role(group.role)]
        call = self._calls[pool] = SubmittedCall(group, submit, after=self._calls.get(pool))
        return call

    def score_rows(
        self,
        ctx: BatchContext,
        group: Any,
        method: Callable,
        *,
        stage: str = "",
        of_policy: bool = True,
        more: Sequence[str] = (),
    ) -> Submitting:
        """Submit a call for all rows, and return its columns when the stage is resumed.

        Args:
            ctx: The step.
            group: Who computes.
            method: Its method.
            stage: Name under which `ctx.computed` has what engines that share prefixes computed.
            of_policy: Whether the model is one whose rows share prefixes.
            more: Columns beside `MODEL_INPUT`.
        """
        share_prefixes = of_policy and self.config.actor_rollout_ref.actor.use_prefix_grouper
        data, num_ranks = select_columns(ctx.batch, (*MODEL_INPUT, *more)), self._num_dp(group.world_size)
        options = {"balance": self.config.trainer.balance_batch, "share_prefixes": share_prefixes}
        call = self.submit(group, lambda: [call_balanced(method, data, num_ranks=num_ranks, **options)])
        yield call
        [columns] = call.get()
        ctx.computed[stage] = columns.meta_info.pop("metrics", {})
        return columns

    def _num_dp(self, num_ranks: int) -> int:
        """Return the data-parallel size of the engines of this many processes."""
        return engine_settings(self.config.actor_rollout_ref.actor).data_parallel_size(num_ranks)
