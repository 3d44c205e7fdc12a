"""What workers with a training engine share: building the engine, moving it to and from its device, updates, durable
state.
"""

import contextlib
import math
import os
from collections.abc import Callable, Iterator

from hybridrl.config.import_path import load_object
from hybridrl.config.schema.ppo import PPOConfig
from hybridrl.config.schema.workers import CriticFSDPConfig, MegatronConfig, ModelConfig, OptimConfig
from hybridrl.errors import ConfigError
from hybridrl.protocol import DataProto
from hybridrl.single_controller.worker import Worker
from hybridrl.workers.engine.base import Engine, EngineConfig, LossFn, MicroBatching
from hybridrl.workers.engine.collective_errors import raise_together
from hybridrl.workers.engine.lora import LoRA
from hybridrl.workers.losses import GlobalCounts
from hybridrl.workers.mini_batch import ENGINE_MESH, mini_batches
from hybridrl.workers.process_setup import sum_dicts_over_ranks, sum_over_ranks

FSDP = ("hybridrl.workers.engine.fsdp.engine", "FSDPEngine")
ENGINES = {"fsdp": FSDP, "fsdp2": FSDP, "megatron": ("hybridrl.workers.engine.megatron.engine", "MegatronEngine")}
"""By name, where the class is: an engine is imported, with the library it stands on, when it is chosen."""


def make_engine(strategy: str, config: EngineConfig) -> Engine:
    """Return an engine by its name; it is not set up yet."""
    if strategy not in ENGINES:
        raise ConfigError(f"strategy={strategy!r} is not an engine of this release; there are {', '.join(ENGINES)}")
    return load_object(*ENGINES[strategy])(config)


def engine_config(
    config: PPOConfig,
    *,
    kind: str,
    path: str,
    device: str,
    packed: bool,
    gradient_checkpointing: bool = False,
    param_offload: bool = False,
    optimizer_offload: bool = False,
    optim: OptimConfig | None = None,
    total_steps: int = 0,
    grad_clip: float = 1.0,
    lora: LoRA | None = None,
) -> EngineConfig:
    """Return the engine's settings for one model of a PPO job; what is not named here is as the actor's."""
    actor, policy = config.actor_rollout_ref.actor, config.actor_rollout_ref.model
    return EngineConfig(
        kind=kind,
        path=path,
        trust_remote_code=policy.trust_remote_code,
        override_config=dict(policy.override_config) if path == policy.path else {},
        device=device,
        dtype=actor.megatron.dtype if actor.strategy == "megatron" else actor.fsdp_config.dtype,
        reshard_after_forward=actor.fsdp_config.reshard_after_forward,
        param_offload=param_offload,
        optimizer_offload=optimizer_offload,
        gradient_checkpointing=gradient_checkpointing,
        packed=packed,
        temperature=config.actor_rollout_ref.rollout.temperature,
        optim=optim,
        total_steps=total_steps,
        grad_clip=grad_clip,
        seed=config.trainer.seed,
        megatron=actor.megatron,
        lora=lora,
    )


def adapters_of(model: ModelConfig) -> LoRA | None:
    """Return the adapters that a model's settings ask for."""
    return LoRA(model.lora_rank, model.lora_alpha, tuple(model.target_modules)) if model.lora_rank else None


def micro_batching(use_dynamic_bsz: bool, max_tokens: int, max_rows: int | None) -> MicroBatching:
    """Return how a call's rows become micro-batches: by a number of rows if that is set and dynamic batches are off,
    else by token budget.

    Never all at once: 256 sequences of 512 tokens have 40 GB of logits over 150 000 words, and results do not depend on
    the cut.
    """
    by_tokens = use_dynamic_bsz or max_rows is None
    return MicroBatching(max_tokens=max_tokens) if by_tokens else MicroBatching(max_rows=max_rows)


@contextlib.contextmanager
def on_device(engine: Engine, device: str, *, params: bool = False, optimizer: bool = False) -> Iterator[Engine]:
    """Hold an offloaded engine on its device for the length of a block; what is not offloaded is there already."""
    if params or optimizer:
        engine.to(device, params=params, optimizer=optimizer)
    try:
        yield engine
    finally:
        if params or optimizer:
            engine.to("cpu", params=params, optimizer=optimizer)


