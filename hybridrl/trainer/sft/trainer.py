"""`SFTTrainer`: the driver of supervised fine-tuning, as a list of stages.

`main_sft` creates it. Worker groups, data loader and checkpoints are those of PPO. Every checkpoint has `huggingface/`,
the model in the format that `main_ppo` and other programs read.
"""

import functools
import logging
import math
import os
import time
import uuid
from collections.abc import Callable
from typing import Any

from hybridrl.config import SFTConfig, to_yaml
from hybridrl.driver.termination import TERMINATION
from hybridrl.framework import OnlineRLContext, stage
from hybridrl.single_controller.launch import launch
from hybridrl.single_controller.monitoring.tracing import stop_recording
from hybridrl.single_controller.ray_worker_group import RayClassWithInitArgs, RayWorkerGroup
from hybridrl.trainer.checkpoint.compatibility import FINGERPRINT_KEY, check_compatible, run_fingerprint
from hybridrl.trainer.checkpoint.saver import CheckpointSaver, min_checkpoint_bytes
from hybridrl.trainer.checkpoint.step_ledger import LEDGER, StepLedger
from hybridrl.trainer.checkpoint.store import (
    CheckpointStore,
    check_engine_state,
    find_resume_checkpoint,
    read_trainer_state,
    write_run_state,
)
from hybridrl.trainer.data.prompt_loader import PromptLoader
from hybridrl.trainer.recovery.nonfinite import NonFiniteGuard, train_with_rollbacks
from hybridrl.trainer.roles import ResourcePoolManager
from hybridrl.trainer.run.metrics import mean_metrics
from hybridrl.trainer.run.middleware import Middleware, apply_middleware
from hybridrl.trainer.run.setup import (
    enable_tracing,
    is_due,
    open_tracking,
    run_directory,
    run_stages,
    warn_about_small_batches,
)
from hybridrl.trainer.sft.dataset import SFTDataset

logger = logging.getLogger(__name__)
ROLE = "sft"
EXPORT = "huggingface"


