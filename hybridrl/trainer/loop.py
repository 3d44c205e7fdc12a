"""`Trainer`: what all trainers share, from the start of the workers to the last commit.

    init_workers   reserve devices, start processes, load models
    fit            resume -> roll back after a NonFiniteError -> retry after a lost worker -> run stages -> commit
    shutdown       end the processes

`RayPPOTrainer` and the subclasses of `SupervisedTrainer` say what a step is (`step`), how a role starts (`init_role`),
and what belongs to snapshot and checkpoint besides the weights (`stateful`). Runs in the driver; knows no algorithm.
"""

import functools
import logging
import math
import os
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import numpy as np

from hybridrl import single_controller
from hybridrl.config import PPOConfig, SupervisedConfig, to_yaml
from hybridrl.config.schema.workers import ModelConfig
from hybridrl.driver.run_context import RunContext
from hybridrl.errors import NonFiniteError
from hybridrl.framework.context import OnlineRLContext
from hybridrl.framework.stage import DeviceSlots, Stage, StageFn, Wrapper
from hybridrl.single_controller.local_worker_group import LocalWorkerGroup, launch_locally
from hybridrl.single_controller.worker_group import RayClassWithInitArgs
from hybridrl.system.collector import collect_as_usual
from hybridrl.trainer import recovery
from hybridrl.trainer.checkpoint.fingerprint import FINGERPRINT_KEY, run_fingerprint
from hybridrl.trainer.checkpoint.reading import check_compatible, read_complete_state
from hybridrl.trainer.checkpoint.saver import CheckpointSaver, min_checkpoint_bytes
from hybridrl.trainer.checkpoint.step_ledger import LEDGER, StepLedger
from hybridrl.trainer.checkpoint.store import CheckpointStore, check_engine_state, write_run_state
from hybridrl.trainer.data.prompt_loader import NoPrompts, PromptLoader
from hybridrl.trainer.recovery.policies import RankPolicy, ResumeState, RetryPolicy
from hybridrl.trainer.roles import ResourcePoolManager
from hybridrl.trainer.run import setup
from hybridrl.trainer.run.metrics import mean_metrics
from hybridrl.trainer.run.middleware import Column, Middleware, apply_middleware
from hybridrl.trainer.run.state import StatefulObjects, load_states, save_states
from hybridrl.trainer.utilization import ModelUse, Utilization

logger = logging.getLogger(__name__)
FIRST_COMMIT_S = 300.0  # without any checkpoint; many steps of a large model may be hours


