"""`EngineWorker` and `TrainingWorker`: common parts of the workers with a training engine.

They create the engine, move it to and from its device, run updates, and save and load checkpoints and snapshots. They
run in a worker process. Subclasses define the other methods that the trainer calls.
"""

import contextlib
import math
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

from hybridrl import workers
from hybridrl.config import checks
from hybridrl.config.plugs import ENGINES, load_plugins
from hybridrl.config.schema.engine import EngineSettings
from hybridrl.config.schema.ppo import PPOConfig
from hybridrl.config.schema.workers import ModelConfig
from hybridrl.protocol import DataProto
from hybridrl.single_controller.dispatch import Dispatch, register
from hybridrl.single_controller.worker import Worker
from hybridrl.workers.engine import base
from hybridrl.workers.engine.checkpoint_files import raise_on_all_ranks
from hybridrl.workers.engine.hf_model import overrides_for
from hybridrl.workers.engine.utilization.matmul_peak import matmul_peak
from hybridrl.workers.losses import REJECTED, GlobalCounts
from hybridrl.workers.mini_batch import ENGINE_MESH, split_mini_batches
from hybridrl.workers.process_setup import init_worker_process, sum_dicts_over_ranks, sum_over_ranks

MIN_TOKENS = 0.5  # of a mini-batch that is trained; the share of rejected tokens is a float32


def make_engine(strategy: str, setup: base.EngineSetup) -> base.Engine:
    """Return a new engine by its name or import path. The caller sets it up."""
    return ENGINES.lookup(strategy)(setup)


def engine_setup(
    config: PPOConfig, *, kind: str, path: str | None, settings: EngineSettings, device: str, **more: Any
) -> base.EngineSetup:
    """Return the setup of a model of a PPO job; `more` has what a trained one needs besides."""
    policy = config.actor_rollout_ref.model
    return base.EngineSetup(
        kind=kind,
        path=required_path(path),
        settings=settings,
        device=device,
        trust_remote_code=policy.trust_remote_code,
        override_config=overrides_for(required_path(path), policy.path, policy.override_config),
        temperature=config.actor_rollout_ref.rollout.temperature,
        seed=config.trainer.seed,
        whole_logits=not policy.use_fused_kernels,
        logits_chunk=config.actor_rollout_ref.actor.entropy_from_logits_chunk_size,
        **more,
    )


def required_path(path: str | None) -> str:
    """Return the path of a model, which the checks of the settings require."""
    assert path is not None, "a worker starts only with checked settings, and they name its model"
    return path


def lora_of(model: ModelConfig) -> base.LoRA | None:
    """Return the LoRA settings of a model, those of a saved adapter if it continues from one.

    None without LoRA.

    Raises:
        ConfigError: The saved adapter cannot be read.
    """
    if model.lora_adapter_path is not None:
        saved = checks.read_saved_adapter(model.lora_adapter_path)
        return base.LoRA(saved.rank, saved.alpha, path=model.lora_adapter_path)
    return base.LoRA(model.lora_rank, model.lora_alpha, tuple(model.target_modules)) if model.lora_rank else None


def micro_batching(use_dynamic_bsz: bool, max_tokens: int, max_rows: int | None) -> base.MicroBatching:
    """Return the micro-batching of a call, by rows or by tokens.

    By rows if `max_rows` is set and dynamic batches are off. There is no unlimited micro-batch: 256 sequences of 512
    tokens have 40 GB of logits over 150 000 words. Results do not depend on the cut.
    """
    by_tokens = use_dynamic_bsz or max_rows is None
    return base.MicroBatching(max_tokens=max_tokens) if by_tokens else base.MicroBatching(max_rows=max_rows)


def computed_by(engine: base.Engine) -> dict[str, dict[str, float]]:
    """Return `meta_info["metrics"]` with what an engine that shares prefixes has computed since the last call."""
    taken = engine.take_computed() if hasattr(engine, "take_computed") else {}
    return {"metrics": taken} if taken else {}


