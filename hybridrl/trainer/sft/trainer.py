"""`SFTTrainer`: the driver of supervised fine-tuning, as a list of stages.

    next_batch -> update -> validate -> log -> save_checkpoint

`main_sft` creates it. Resume, rollback and commit are in `trainer/loop.py`, as for PPO. Every checkpoint has
`huggingface/`, the model in the format that `main_ppo` and other programs read.
"""

import math
import os
import time
from collections.abc import Collection, Mapping
from typing import Any

from hybridrl.config import SFTConfig
from hybridrl.data_plane.meta_info import UpdatePlan
from hybridrl.driver.run_context import RunContext
from hybridrl.framework.stage import Stage
from hybridrl.single_controller.ray_worker_group import RayClassWithInitArgs, RayWorkerGroup
from hybridrl.trainer.data.prompt_loader import PromptLoader
from hybridrl.trainer.loop import Trainer
from hybridrl.trainer.recovery.step_snapshot import ResumeState
from hybridrl.trainer.roles import ResourcePoolManager
from hybridrl.trainer.run.middleware import BatchContext
from hybridrl.trainer.sft.dataset import SFTDataset

ROLE = "sft"
EXPORT = "huggingface"
ADAPTER = "lora_adapter"  # beside it, with LoRA: the adapters alone, in the format of peft
MODEL_INPUT = ("input_ids", "attention_mask", "position_ids", "responses", "response_mask")


class SFTTrainer(Trainer):
    """The driver of supervised fine-tuning.

    Args:
        config: Settings of the job.
        tokenizer: The model's tokenizer.
        worker_cls: Class of the worker processes, for instance `SFTWorker`.
        resource_pool_manager: Has one pool, for all workers.
        ray_worker_group_cls: `RayWorkerGroup`, or `LocalWorkerGroup` for one process without Ray.
        context: The run's state in this process. Default: one of its own.
    """

    def __init__(
        self,
        config: SFTConfig,
        tokenizer: Any,
        worker_cls: type,
        resource_pool_manager: ResourcePoolManager,
        ray_worker_group_cls: type = RayWorkerGroup,
        *,
        context: RunContext | None = None,
    ):
        context = context or RunContext()
        data, trainer = config.data, config.trainer
        train = SFTDataset(data.train_files, tokenizer, data)
        super().__init__(
            config,
            tokenizer,
            resource_pool_manager=resource_pool_manager,
            ray_worker_group_cls=ray_worker_group_cls,
            train_loader=PromptLoader(
                train, batch_size=data.train_batch_size, shuffle=data.shuffle, seed=data.seed, collate=train.collate
            ),
            resume_state=ResumeState(f"{trainer.experiment_name}-{context.run_id}"),
            model=config.model,
            context=context,
        )
        self.worker_cls = worker_cls
        self.val_dataset = SFTDataset(data.val_files, tokenizer, data) if data.val_files else None

    # ---- the step

    @classmethod
    def step(cls, config: SFTConfig, roles: Collection[str]) -> list[Stage]:
        """Return the stages of a step in order."""
        return [
            # 1. Conversations.
            Stage(cls.next_batch, writes=MODEL_INPUT, pure=False),
            # 2. One optimizer step on the assistant's tokens.
            Stage(cls.update, role=ROLE, reads=MODEL_INPUT, pure=False),
            # 3. Outputs.
            Stage(cls.validate, "testing", ROLE),
            Stage(cls.log, pure=False),
            Stage(cls.save_checkpoint, pure=False),
        ]

    def next_batch(self, ctx: BatchContext) -> None:
        """Load the next conversations of the epoch."""
        ctx.started_at = time.perf_counter()
        self.global_steps += 1
        ctx.metrics |= {"training/global_step": self.global_steps, "training/epoch": self.train_loader.epoch}
        ctx.batch = self.train_loader.next_batch()
        ctx.prompt_rows = self.train_loader.rows
        ctx.batch.meta_info[UpdatePlan.KEY] = UpdatePlan(balance=self.config.trainer.balance_batch)

    def update(self, ctx: BatchContext) -> None:
        """Take one optimizer step on the assistant's tokens."""
        updates = self.groups[ROLE].update(ctx.batch).meta_info["metrics"]
        metrics = self.update_metrics(updates, role=ROLE, prefix="train")
        ctx.metrics |= {"train/loss" if name == "loss" else name: value for name, value in metrics.items()}

    def validate(self, ctx: BatchContext) -> None:
        """Compute the validation loss every `trainer.test_freq` steps and after the last one."""
        if self.val_dataset is not None and self.is_due(self.config.trainer.test_freq):
            ctx.metrics["val/loss"] = self._validation_loss(self.val_dataset)

    def _validation_loss(self, dataset: SFTDataset) -> float:
        data = self.config.data
        loader = PromptLoader(dataset, batch_size=data.train_batch_size, shuffle=False, seed=0, collate=dataset.collate)
        sums = [self.groups[ROLE].compute_loss(loader.next_batch())[0] for _ in range(loader.steps_per_epoch)]
        return math.fsum(total for total, _ in sums) / math.fsum(count for _, count in sums)

    def log(self, ctx: BatchContext) -> None:
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

    # ---- workers and checkpoints, see `Trainer`

    engine_directories: Mapping[str, str] = {ROLE: "model"}

    def init_workers(self) -> None:
        """Reserve devices, start the worker processes and load the model. A failure stops all of them."""
        pool = next(iter(self.resource_pool_manager.resource_pool_spec))
        self.launch_workers({ROLE: RayClassWithInitArgs(self.worker_cls, self.config, ROLE)}, {ROLE: pool})

    def init_role(self, role: str) -> None:
        """Load the model."""
        self.groups[role].init_model(self.total_training_steps)

    def save_engines(self, directory: str) -> dict[str, Any]:
        """Write the engine and an export; return role -> optimizer steps in the weights, one per rank."""
        num_updates = super().save_engines(directory)
        self.groups[ROLE].export_hf(os.path.join(directory, EXPORT))
        if self.config.model.uses_lora:
            self.groups[ROLE].export_adapter(os.path.join(directory, ADAPTER))
        return num_updates