class Trainer:
    """The loop of every trainer.

    Args:
        config: Settings of the job.
        tokenizer: The model's tokenizer.
        resource_pool_manager: Pools, and the role -> pool mapping.
        ray_worker_group_cls: `RayWorkerGroup`, the default, or `LocalWorkerGroup` for one process without Ray.
        train_loader: Batches of the training data.
        resume_state: What an earlier driver of the run has left.
        model: Settings of the trained model.
        context: The run's state in this process; by default one of its own.

    Attributes:
        columns: Table of the batch's columns, for checks of the stages.
        global_steps: The step in progress, or the last completed one; also the version of its weights.
    """

    columns: Mapping[str, Column] = {}

    def __init__(
        self,
        config: PPOConfig | SupervisedConfig,
        tokenizer: Any,
        *,
        resource_pool_manager: ResourcePoolManager,
        ray_worker_group_cls: type | None = None,
        train_loader: PromptLoader | NoPrompts,
        resume_state: ResumeState,
        model: ModelConfig,
        context: RunContext | None = None,
    ):
        self.context = context or RunContext()
        self.config: Any = config
        self.tokenizer, self.train_loader = tokenizer, train_loader
        self.resource_pool_manager = resource_pool_manager
        self.ray_worker_group_cls = ray_worker_group_cls or single_controller.RayWorkerGroup
        self.resume_state, self.job = resume_state, resume_state.run_name
        trainer, num_rows = config.trainer, len(train_loader.dataset)
        setup.warn_about_small_batches(config, num_rows=num_rows)
        self.total_training_steps = trainer.total_training_steps or trainer.total_epochs * train_loader.steps_per_epoch
        self.store = CheckpointStore(setup.run_directory(trainer), keep=trainer.max_ckpt_to_keep)
        self.saver = CheckpointSaver(self.store, trainer, min_checkpoint_bytes=min_checkpoint_bytes(model))
        self.ledger = StepLedger(self.store.root, rows=num_rows, order=train_loader.order)
        self.step_retry = RetryPolicy()
        elastic = trainer.min_ranks > 0
        self.rank_policy: RankPolicy = (
            recovery.ElasticRanks(self, cast(PPOConfig, config), resource_pool_manager) if elastic else RankPolicy()
        )
        self.middleware: list[Middleware] = []
        self.groups: dict[str, Any] = {}
        self.global_steps = 0
        self._training_since = math.inf
        self.utilization = Utilization({}, {})

    # ---- what a trainer is

    @classmethod
    def step(cls, config: Any, roles: Collection[Any]) -> list[Stage]:
        """Return the stages of a step in order, from settings and roles alone: nothing needs to run."""
        raise NotImplementedError

    def init_workers(self) -> None:
        """Reserve devices, start the worker processes and load their models. A failure stops all of them."""
        raise NotImplementedError

    def init_role(self, role: str) -> None:
        """Load this role's model into its newly started processes."""
        raise NotImplementedError

    @property
    def stateful(self) -> StatefulObjects:
        """The stateful objects, in the order in which they are saved and loaded."""
        return {"data": self.train_loader, LEDGER: self.ledger}

    @property
    def roles(self) -> Collection[Any]:
        """The roles that have workers."""
        return tuple(self.groups)

    def trained_groups(self) -> dict[str, Any]:
        """Return the groups with a trained engine, by their name in the ledger."""
        return dict(self.groups)

    def stages(self) -> list[StageFn]:
        """Return the stages of a step, bound to this trainer. Override it to add some."""
        return [stage.bind(self) for stage in self.step(self.config, self.roles) if stage.enabled]

    def model_uses(self) -> Mapping[str, ModelUse]:
        """Return stage -> what it computes, for `perf/mfu/*`."""
        return {}

    # ---- workers

    def launch_workers(
        self,
        classes: Mapping[str, RayClassWithInitArgs],
        pool_of_role: Mapping[str, str],
        *,
        detached: bool = False,
        reattach: bool = False,
    ) -> None:
        """Start the processes of all roles and load their models; a failure stops all of them.

        Args:
            classes: Role -> worker class.
            pool_of_role: Role -> pool.
            detached: Whether the processes outlive the driver.
            reattach: Whether to adopt processes that a previous driver left.
        """
        manager, trainer = self.resource_pool_manager, self.config.trainer
        environment = setup.enable_tracing(trainer, self.job, self.context)
        if issubclass(self.ray_worker_group_cls, LocalWorkerGroup):
            manager.create_resource_pool(job=self.job)
            pools = {role: manager.resource_pool_dict[pool] for role, pool in pool_of_role.items()}
            start = functools.partial(launch_locally, classes, pools)
        else:
            make_plan = functools.partial(
                manager.plan, self.job, pool_of_role, colocate=trainer.colocate, worker_env=environment
            )
            plan = self.rank_policy.plan(make_plan, job=self.job, reattach=reattach)
            timeout_s = trainer.placement_timeout_s
            manager.create_resource_pool(plan=plan, detached=detached, replace_timeout_s=timeout_s)
            launch = single_controller.launch.launch
            start = functools.partial(launch, plan, classes, manager.resource_pool_dict, reattach=reattach)
        try:
            self.groups = start(group_cls=self.ray_worker_group_cls)
            for role, group in self.groups.items():
                group.set_call_timeout(trainer.call_timeout_s)
                if group.is_new:
                    self.init_role(role)
            self.rank_policy.request_missing()
            collect_as_usual()
        except BaseException:
            self.shutdown()
            raise

    def shutdown(self) -> None:
        """Stop the worker processes and release their devices. Safe to call twice."""
        self.rank_policy.stop()
        for group in self.groups.values():
            group.shutdown()
        self.groups = {}
        self.resume_state.drop()
        self.resource_pool_manager.release()
        setup.disable_tracing(self.context)

    # ---- the loop

    def fit(self) -> str | None:
        """Train up to `total_training_steps`, from the newest checkpoint if there is one (`trainer.resume_mode`).

        Returns:
            Path of the newest checkpoint, if there is one.

        Raises:
            Terminated: SIGTERM arrived. In the middle of a step, the step is committed first (`driver/signals.py`).
            KeyboardInterrupt: Ctrl-C, in the same way.
        """
        with self.context.termination.handle_sigterm():
            self._resume()
            while True:
                try:
                    self.rank_policy.run(self._train)
                    break
                except NonFiniteError as error:
                    path = self.nonfinite_guard.check_rollback(error, self.saver.committed)
                self.load_checkpoint(path)
        return self.store.latest()

    @functools.cached_property
    def nonfinite_guard(self) -> Any:
        """Reacts to updates that are not finite; made when the first one appears."""
        return recovery.NonFiniteGuard(self.config.trainer.nonfinite)

    def monitored(self) -> AbstractContextManager[None]:
        """Return a block in which a master monitors this run (`trainer.master`). Shut the workers down after it."""
        trainer = self.config.trainer
        return recovery.run_under_master(self) if trainer.master and trainer.backend == "ray" else nullcontext()

    def _resume(self) -> None:
        self.identity = run_fingerprint(self.config)
        path, snapshot = setup.resume_checkpoint(self.store, self.config.trainer), self.resume_state.snapshot
        if snapshot is not None:
            self.saver.committed = path
            self.ledger.resume_from(None, path=None, step=snapshot.step, num_updates={})
        elif path is None:
            self.ledger.start()
        else:
            check_compatible(path, self.config)
            self.load_checkpoint(path)
            logger.info("resumed from %s, step %d of %d", path, self.global_steps, self.total_training_steps)

    def _train(self) -> None:
        """Train from the step after `global_steps` to the last one."""
        if self.snapshot_freq:
            self.step_retry = recovery.StepRetry(
                self, self.resume_state, snapshot_freq=self.snapshot_freq, directory=self.store.root
            )
        self.begin()
        self._training_since = time.monotonic()
        self.utilization = Utilization.measure(self.model_uses(), self.groups)
        start, end = self.global_steps, self.total_training_steps
        shown = None if self.config.trainer.val_only else end
        with setup.open_tracking(self.config, start_step=start, total_steps=shown) as self.tracking:
            self.run_remaining_steps()

    def run_remaining_steps(self) -> None:
        """Run the steps that are left, and a step again if a worker was lost in it."""
        if self.global_steps >= self.total_training_steps:
            logger.info("nothing to train: step %d of %d is complete", self.global_steps, self.total_training_steps)
            return
        self.step_retry.take_snapshot(force=True)
        self.step_retry.run_with_retry(self._run_stages)

    def _run_stages(self) -> None:
        with self.context.termination.defer_sigterm(grace_s=self.config.trainer.grace_s):
            setup.run_stages(
                self.stages(),
                max_step=self.total_training_steps - self.global_steps,
                first_step=self.global_steps + 1,
                change=functools.partial(apply_middleware, trainer=self),
                device_slots=self.device_slots(),
                queued=self.config.trainer.colocate == "process",
                wrappers=[self.ledger, self.step_retry, *self.step_wrappers()],
                columns=self.columns,
            )
            self.end()
        if self.global_steps < self.total_training_steps:
            self.context.termination.raise_if_received()

    @property
    def snapshot_freq(self) -> int:
        """Steps between two snapshots; 0 means that a lost worker ends the run."""
        return 0

    def device_slots(self) -> DeviceSlots | None:
        """Return role -> device slots if work that was submitted runs beside other stages, else None."""
        return None

    def step_wrappers(self) -> Sequence[Wrapper]:
        """Return what else wraps every stage of the steps that now begin."""
        return ()

    def begin(self) -> None:
        """Bring all roles to the same step, before the first stage runs and after every rollback."""

    def end(self) -> None:
        """Finish what the last step has started."""

    # ---- stages and parts of stages

    def update_metrics(self, updates: Mapping[str, Any], *, role: str, prefix: str) -> dict[str, float]:
        """Return the means of an update's metrics, and record its optimizer steps in the ledger.

        Raises:
            NonFiniteError: According to `trainer.nonfinite`.
        """
        if np.any(updates.get(f"{prefix}/skipped", ())) or "nonfinite_guard" in vars(self):
            self.nonfinite_guard.check(updates, prefix=prefix, step=self.global_steps)
        self.ledger.record_update(role, updates, prefix=prefix)
        return mean_metrics(updates)

    def save_checkpoint(self, ctx: OnlineRLContext) -> None:
        """Commit a checkpoint every `trainer.save_freq` steps, after the last one, and before an exit by a signal.

        With `save_freq` the first one comes after `FIRST_COMMIT_S`, if that is earlier.
        """
        epoch, rows = ctx.metrics.get("training/epoch"), ctx.get("prompt_rows", ())
        self.ledger.end_step(self.global_steps, epoch=epoch, prompts=rows, outcomes=ctx.get("group_outcomes"))
        terminating = self.context.termination.received
        self.rank_policy.on_step()
        can_grow = self.global_steps < self.total_training_steps and self.rank_policy.can_grow()
        due = terminating or can_grow or self.commit_is_due()
        self.step_retry.take_snapshot(force=due)
        if due:
            self.commit(required=terminating)
        if can_grow and self.saver.committed == self.store.path(self.global_steps):
            ctx.finish = self.rank_policy.grows = True
        ctx.finish = ctx.finish or terminating

    # ---- checkpoints

    def is_due(self, freq: int) -> bool:
        """Return whether this step is one of every `freq` steps, or the last one; -1 means never."""
        return freq > 0 and (self.global_steps % freq == 0 or self.global_steps == self.total_training_steps)

    def commit_is_due(self) -> bool:
        """Return whether a checkpoint is due by `trainer.save_freq`, or a first one by the time without any."""
        save_freq = self.config.trainer.save_freq
        waited_s = time.monotonic() - self._training_since
        return self.is_due(save_freq) or (save_freq > 0 and self.saver.committed is None and waited_s > FIRST_COMMIT_S)

    def commit(self, *, required: bool = False) -> None:
        """Commit a checkpoint of the present state.

        Args:
            required: Whether a failure ends the run whatever `trainer.save_failure` is, as it does after the last step.
        """
        required = required or self.global_steps == self.total_training_steps
        save: Callable[[], None] = functools.partial(
            self.saver.save,
            self.global_steps,
            self.write_checkpoint,
            required=required,
            retries=self.step_retry.snapshot is not None,
        )
        self.step_retry.run_with_retry(save)

    def write_checkpoint(self, directory: str) -> None:
        """Write the whole state between two steps into `directory`; `CheckpointSaver` publishes it.

        Raises:
            StorageError: The state cannot be written.
        """
        self.ledger.engine_updates = self.save_engines(directory)
        state = {"global_steps": self.global_steps, FINGERPRINT_KEY: self.identity} | save_states(
            self.stateful, directory
        )
        write_run_state(directory, state, config_yaml=to_yaml(self.config, hide_secrets=True))

    def save_engines(self, directory: str) -> dict[str, Any]:
        """Write the engines of all trained groups; return role -> optimizer steps in the weights, one per rank."""
        num_updates = {}
        for role, group in self.trained_groups().items():
            own = self.engine_directory(directory, role)
            num_updates[role] = group.save_checkpoint(own)
            check_engine_state(own, num_ranks=group.world_size)
        return num_updates

    def load_checkpoint(self, path: str) -> None:
        """Set the trainer to the state of the checkpoint at `path`, whatever it has done since."""
        state = read_complete_state(path)
        self.ledger.engine_updates = {
            role: group.load_checkpoint(self.engine_directory(path, role))
            for role, group in self.trained_groups().items()
        }
        self.global_steps = self.ledger.step = state["global_steps"]
        load_states(self.stateful, state, path)
        self.saver.committed = path

    def engine_directory(self, path: str, role: str) -> str:
        """Return the directory of a trained role in the checkpoint at `path`."""
        return os.path.join(path, role)

    # ---- recovery of lost workers, see `StepRetry`

    @property
    def weight_channel(self) -> Any:
        """Channel that weights are pushed over; None without one."""
        return None

    def disconnect(self, reason: str) -> None:
        """Stop what depends on processes that are about to be replaced. Safe to call twice."""

    def reconnect(self) -> None:
        """Bring roles without a snapshot to the restored step, after processes were replaced."""
