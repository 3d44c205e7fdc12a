"""`SupervisedTrainer`: the driver of a job that trains one model on rows that are there from the start.

It starts the one role, draws batches, logs, and exports with every checkpoint `huggingface/`, the model in the format
that `main_ppo` and other programs read. `SFTTrainer`, `DPOTrainer` and `RMTrainer` say what a step is. Resume, rollback
and commit are in `trainer/loop.py`.
"""

import os
import time
from collections.abc import Mapping
from typing import Any, Protocol

from hybridrl.config import SupervisedConfig
from hybridrl.config.engines import supervised_engine_settings
from hybridrl.data_plane.meta_info import UpdatePlan
from hybridrl.driver.run_context import RunContext
from hybridrl.errors import ConfigError
from hybridrl.protocol import DataProto
from hybridrl.single_controller.worker_group import RayClassWithInitArgs
from hybridrl.trainer.data.prompt_loader import PromptLoader
from hybridrl.trainer.loop import Trainer
from hybridrl.trainer.recovery.policies import ResumeState
from hybridrl.trainer.roles import ResourcePoolManager
from hybridrl.trainer.run.middleware import BatchContext
from hybridrl.trainer.utilization import ModelUse, SequenceRows
from hybridrl.workers.engine.utilization.model_flops import ADAPTER_UPDATE, UPDATE, ModelFlops
from hybridrl.workers.images import load_processor

EXPORT = "huggingface"
ADAPTER = "lora_adapter"  # beside it, with LoRA: the adapters alone, in the format of peft
MODEL_INPUT = ("input_ids", "attention_mask", "position_ids", "responses", "response_mask")


class SupervisedDataset(Protocol):
    """Tokenized rows, and how they become a batch."""

    def __len__(self) -> int: ...

    def __getitem__(self, position: int) -> dict: ...

    def collate(self, rows: list[dict]) -> DataProto: ...


class SupervisedTrainer(Trainer):
    """The driver of a job with one trained model.

    Args:
        config: Settings of the job.
        tokenizer: The model's tokenizer.
        worker_cls: Class of the worker processes, for instance `SFTWorker`.
        resource_pool_manager: Has one pool, for all workers.
        ray_worker_group_cls: `RayWorkerGroup`, the default, or `LocalWorkerGroup` for one process without Ray.
        context: The run's state in this process. Default: one of its own.

    Attributes:
        role: Name of the one role; subclasses set it.
        processor: Of a model that reads images, else None.
        outputs: Width of the model's head; None: the vocabulary's.
    """

    role = ""
    outputs: int | None = None

    def __init__(
        self,
        config: SupervisedConfig,
        tokenizer: Any,
        worker_cls: type,
        resource_pool_manager: ResourcePoolManager,
        ray_worker_group_cls: type | None = None,
        *,
        context: RunContext | None = None,
    ):
        context = context or RunContext()
        data, trainer = config.data, config.trainer
        freezes = "freeze_vision_tower" if config.freeze_vision_tower else None
        self.processor = load_processor(config.model, tokenizer, data, freezes=freezes)
        if self.processor is not None and not supervised_engine_settings(config).supports_images:
            raise ConfigError(
                f"strategy={config.strategy}: the engine computes no images, and {config.model.path} reads them; set "
                "fsdp, or take a model of text"
            )
        train = self.load_dataset(config, data.train_files, tokenizer, max_samples=data.train_max_samples)
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
        self.val_dataset = None
        if data.val_files:
            self.val_dataset = self.load_dataset(config, data.val_files, tokenizer, max_samples=data.val_max_samples)

    def load_dataset(
        self, config: Any, files: list[str], tokenizer: Any, *, max_samples: int = -1
    ) -> SupervisedDataset:
        """Return the tokenized rows of `files`, or the first of them."""
        raise NotImplementedError

    # ---- stages that every step has

    def next_batch(self, ctx: BatchContext) -> None:
        """Load the next rows of the epoch."""
        ctx.started_at = time.perf_counter()
        self.global_steps += 1
        ctx.metrics |= {"training/global_step": self.global_steps, "training/epoch": self.train_loader.epoch}
        ctx.batch = self.train_loader.next_batch()
        ctx.prompt_rows = self.train_loader.rows
        ctx.batch.meta_info[UpdatePlan.KEY] = UpdatePlan(balance=self.config.trainer.balance_batch)

    def update(self, ctx: BatchContext) -> None:
        """Take one optimizer step on the batch."""
        updates = self.groups[self.role].update(ctx.batch).meta_info["metrics"]
        metrics = self.update_metrics(updates, role=self.role, prefix="train")
        ctx.metrics |= {"train/loss" if name == "loss" else name: value for name, value in metrics.items()}

    def validate(self, ctx: BatchContext) -> None:
        """Validate every `trainer.test_freq` steps and after the last one."""
        if self.val_dataset is not None and self.is_due(self.config.trainer.test_freq):
            size, collate = self.config.data.train_batch_size, self.val_dataset.collate
            loader = PromptLoader(self.val_dataset, batch_size=size, shuffle=False, seed=0, collate=collate)
            ctx.metrics |= {f"val/{name}": value for name, value in self.validation_metrics(loader).items()}

    def validation_metrics(self, loader: PromptLoader) -> dict[str, float]:
        """Return metrics over one epoch of the loader, `loss` among them."""
        raise NotImplementedError

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
        rows = SequenceRows.of(ctx.batch.batch)
        ctx.metrics |= self.utilization.metrics(ctx.timing, dict.fromkeys(ctx.timing, rows))
        ctx.metrics |= self.saver.metrics() | self.ledger.metrics()
        self.tracking.log(ctx.metrics, self.global_steps)

    # ---- workers and checkpoints, see `Trainer`

    def model_uses(self) -> Mapping[str, ModelUse]:
        """Return what the update computes, and the log-probs of a reference before it."""
        config, model = self.config, self.config.model
        dtype = supervised_engine_settings(config).dtype
        flops = ModelFlops.read(
            model.path,
            override_config=model.override_config,
            trust_remote_code=model.trust_remote_code,
            outputs=self.outputs,
        )
        update = ADAPTER_UPDATE if model.uses_lora else UPDATE
        return {"reference": ModelUse(self.role, flops, dtype), "update": ModelUse(self.role, flops, dtype, update)}

    def init_workers(self) -> None:
        """Reserve devices, start the worker processes and load the model. A failure stops all of them."""
        pool = next(iter(self.resource_pool_manager.resource_pool_spec))
        self.launch_workers(
            {self.role: RayClassWithInitArgs(self.worker_cls, self.config, self.role)}, {self.role: pool}
        )

    def init_role(self, role: str) -> None:
        """Load the model."""
        self.groups[role].init_model(self.total_training_steps)

    def engine_directory(self, path: str, role: str) -> str:
        """Return the directory of the one model, whatever it learns."""
        return os.path.join(path, "model")

    def save_engines(self, directory: str) -> dict[str, Any]:
        """Write the engine and an export; return role -> optimizer steps in the weights, one per rank."""
        num_updates = super().save_engines(directory)
        self.groups[self.role].export_hf(os.path.join(directory, EXPORT))
        if self.config.model.uses_lora:
            self.groups[self.role].export_adapter(os.path.join(directory, ADAPTER))
        return num_updates
