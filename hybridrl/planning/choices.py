"""Settings of a job that fit into its devices, and other layouts of the same devices."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from hybridrl import main_ppo
from hybridrl.config.engines import SECTIONS
from hybridrl.config.introspection import with_value
from hybridrl.config.schema.ppo import PPOConfig
from hybridrl.errors import ConfigError
from hybridrl.planning.processes import Moment, PlannedProcess, ReadShape, plan_processes, snapshot_bytes
from hybridrl.workers.engine.memory_plan import EngineSizes, choose
from hybridrl.workers.engine.model_shape import ModelShape

TENSOR_SIZES = (1, 2, 4, 8)
FSDP = ("fsdp", "fsdp2")
PIPELINE_SIZES = (1, 2, 4)
SNAPSHOTS = 2  # that are stored at a time: the last complete one, and the next
MAX_TOKENS = {"cuda": 65536, "cpu": 4096}  # of a micro-batch; larger ones are not faster
ROLLOUT = "actor_rollout_ref.rollout"
ACTOR = "actor_rollout_ref.actor"
OFFLOADS = ("param_offload", "optimizer_offload")
Changes = Mapping[str, Any]


@dataclass(frozen=True)
class Candidate:
    """Settings for the same devices.

    Attributes:
        layout: What is placed where, in words.
        changes: Settings to change, by their dotted names.
        processes: What the processes then hold.
        problem: Why they do not fit; "" if they do.
    """

    layout: str
    changes: Changes
    processes: list[PlannedProcess]
    problem: str

    @property
    def peak(self) -> Moment:
        """Return the largest moment of all processes."""
        return max((process.peak for process in self.processes), key=lambda moment: moment.total)

    @property
    def tokens(self) -> int:
        """Return the tokens of the actor's largest micro-batch."""
        actors = (process.models["actor"] for process in self.processes if "actor" in process.models)
        return max((actor.sizes.tokens for actor in actors), default=0)


class Devices:
    """The devices of a job, for which its processes are planned.

    Args:
        read_shape: Returns the shape of a model by its path.
        device: "cuda" or "cpu".
        memory: Bytes of one device.
        budget: Those that may be used. A CPU's are those of a machine: its processes and snapshots share them.
    """

    def __init__(self, *, read_shape: ReadShape, device: str, memory: float, budget: float):
        self.read_shape = read_shape
        self._budget, self.device = budget, device
        self.plan = partial(plan_processes, read_shape=read_shape, device=device, memory=memory)

    def budget(self, config: PPOConfig, processes: list[PlannedProcess]) -> float:
        """Return the bytes that each process of a job may use."""
        if self.device != "cpu":
            return self._budget
        stored = SNAPSHOTS * snapshot_bytes(config, processes)
        return (self._budget - stored) * config.trainer.nnodes / sum(process.count for process in processes)

    def problem(self, config: PPOConfig, processes: list[PlannedProcess]) -> str:
        """Return why a job does not fit, "" if it does."""
        budget = self.budget(config, processes)
        length = config.data.max_prompt_length + config.data.max_response_length
        for process in processes:
            cached = length if process.rollout is None else process.rollout.cache_tokens
            if cached < length:
                return f"the cache of {process.pool} holds {cached:,.0f} tokens, a row has {length:,}"
            if process.peak.total > budget:
                return f"{process.pool} needs {process.peak.total / 2**30:,.1f} GiB in {process.peak.name}"
        return ""


def fitting_settings(config: PPOConfig, devices: Devices) -> tuple[dict[str, Any], list[PlannedProcess]]:
    """Return settings that make a layout fit, and its processes with them; the least slow ones, if any fit.

    Chooses token budgets, recomputation, offload and the chunk of logits of every trained model. What does not train
    is offloaded only if it does not fit otherwise.
    """
    found: dict[str, Any] = {}
    processes = devices.plan(config)
    for is_offloaded in (False, True) if devices.device == "cuda" else (False,):
        changes = _resting_offload(config, processes) if is_offloaded else {}
        changed = with_settings(config, changes)
        planned = devices.plan(changed)
        budget = devices.budget(changed, planned)
        for process in planned:
            for role in [role for role, memory in process.models.items() if memory.sizes.trains]:
                changes |= _engine_changes(with_settings(changed, changes), process, role, devices, budget)
        found, processes = changes, devices.plan(with_settings(config, changes))
        if not devices.problem(config, processes):
            break
    return found, processes


def candidates(config: PPOConfig, devices: Devices) -> Iterator[Candidate]:
    """Yield layouts of the job's devices with the settings that fit them best, the given one first.

    A layout that the checks of the settings refuse is left out.
    """
    length = config.data.max_prompt_length + config.data.max_response_length
    caches = [process.rollout.cache_tokens for process in devices.plan(config) if process.rollout is not None]
    shape = devices.read_shape(str(config.actor_rollout_ref.model.path))
    for layout, changes in _layouts(config, shape, shards_rollout=min(caches, default=length) < length):
        changed = with_settings(config, changes)
        if not _is_accepted(changed):
            continue
        more, processes = fitting_settings(changed, devices)
        yield Candidate(layout, {**changes, **more}, processes, devices.problem(config, processes))


def _is_accepted(config: PPOConfig) -> bool:
    try:
        main_ppo.validate_config(config, with_inputs=False)
    except ConfigError:
        return False
    return True


def with_settings(config: Any, changes: Changes) -> Any:
    """Return settings with other values, by dotted names."""
    for name, value in changes.items():
        config = with_value(config, name, value)
    return config


