"""Memory of the processes of a PPO job, moment by moment."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from hybridrl import main_ppo
from hybridrl.config.checks.adapters import read_saved_adapter
from hybridrl.config.checks.engines import sequence_parts
from hybridrl.config.engines import (
    SECTIONS,
    critic_engine_settings,
    engine_settings,
    log_prob_batching,
    ref_engine_settings,
    reward_model_engine_settings,
    update_batching,
)
from hybridrl.config.schema.ppo import PPOConfig
from hybridrl.config.schema.workers import FSDPConfig, MegatronConfig
from hybridrl.errors import ConfigError
from hybridrl.trainer.roles import Role
from hybridrl.workers.engine.memory_plan import EngineMemory, EngineSizes, MemoryParts
from hybridrl.workers.engine.model_shape import ModelShape

MIB = 2**20
TILE_BYTES = {"cuda": 256 * MIB, "cpu": 8 * MIB}  # of float32 logits, see algos/token_stats/from_states.py
FLOAT32 = 4
BYTES = {"float32": FLOAT32, "bfloat16": 2, "float16": 2}
KEYS_AND_VALUES = 2
PUSH_BUFFERS = 2
PROGRAM_BYTES = {"cuda": 0, "cpu": 512 * MIB}  # of Python and its libraries: they share memory with the models on a CPU
ReadShape = Callable[[str], ModelShape]


@dataclass(frozen=True)
class RolloutMemory:
    """Bytes of one rollout process.

    Attributes:
        weights: Its share of the model.
        cache: Keys and values.
        resting: What stays between generation phases.
        cache_tokens: Tokens whose keys and values fit into the cache of all processes of one engine.
    """

    weights: float
    cache: float
    resting: float
    cache_tokens: float

    @property
    def total(self) -> float:
        """Return the bytes during generation."""
        return self.weights + self.cache


@dataclass(frozen=True)
class Moment:
    """A moment of a step in one process.

    Attributes:
        name: What the process does: "generate", "push", or a role with a phase of its engine.
        parts: What the models in the process hold, together.
        rollout: Bytes of the generation engine.
        buffers: Bytes of buffers that weights are sent in.
        program: Bytes of the program itself.
    """

    name: str
    parts: MemoryParts
    rollout: float = 0.0
    buffers: float = 0.0
    program: float = 0.0

    @property
    def total(self) -> float:
        """Return the sum of all bytes."""
        return self.parts.total + self.rollout + self.buffers + self.program


@dataclass(frozen=True)
class PlannedProcess:
    """The processes of a pool, which are alike.

    Attributes:
        pool: Its name.
        count: How many processes it has.
        models: Role -> memory of its engine.
        rollout: Memory of the generation engine, if there is one.
        buffers: Bytes of buffers that weights are sent in, during a push.
        program: Bytes of the program itself.
    """

    pool: str
    count: int
    models: Mapping[str, EngineMemory]
    rollout: RolloutMemory | None = None
    buffers: float = 0.0
    program: float = 0.0

    def moments(self) -> list[Moment]:
        """Return the moments of a step that need most."""
        phases = {role: memory.by_phase() for role, memory in self.models.items()}
        rest = {role: found["rest"] for role, found in phases.items()}
        moments = []
        if self.rollout is not None:
            moments.append(Moment("generate", _sum(rest.values()), self.rollout.total))
        resting = 0.0 if self.rollout is None else self.rollout.resting
        for role, found in phases.items():
            others = _sum(parts for other, parts in rest.items() if other != role)
            moments += [
                Moment(f"{role} {phase}", _sum([others, parts]), resting)
                for phase, parts in found.items()
                if phase != "rest"
            ]
        if self.rollout is not None and self.buffers:
            moments.append(Moment("push", _sum(self._while_pushing(rest)), self.rollout.weights, self.buffers))
        return [replace(moment, program=self.program) for moment in moments]

    def _while_pushing(self, rest: Mapping[str, MemoryParts]) -> list[MemoryParts]:
        """Return what the models hold during a push: the actor has its parameters back, and gathers one tensor."""
        pushing = dict(rest)
        if (actor := self.models.get("actor")) is not None:
            one = actor.shape.matrix_params * actor.sizes.element
            pushing["actor"] = replace(rest["actor"], weights=actor.weights, gathered=one)
        return [*pushing.values()]

    @property
    def peak(self) -> Moment:
        """Return the moment that needs most."""
        return max(self.moments(), key=lambda moment: moment.total)


def plan_processes(config: PPOConfig, *, read_shape: ReadShape, device: str, memory: float) -> list[PlannedProcess]:
    """Return the processes of the pools of a job.

    Args:
        config: Settings that `main_ppo.validate_config` accepts.
        read_shape: Returns the shape of a model by its path.
        device: "cuda" or "cpu".
        memory: Bytes of one device.

    Raises:
        ConfigError: An engine is a class of the user's own, or a model's config lacks an entry.
    """
    workers = main_ppo.worker_classes(config)
    manager = main_ppo.resource_pools(config, workers)
    path = config.actor_rollout_ref.model.path
    policy = read_shape(_required(path))
    processes = []
    for pool, nodes in manager.resource_pool_spec.items():
        count = sum(nodes)
        roles = {role for role, name in manager.mapping.items() if name == pool}
        models: dict[str, EngineMemory] = {}
        for role in sorted(roles, key=str):
            models |= _models(config, role, policy, read_shape, device=device, count=count)
        rollout = None
        if roles & {Role.Rollout, Role.ActorRollout, Role.Evaluator}:
            rollout = rollout_memory(
                config, policy, device=device, memory=memory, is_apart=not models, num_processes=count
            )
        bucket = config.actor_rollout_ref.rollout.weight_sync.bucket_mb * MIB
        processes.append(PlannedProcess(pool, count, models, rollout, PUSH_BUFFERS * bucket, PROGRAM_BYTES[device]))
    return processes


def snapshot_bytes(config: PPOConfig, processes: Iterable[PlannedProcess]) -> float:
    """Return the bytes of a step's snapshot on each machine, 0 if there is none."""
    if config.trainer.backend != "ray" or not config.trainer.snapshot_freq:
        return 0.0
    engines = ((process.count, memory) for process in processes for memory in process.models.values())
    found = sum(count * (memory.weights + memory.optimizer) for count, memory in engines if memory.sizes.trains)
    return found / config.trainer.nnodes