class EngineWorker(Worker):
    """A worker around one training engine, or several alike. Subclasses set `self.device` and say what is computed."""

    device: str

    def _set_up(self, engine: Engine) -> Engine:
        """Set the engine up, and announce where this worker stands: peers get the same rows, and one of them is asked
        for its answer.
        """
        engine.setup()
        self._register_dispatch_collect_info(ENGINE_MESH, engine.place.dp_rank, engine.place.answers)
        return engine

    def _update(
        self,
        engine: Engine,
        data: DataProto,
        micro: MicroBatching,
        *,
        make_loss: Callable[[GlobalCounts], LossFn],
        outputs: tuple[str, ...],
        epochs: int,
        prefix: str,
    ) -> dict[str, list[float]]:
        """Take one optimizer step per mini-batch and epoch. Returns metrics, one value per optimizer step, equal on
        every rank.

        A step whose loss, on any rank, or whose gradient is not finite is left out on all ranks: `{prefix}/skipped` is
        1, and `{prefix}/nonfinite_loss` tells whether it was the loss. `{prefix}/num_updates` counts what was not left
        out, in the whole run.
        """
        minis = list(mini_batches(data))
        counts = self._global_counts(minis, counted=engine.place.answers)
        shares: list[dict[str, float]] = []
        steps: list[dict[str, float]] = []
        for _ in range(epochs):
            for mini, count in zip(minis, counts, strict=True):
                shares.append(_summed(engine.forward_backward(mini, micro, make_loss(count), outputs=outputs)))
                [bad] = sum_over_ranks([float(has_bad_loss(shares[-1]))], device=self.device)
                said = engine.optimizer_step(skip=bad > 0) | {
                    "nonfinite_loss": float(bad > 0),
                    "num_updates": float(engine.num_updates),
                }
                steps.append({f"{prefix}/{name}": value for name, value in said.items()})
        totals = sum_dicts_over_ranks(shares)
        return {name: [row[name] for row in rows if name in row] for rows in (totals, steps) for name in _names(rows)}

    def _global_counts(self, minis: list[DataProto], *, counted: bool) -> list[GlobalCounts]:
        """counted: this rank's rows; those of peers are the same ones."""
        local = [n * counted for mini in minis for n in GlobalCounts.local(mini.batch["response_mask"])]
        total = [max(1.0, n) for n in sum_over_ranks(local, device=self.device)]
        return [GlobalCounts(tokens, seqs) for tokens, seqs in zip(total[::2], total[1::2], strict=True)]

    def _save(self, engine: Engine, directory: str, offload: CriticFSDPConfig | MegatronConfig) -> int:
        """Write the engine's durable state; return how many optimizer steps it has seen.

        A failure is one on every rank.
        """
        problem = None
        try:
            os.makedirs(directory, exist_ok=True)
        except OSError as error:
            problem = error
        raise_together(problem, directory)
        with on_device(engine, self.device, params=offload.param_offload, optimizer=offload.optimizer_offload):
            engine.save(directory)
        return engine.num_updates

    def _load(self, engine: Engine, directory: str, offload: CriticFSDPConfig | MegatronConfig) -> int:
        """Read what `_save` wrote; return how many optimizer steps it has seen."""
        with on_device(engine, self.device, params=offload.param_offload, optimizer=offload.optimizer_offload):
            engine.load(directory)
        return engine.num_updates


def has_bad_loss(stats: dict[str, float]) -> bool:
    """Return whether a loss among a rank's figures of one mini-batch is not finite."""
    return not all(math.isfinite(value) for name, value in stats.items() if name.endswith("loss"))


def _names(rows: list[dict[str, float]]) -> list[str]:
    return sorted(set().union(*rows))


def _summed(stats: list[dict[str, float]]) -> dict[str, float]:
    total: dict[str, float] = {}
    for row in stats:
        for name, value in row.items():
            total[name] = total.get(name, 0.0) + float(value)
    return total
