"""Memory of a generation engine: weights, keys and values."""

from dataclasses import dataclass

from hybridrl.config.schema.ppo import PPOConfig
from hybridrl.workers.engine.model_shape import ModelShape

MIB = 2**20
KEYS_AND_VALUES = 2
BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


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
