"""`EngineSettings`: what the trainer and the workers ask of the settings of any training engine."""

from dataclasses import dataclass, fields, replace
from typing import Self

# What a setting of micro-batches means.
MICRO = "Rows of one micro-batch per process; null means as many as fit its token budget."
DYNAMIC = "Cut micro-batches by token budget and ignore the number of rows."
BUDGET = "Token budget of one micro-batch per process, a hard cap, used unless rows are set."


@dataclass(frozen=True)
class EngineSettings:
    """Base of an engine's own settings, the class attribute `Config` of the engine.

    Derive a frozen dataclass from it. Each of its fields has a type and a default, and becomes a key of
    `actor_rollout_ref.actor.engine_config`. `config.fields.setting` adds a sentence and a range. A `__post_init__` may
    raise ConfigError. The driver constructs the settings too, so that mistakes show before anything starts.

    The attributes below are what others read. Override one with a field or a property if it differs.

    Attributes:
        dtype: Dtype of the computation: "auto" (bfloat16 on CUDA, float32 on the CPU), "float32" or "bfloat16".
        param_offload: Keep parameters in host memory between calls.
        optimizer_offload: Keep optimizer state in host memory between calls.
        supports_lora: The engine trains low-rank adapters, and its `adapters_off()` is a context without them.
        supports_shared_prefixes: The engine computes common first tokens of the rows of a micro-batch once.
        supports_token_terms: The engine computes outputs from the log-probs of the whole vocabulary.
        supports_routing_replay: The engine records and replays the experts of a mixture of experts.
        supports_images: The engine computes the vision tower of a model, for rows with images.
    """

    dtype = "auto"
    param_offload = False
    optimizer_offload = False
    supports_lora = False
    supports_shared_prefixes = False
    supports_token_terms = False
    supports_routing_replay = False
    supports_images = False

    @property
    def model_parallel_size(self) -> int:
        """Return the number of processes that share one copy of the model and get the same rows."""
        return 1

    @property
    def rank_unit(self) -> int:
        """Return the number that must divide the number of processes."""
        return self.model_parallel_size

    def data_parallel_size(self, world_size: int) -> int:
        """Return into how many parts the engines of this many processes divide a batch."""
        return world_size // self.model_parallel_size

    def single_process(self) -> Self:
        """Return the settings for one process, which load a checkpoint of any number of processes."""
        return self

    def with_offload(self, *, params: bool, optimizer: bool) -> Self:
        """Return the settings with other offload flags.

        A flag that is not a field stays as it is.
        """
        own = {field.name for field in fields(self)}
        flags = {"param_offload": params, "optimizer_offload": optimizer}
        return replace(self, **{name: value for name, value in flags.items() if name in own})