def _models(
    config: PPOConfig, role: Role, policy: ModelShape, read_shape: ReadShape, *, device: str, count: int
) -> dict[str, EngineMemory]:
    """Return the models that a role has in a process of a pool with `count` processes, by name."""
    model, critic = config.actor_rollout_ref.model, config.critic
    sizes = _Sizes(config, device, count, vocab=policy.vocab)
    if role in (Role.Actor, Role.ActorRollout):
        return {"actor": EngineMemory(policy, sizes.actor())}
    if role is Role.Critic:
        path = critic.model.path or model.path
        return {"critic": EngineMemory(_without_head(read_shape(_required(path))), sizes.critic())}
    if role is Role.RefPolicy:
        return {"ref": EngineMemory(policy, sizes.reference())}
    if role is Role.RewardModel:
        shape = read_shape(_required(config.reward_model.model.path))
        return {"reward_model": EngineMemory(_without_head(shape), sizes.reward_model())}
    if role is Role.TeacherModel:
        teachers = config.distillation.teacher_models
        return {
            f"teacher {name}": EngineMemory(read_shape(_required(teacher["model_path"])), sizes.reference())
            for name, teacher in teachers.items()
        }
    return {}


class _Sizes:
    """The settings of a job's engines, as `EngineSizes`."""

    def __init__(self, config: PPOConfig, device: str, count: int, *, vocab: int):
        self._config, self._device, self._count, self._vocab = config, device, count, vocab
        data = config.data
        self._length = data.max_prompt_length + data.max_response_length
        self._response_share = data.max_response_length / self._length

    def actor(self) -> EngineSizes:
        actor, model = self._config.actor_rollout_ref.actor, self._config.actor_rollout_ref.model
        return self._sizes(
            engine_settings(actor),
            self._tokens(*update_batching(actor)),
            lora_rank=_lora_rank(model),
            gradient_checkpointing=model.enable_gradient_checkpointing,
            entropy_bonus=actor.entropy_coeff != 0,
        )

    def critic(self) -> EngineSizes:
        critic = self._config.critic
        return self._sizes(
            critic_engine_settings(self._config),
            self._tokens(*update_batching(critic)),
            gradient_checkpointing=critic.model.enable_gradient_checkpointing,
            response_share=0.0,
        )

    def reference(self) -> EngineSizes:
        tokens = self._tokens(*log_prob_batching(self._config.actor_rollout_ref.ref))
        return self._sizes(ref_engine_settings(self._config), tokens, trains=False)

    def reward_model(self) -> EngineSizes:
        model = self._config.reward_model
        tokens = self._tokens(False, model.forward_max_token_len_per_gpu, model.micro_batch_size_per_gpu)
        return self._sizes(reward_model_engine_settings(self._config), tokens, trains=False, response_share=0.0)

    def _tokens(self, is_dynamic: bool, budget: int, rows: int | None) -> int:
        """Return the tokens of the largest micro-batch of a process, at most those of a step."""
        config = self._config
        parts = sequence_parts(config.actor_rollout_ref.actor)
        all_rows = -(-config.data.train_batch_size * config.actor_rollout_ref.rollout.n * parts // self._count)
        if rows is not None and not is_dynamic:
            return min(rows, all_rows) * self._length
        return min(max(budget * parts, self._length), all_rows * self._length)

    def _sizes(self, settings: Any, tokens: int, **chosen: Any) -> EngineSizes:
        policy = self._config.actor_rollout_ref
        if not isinstance(settings, FSDPConfig | MegatronConfig):
            raise ConfigError(
                f"actor_rollout_ref.actor.strategy={policy.actor.strategy}: the memory of an engine of your own is not "
                f"known; plan with strategy={' or '.join(SECTIONS)}"
            )
        dtype = settings.dtype if settings.dtype != "auto" else {"cuda": "bfloat16", "cpu": "float32"}[self._device]
        chunk = policy.actor.entropy_from_logits_chunk_size
        if isinstance(settings, FSDPConfig):
            layout = {"context": settings.ulysses_sequence_parallel_size}
            chosen["reshard_after_forward"] = settings.reshard_after_forward
        else:
            layout = _megatron_layout(settings)
        return EngineSizes(
            **{
                "processes": self._count,
                "dtype": dtype,
                "tokens": tokens,
                "response_share": self._response_share,
                "chunk": chunk or max(1, TILE_BYTES[self._device] // FLOAT32 // self._vocab),
                "whole_logits": not policy.model.use_fused_kernels,
                "has_host_memory": self._device == "cuda",
                "param_offload": settings.param_offload and self._device == "cuda",
                "optimizer_offload": settings.optimizer_offload and self._device == "cuda",
                **layout,
                **chosen,
            }
        )


def _megatron_layout(settings: MegatronConfig) -> dict[str, Any]:
    return {
        "strategy": "megatron",
        "tensor": settings.tensor_model_parallel_size,
        "pipeline": settings.pipeline_model_parallel_size,
        "expert": settings.expert_model_parallel_size,
        "context": settings.context_parallel_size,
        "sequence_parallel": settings.sequence_parallel,
        "distributed_optimizer": settings.use_distributed_optimizer,
    }


def _without_head(shape: ModelShape) -> ModelShape:
    """Return the shape of a model with a head of one output."""
    return replace(shape, tied=True)


def _lora_rank(model: Any) -> int:
    if model.lora_adapter_path is None:
        return model.lora_rank
    return read_saved_adapter(model.lora_adapter_path).rank


def _required(path: str | None) -> str:
    if path is None:
        raise ConfigError("actor_rollout_ref.model.path is not set: memory depends on the model; set it")
    return path


def _sum(parts: Any) -> MemoryParts:
    """Return what several models hold together."""
    found = [*parts]
    names = MemoryParts.__dataclass_fields__
    return MemoryParts(**{name: sum(getattr(part, name) for part in found) for name in names})


def rollout_memory(
    config: PPOConfig, shape: ModelShape, *, device: str, memory: float, is_apart: bool, num_processes: int
) -> RolloutMemory:
    """Return the memory of a process that generates.

    Args:
        config: Settings of the job.
        shape: The policy.
        device: "cuda" or "cpu".
        memory: Bytes of the device.
        is_apart: The process does nothing else, and keeps what it has.
        num_processes: Processes that generate.
    """
    rollout, data = config.actor_rollout_ref.rollout, config.data
    dtype = rollout.dtype if rollout.dtype != "auto" else ("bfloat16" if device == "cuda" else "float32")
    shards = rollout.tensor_model_parallel_size
    weights = shape.params * BYTES[dtype] / shards
    of_token = KEYS_AND_VALUES * shape.layers * shape.kv_width * BYTES[dtype] / shards
    if rollout.name != "vllm":
        engines = max(1, num_processes // shards)
        rows = min(rollout.max_num_seqs, -(-data.train_batch_size * rollout.n // engines))
        cache = rows * (data.max_prompt_length + data.max_response_length) * of_token
    elif device == "cuda":
        cache = max(0.0, rollout.gpu_memory_utilization * memory - weights)
    else:
        cache = float(rollout.kv_cache_memory_mb * MIB)
    frees = rollout.free_cache_engine and not is_apart
    resting = weights + cache
    if frees:
        resting = 0.0 if device == "cuda" else weights
    elif rollout.name != "vllm":
        resting = weights  # its keys and values end with the batch
    return RolloutMemory(weights, cache, resting, cache / of_token)