class SFTTrainer:
    """The driver of supervised fine-tuning.

    Args:
        config: Settings of the job.
        tokenizer: The model's tokenizer.
        worker_cls: Class of the worker processes, for instance `SFTWorker`.
        resource_pool_manager: Has one pool, for all workers.
        ray_worker_group_cls: `RayWorkerGroup`, or `LocalWorkerGroup` for one process without Ray.
    """

    def __init__(
        self,
        config: SFTConfig,
        tokenizer: Any,
        worker_cls: type,
        resource_pool_manager: ResourcePoolManager,
        ray_worker_group_cls: type = RayWorkerGroup,
    ):
        self.config, self.tokenizer, self.worker_cls = config, tokenizer, worker_cls
        self.resource_pool_manager, self.ray_worker_group_cls = resource_pool_manager, ray_worker_group_cls
        data = config.data
        train = SFTDataset(data.train_files, tokenizer, data)
        self.val_dataset = SFTDataset(data.val_files, tokenizer, data) if data.val_files else None
        self.train_loader = PromptLoader(
            train, batch_size=data.train_batch_size, shuffle=data.shuffle, seed=data.seed, collate=train.collate
        )
        warn_about_small_batches(self.config, num_rows=len(train))
        self.total_training_steps = (
            config.trainer.total_training_steps or config.trainer.total_epochs * self.train_loader.steps_per_epoch
        )
        self.store = CheckpointStore(run_directory(config.trainer), keep=config.trainer.max_ckpt_to_keep)
        self.job = f"{config.trainer.experiment_name}-{uuid.uuid4().hex[:6]}"
        self.group: Any = None
        self.saver = CheckpointSaver(
            self.store, config.trainer, min_checkpoint_bytes=min_checkpoint_bytes(config.model)
        )
        self.ledger = StepLedger(self.store.root, rows=len(train))
        self.nonfinite_guard = NonFiniteGuard(config.trainer.nonfinite)
        self.global_steps = 0
        self.middleware: list[Middleware] = []  # the master's; user middleware exists for PPO only

    def init_workers(self) -> None:
        """Reserve devices, start the worker processes and load the model."""
        manager = self.resource_pool_manager
        trainer, pool = self.config.trainer, next(iter(manager.resource_pool_spec))
        plan = manager.plan(
            self.job, {ROLE: pool}, colocate=trainer.colocate, worker_env=enable_tracing(trainer, self.job)
        )
        manager.create_resource_pool(plan=plan)
        classes = {ROLE: RayClassWithInitArgs(self.worker_cls, self.config, ROLE)}
        try:
            self.group = launch(plan, classes, manager.resource_pool_dict, group_cls=self.ray_worker_group_cls)[ROLE]
            self.group.set_call_timeout(trainer.call_timeout_s)
            self.group.init_model(self.total_training_steps)
        except BaseException:
            self.shutdown()
            raise

    def shutdown(self) -> None:
        """Stop the worker processes and release their devices. Safe to call twice."""
        if self.group is not None:
            self.group.shutdown()
        self.group = None
        self.resource_pool_manager.release()
        stop_recording()

    def stages(self) -> list[Callable[[OnlineRLContext], None]]:
        """Return the stages of a step in order."""
        return [
            stage("next_batch", writes=("input_ids", "responses", "response_mask"), pure=False)(self.next_batch),
            stage("update", role=ROLE, reads=("input_ids", "responses", "response_mask"), pure=False)(self.update),
            stage("testing", role=ROLE)(self.validate),
            stage("log", pure=False)(self.log),
            stage("save_checkpoint", pure=False)(self.save_checkpoint),
        ]

    def fit(self) -> str | None:
        """Train up to `total_training_steps`; return the newest checkpoint, if there is one.

        Raises:
            Terminated: SIGTERM arrived. In the middle of a step, the step is committed first (`driver/termination.py`).
        """
        with TERMINATION.handle_sigterm():
            self._resume()
            policy = self.config.trainer.nonfinite
            train_with_rollbacks(
                self._train, policy=policy, newest=lambda: self.saver.committed, roll_back=self._restore
            )
        return self.store.latest()

    def _train(self) -> None:
        remaining, first = self.total_training_steps - self.global_steps, self.global_steps + 1
        with open_tracking(
            self.config, start_step=self.global_steps, total_steps=self.total_training_steps
        ) as self.tracking:
            if remaining > 0:
                change = functools.partial(apply_middleware, trainer=self)
                with TERMINATION.defer_sigterm(grace_s=self.config.trainer.grace_s):
                    run_stages(
                        self.stages(), max_step=remaining, first_step=first, change=change, wrappers=[self.ledger]
                    )
        if self.global_steps < self.total_training_steps:
            TERMINATION.raise_if_received()

    def next_batch(self, ctx: OnlineRLContext) -> None:
        """Load the next conversations of the epoch."""
        ctx.started_at = time.perf_counter()
        self.global_steps += 1
        ctx.metrics |= {"training/global_step": self.global_steps, "training/epoch": self.train_loader.epoch}
        ctx.batch = self.train_loader.next_batch()
        ctx.batch.meta_info["balance"] = self.config.trainer.balance_batch

    def update(self, ctx: OnlineRLContext) -> None:
        """Take one optimizer step on the assistant's tokens."""
        updates = self.group.update(ctx.batch).meta_info["metrics"]
        self.nonfinite_guard.check(updates, prefix="train", step=self.global_steps)
        self.ledger.record_update(ROLE, updates, prefix="train")
        metrics = mean_metrics(updates)
        ctx.metrics |= {"train/loss" if name == "loss" else name: value for name, value in metrics.items()}

    def validate(self, ctx: OnlineRLContext) -> None:
        """Compute the validation loss every `trainer.test_freq` steps and after the last one."""
        if self.val_dataset is not None and self._due(self.config.trainer.test_freq):
            ctx.metrics["val/loss"] = self._validation_loss()

    def _validation_loss(self) -> float:
        data, dataset = self.config.data, self.val_dataset
        loader = PromptLoader(dataset, batch_size=data.train_batch_size, shuffle=False, seed=0, collate=dataset.collate)
        sums = [self.group.compute_loss(loader.next_batch())[0] for _ in range(loader.steps_per_epoch)]
        return math.fsum(total for total, _ in sums) / math.fsum(count for _, count in sums)

    def log(self, ctx: OnlineRLContext) -> None:
        """Send the step's metrics to every logger."""
        seconds = time.perf_counter() - ctx.started_at
        tokens = float(ctx.batch.batch["attention_mask"].sum())
        ctx.metrics |= {
            "perf/total_num_tokens": tokens,
            "perf/time_per_step": seconds,
            "perf/throughput": tokens / seconds,
        }
        ctx.metrics |= {f"timing_s/{name}": value for name, value in ctx.timing.items()}
        ctx.metrics |= self.saver.metrics() | self.ledger.metrics()
        self.tracking.log(ctx.metrics, self.global_steps)

    def save_checkpoint(self, ctx: OnlineRLContext) -> None:
        """Commit a checkpoint with an export.

        Every `trainer.save_freq` steps, after the last one, and before an exit by SIGTERM.
        """
        self.ledger.end_step(self.global_steps, epoch=ctx.metrics.get("training/epoch"), prompts=self.train_loader.rows)
        terminating = TERMINATION.received
        if terminating or self._due(self.config.trainer.save_freq):
            self.saver.save(
                self.global_steps,
                self._write_checkpoint,
                required=terminating or self.global_steps == self.total_training_steps,
            )
        ctx.finish = ctx.finish or terminating

    def _due(self, freq: int) -> bool:
        return is_due(freq, self.global_steps, total_steps=self.total_training_steps)

    def _write_checkpoint(self, directory: str) -> None:
        num_updates = {ROLE: self.group.save_checkpoint(os.path.join(directory, "model"))}
        check_engine_state(os.path.join(directory, "model"), num_ranks=self.group.world_size)
        self.group.export_hf(os.path.join(directory, EXPORT))
        state = {
            "global_steps": self.global_steps,
            "data": self.train_loader.state_dict(),
            FINGERPRINT_KEY: self.identity,
        }
        state[LEDGER] = self.ledger.commit(num_updates)
        write_run_state(directory, state, config_yaml=to_yaml(self.config))

    def _resume(self) -> None:
        self.identity = run_fingerprint(self.config)
        path = find_resume_checkpoint(self.store, self.config.trainer)
        if path is None:
            self.ledger.start()
            return
        check_compatible(path, self.config)
        self._restore(path)
        logger.info("resumed from %s, step %d of %d", path, self.global_steps, self.total_training_steps)

    def _restore(self, path: str) -> None:
        """Set the trainer to the state of the checkpoint at `path`."""
        state = read_trainer_state(path)
        num_updates = {ROLE: self.group.load_checkpoint(os.path.join(path, "model"))}
        self.global_steps = state["global_steps"]
        self.train_loader.load_state_dict(state["data"])
        self.ledger.resume_from(state.get(LEDGER), path=path, step=self.global_steps, num_updates=num_updates)
        self.saver.committed = path