def _engine_changes(
    config: PPOConfig, process: PlannedProcess, role: str, devices: Devices, budget: float
) -> dict[str, Any]:
    """Return the settings that fit a trained model beside everything else in its process."""
    memory = process.models[role]
    others = sum(other.by_phase()["rest"].total for name, other in process.models.items() if name != role)
    resting = 0.0 if process.rollout is None else process.rollout.resting
    generating = 0.0 if process.rollout is None else process.rollout.total
    length = config.data.max_prompt_length + config.data.max_response_length
    shared = memory.sizes.context if memory.sizes.strategy == "fsdp" else 1
    rows = -(-config.data.train_batch_size * config.actor_rollout_ref.rollout.n * shared // process.count)
    chosen = choose(
        memory.shape,
        memory.sizes,
        budget=budget - others - resting - process.program,
        min_tokens=length,
        max_tokens=max(length, min(MAX_TOKENS[devices.device] * shared, rows * length)),
        beside=generating - resting,
    ).sizes
    return _actor_settings(config, chosen) if role == "actor" else _critic_settings(chosen)


def _actor_settings(config: PPOConfig, sizes: EngineSizes) -> dict[str, Any]:
    section = f"{ACTOR}.{SECTIONS[config.actor_rollout_ref.actor.strategy]}"
    return {
        f"{ACTOR}.use_dynamic_bsz": True,
        f"{ACTOR}.ppo_max_token_len_per_gpu": _of_one_process(sizes),
        f"{ACTOR}.entropy_from_logits_chunk_size": sizes.chunk,
        "actor_rollout_ref.model.enable_gradient_checkpointing": sizes.gradient_checkpointing,
        **{f"{section}.{name}": getattr(sizes, name) for name in OFFLOADS},
    }


def _critic_settings(sizes: EngineSizes) -> dict[str, Any]:
    return {
        "critic.use_dynamic_bsz": True,
        "critic.ppo_max_token_len_per_gpu": _of_one_process(sizes),
        "critic.model.enable_gradient_checkpointing": sizes.gradient_checkpointing,
        **{f"critic.fsdp_config.{name}": getattr(sizes, name) for name in OFFLOADS},
    }


def _of_one_process(sizes: EngineSizes) -> int:
    """Return the token budget of one of the processes that share a micro-batch with FSDP."""
    return -(-sizes.tokens // sizes.context) if sizes.strategy == "fsdp" else sizes.tokens


def _resting_offload(config: PPOConfig, processes: list[PlannedProcess]) -> dict[str, Any]:
    """Return the settings that offload all models between their calls."""
    roles = {role for process in processes for role in process.models}
    actor = config.actor_rollout_ref.actor
    changes: dict[str, Any] = {}
    if not (actor.strategy == "megatron" and actor.megatron.use_distributed_optimizer):
        changes = {f"{ACTOR}.{SECTIONS[actor.strategy]}.{name}": True for name in OFFLOADS}
        if "critic" in roles:
            changes |= {f"critic.fsdp_config.{name}": True for name in OFFLOADS}
    if "ref" in roles:
        changes["actor_rollout_ref.ref.fsdp_config.param_offload"] = True
    return changes


def _layouts(config: PPOConfig, shape: ModelShape, *, shards_rollout: bool) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield layouts that the model can be cut into, in words."""
    trainer, rollout = config.trainer, config.actor_rollout_ref.rollout
    yield "as given", {}
    own, count = trainer.n_gpus_per_node, trainer.n_gpus_per_node * trainer.nnodes
    if not rollout.n_gpus_per_node and own > 1:
        half = own // 2
        yield (
            "rollout on half of the devices",
            {
                "trainer.n_gpus_per_node": own - half,
                f"{ROLLOUT}.n_gpus_per_node": half,
                f"{ROLLOUT}.nnodes": trainer.nnodes,
            },
        )
    for size in TENSOR_SIZES[1:]:
        if shards_rollout and rollout.name == "vllm" and not own % size and not shape.heads % size:
            yield f"rollout TP {size}", {f"{ROLLOUT}.tensor_model_parallel_size": size}
    for size in TENSOR_SIZES[1:]:
        if not (own % size or shape.heads % size or config.actor_rollout_ref.actor.strategy not in FSDP):
            yield f"sequence parallelism {size}", {f"{ACTOR}.fsdp_config.ulysses_sequence_parallel_size": size}
    for tensor in TENSOR_SIZES:
        for pipeline in PIPELINE_SIZES:
            divides = not (shape.heads % tensor or shape.kv_heads % tensor or shape.layers % pipeline)
            expert = math.gcd(shape.experts, own, count // pipeline)  # 1 of a model without experts
            if tensor * pipeline * expert == 1 or own % tensor or count % (tensor * pipeline) or not divides:
                continue
            yield (
                f"Megatron TP {tensor} PP {pipeline}" + (f" EP {expert}" if expert > 1 else ""),
                {
                    f"{ACTOR}.strategy": "megatron",
                    "critic.strategy": "megatron",
                    f"{ACTOR}.megatron.tensor_model_parallel_size": tensor,
                    f"{ACTOR}.megatron.pipeline_model_parallel_size": pipeline,
                    f"{ACTOR}.megatron.sequence_parallel": tensor > 1,
                    **({f"{ACTOR}.megatron.expert_model_parallel_size": expert} if expert > 1 else {}),
                },
            )