@contextlib.contextmanager
def on_device(
    engine: base.Engine, device: str, *, params: bool = False, optimizer: bool = False
) -> Iterator[base.Engine]:
    """Keep the offloaded parts of an engine on its device during a block."""
    if params or optimizer:
        engine.to(device, params=params, optimizer=optimizer)
    try:
        yield engine
    finally:
        if params or optimizer:
            engine.to("cpu", params=params, optimizer=optimizer)


class EngineWorker(Worker):
    """A worker with one training engine, or several with the same layout."""

    config: Any
    device: str

    def _start_process(self, *, single_process: bool = False) -> None:
        """Load the job's plug-ins, and set this process up as `trainer` says."""
        load_plugins(self.config)
        self.device = init_worker_process(
            device=self.config.trainer.device,
            num_threads=self.config.trainer.num_threads,
            single_process=single_process,
            call_timeout_s=self.config.trainer.call_timeout_s,
        )

    def _set_up(self, engine: base.Engine) -> base.Engine:
        """Set the engine up and register this worker's position on the engine mesh.

        Ranks with the same data-parallel rank get the same rows, and one of them returns the output.
        """
        engine.setup()
        self._register_dispatch_collect_info(
            ENGINE_MESH, engine.mesh_position.dp_rank, engine.mesh_position.is_output_rank
        )
        return engine

    @register(Dispatch.ONE_TO_ALL)
    def matmul_peak(self, dtype: str) -> float:
        """Return the FLOPs per second of large matrix products on this worker's device, see `matmul_peak`.

        The driver calls it after `init_model`, on all ranks at the same time, because they may share cores.

        Args:
            dtype: Setting of an engine or of the rollout: "auto", "float32", "bfloat16" or "float16".
        """
        return matmul_peak(self.device, base.resolve_dtype(dtype, self.device))

    def _update(
        self,
        engine: base.Engine,
        data: DataProto,
        micro: base.MicroBatching,
        *,
        make_loss: Callable[[GlobalCounts], base.LossFn],
        outputs: tuple[str, ...],
        epochs: int,
        prefix: str,
    ) -> dict[str, list[float]]:
        """Take one optimizer step per mini-batch and epoch.

        All ranks skip a step if the loss on any rank, or the gradient, is not finite. `{prefix}/skipped` is 1 then, and
        `{prefix}/nonfinite_loss` is 1 if it was the loss. A mini-batch without a token to train on takes no step
        either, and `{prefix}/empty` is 1. `{prefix}/num_updates` counts the steps of the whole run that
        were not skipped.

        Returns:
            Metrics with one value per optimizer step, equal on every rank.
        """
        mini_batches = list(split_mini_batches(data))
        counts = self._global_counts(mini_batches, counted=engine.mesh_position.is_output_rank)
        loss_stats: list[dict[str, float]] = []  # this rank's terms of sums over ranks
        step_stats: list[dict[str, float]] = []
        for _ in range(epochs):
            for mini_batch, count in zip(mini_batches, counts, strict=True):
                loss_stats.append(
                    _summed(engine.forward_backward(mini_batch, micro, make_loss(count), outputs=outputs))
                )
                own = [float(has_nonfinite_loss(loss_stats[-1])), loss_stats[-1].get(REJECTED, 0.0)]
                num_nonfinite, rejected = sum_over_ranks(own, device=self.device)
                is_empty = count.num_tokens * (1 - rejected) < MIN_TOKENS
                stats = engine.optimizer_step(skip=num_nonfinite > 0 or is_empty)
                if is_empty:  # not a fault: `trainer.nonfinite` judges skipped steps
                    stats |= {"skipped": 0.0}
                stats["empty"] = float(is_empty)
                stats |= {"nonfinite_loss": float(num_nonfinite > 0), "num_updates": float(engine.num_updates)}
                step_stats.append({f"{prefix}/{name}": value for name, value in stats.items()})
        totals = [_with_shared_ratio(total, prefix) for total in sum_dicts_over_ranks(loss_stats)]
        return {
            name: [row[name] for row in rows if name in row] for rows in (totals, step_stats) for name in _names(rows)
        }

    def _global_counts(self, mini_batches: list[DataProto], *, counted: bool) -> list[GlobalCounts]:
        """Return the counts of each mini-batch. `counted`: False on ranks whose rows another rank counts."""
        local = [n * counted for rows in mini_batches for n in GlobalCounts.local(rows.batch["response_mask"])]
        total = sum_over_ranks(local, device=self.device)
        return [GlobalCounts(tokens, seqs) for tokens, seqs in zip(total[::2], total[1::2], strict=True)]


class TrainingWorker(EngineWorker):
    """A worker with one engine that is trained: its checkpoints and snapshots."""

    @property
    def trained_engine(self) -> base.Engine:
        """Return the engine whose state checkpoints and snapshots have."""
        raise NotImplementedError

    @property
    def _engine_settings(self) -> EngineSettings:
        """Return the settings of that engine."""
        raise NotImplementedError

    def _trained(self, *, optimizer: bool = False) -> AbstractContextManager[base.Engine]:
        """Return a block in which the trained engine, and its optimizer if asked for, is on its device."""
        settings = self._engine_settings
        with_optimizer = optimizer and settings.optimizer_offload
        return on_device(self.trained_engine, self.device, params=settings.param_offload, optimizer=with_optimizer)

    @register(Dispatch.ONE_TO_ALL)
    def save_checkpoint(self, directory: str) -> int:
        """Write the engine's state of every rank under `directory`. A failure is raised on every rank.

        Covers model, optimizer, schedule and random generators. The caller commits the directory by a rename.

        Returns:
            Optimizer steps taken so far.
        """
        problem = None
        try:
            os.makedirs(directory, exist_ok=True)
        except OSError as error:
            problem = error
        raise_on_all_ranks(problem, directory)
        with self._trained(optimizer=True) as engine:
            engine.save(directory)
        return engine.num_updates

    @register(Dispatch.ONE_TO_ALL)
    def load_checkpoint(self, directory: str) -> int:
        """Load the state that `save_checkpoint` wrote, also with another world size.

        Returns:
            Optimizer steps taken so far.
        """
        with self._trained(optimizer=True) as engine:
            engine.load(directory)
        return engine.num_updates

    @register(Dispatch.ONE_TO_ALL)
    def take_snapshot(self) -> Mapping[str, Any]:
        """Return this rank's share of the engine's state.

        Ray stores it before the process's next call. In one process it is no copy: later updates change it.
        """
        return workers.take_engine_state(self.trained_engine, is_copy=False)

    @register(Dispatch.ALL_TO_ALL)
    def load_snapshot(self, snapshot: Mapping[str, Any]) -> None:
        """Load what this rank's `take_snapshot` returned, in this process or an earlier one.

        The caller passes a list with the snapshots of all ranks.
        """
        workers.load_engine_state(self.trained_engine, snapshot)


def has_nonfinite_loss(stats: dict[str, float]) -> bool:
    """Return whether a loss among a rank's statistics of one mini-batch is not finite."""
    return not all(math.isfinite(value) for name, value in stats.items() if name.endswith("loss"))


def _with_shared_ratio(total: dict[str, float], prefix: str) -> dict[str, float]:
    """Replace token counts by the share that the engine did not compute, and routing counts by routing metrics.

    Engines that share prefixes count tokens; those that replay routes count these.
    """
    if base.ROUTED_TOKENS in total:
        total = workers.routing_metrics(total, prefix)
    if base.ROW_TOKENS not in total:
        return total
    ratio = 1 - total[base.COMPUTED_TOKENS] / total[base.ROW_TOKENS]
    return {name: value for name, value in total.items() if name not in (base.ROW_TOKENS, base.COMPUTED_TOKENS)} | {
        f"{prefix}/shared_prefix_ratio": ratio
    }


def _names(rows: list[dict[str, float]]) -> list[str]:
    return sorted(set().union(*rows))


def _summed(stats: list[dict[str, float]]) -> dict[str, float]:
    total: dict[str, float] = {}
    for row in stats:
        for name, value in row.items():
            total[name] = total.get(name, 0.0) + float(value)
    return total
