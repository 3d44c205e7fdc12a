"""Memory of one process of an engine, by what it does.

Attention keeps no matrix of scores.
"""

from dataclasses import dataclass, fields, replace

from hybridrl.workers.engine.model_shape import FLOAT32, ModelShape

BYTES = {"float32": FLOAT32, "bfloat16": 2}
ADAM = 2 * FLOAT32  # two moments of a parameter
GATHERED_LAYERS = 2  # FSDP2 gathers the next one while it computes
TILE_COPIES = {False: 1, True: 2}  # float32 copies of a tile of logits, by whether the entropy is computed


@dataclass(frozen=True, kw_only=True)
class EngineSizes:
    """What an engine's settings say about memory.

    Attributes:
        strategy: "fsdp" or "megatron".
        processes: Processes of the engine.
        tensor, pipeline: Sizes of Megatron's layout.
        expert: Processes over which Megatron shards the experts of a pipeline stage. `tensor` does not shard them.
        context: Processes that share the tokens of a micro-batch (Megatron's context parallelism, FSDP's Ulysses).
        sequence_parallel: Norms are sharded over tensor-parallel processes.
        distributed_optimizer: Megatron shards the optimizer state over data-parallel processes.
        dtype: Dtype of the computation.
        trains: The model has an optimizer.
        lora_rank: Rank of the adapters, which are then all that is trained; 0: none.
        gradient_checkpointing: Activations of decoder layers are computed again.
        reshard_after_forward: FSDP frees gathered parameters.
        has_host_memory: The device has memory of its own, beside the host's.
        param_offload, optimizer_offload: What is in host memory between calls.
        tokens: Tokens of a micro-batch.
        response_share: Share of them whose log-probs are computed.
        chunk: At most as many logits exist at a time as those of this many tokens.
        whole_logits: They exist whole instead.
        entropy_bonus: The entropy has a gradient. Without one it is still computed with the old log-probs.
    """

    strategy: str = "fsdp"
    processes: int = 1
    tensor: int = 1
    pipeline: int = 1
    expert: int = 1
    context: int = 1
    sequence_parallel: bool = False
    distributed_optimizer: bool = True
    dtype: str = "bfloat16"
    trains: bool = True
    lora_rank: int = 0
    gradient_checkpointing: bool = False
    reshard_after_forward: bool = True
    has_host_memory: bool = True
    param_offload: bool = False
    optimizer_offload: bool = False
    tokens: int = 16384
    response_share: float = 1.0
    chunk: int = 1024
    whole_logits: bool = False
    entropy_bonus: bool = False

    @property
    def element(self) -> int:
        """Return the bytes of an element in the dtype of the computation."""
        return BYTES[self.dtype]

    @property
    def tile_element(self) -> int:
        """Return the bytes that are needed for each logit of a tile."""
        product = self.element if self.element < FLOAT32 else 0  # float32 products are worked on in place
        return TILE_COPIES[self.entropy_bonus] * FLOAT32 + product

    @property
    def model_shards(self) -> int:
        """Return over how many processes Megatron shards the model's tensors, besides experts."""
        return self.tensor * self.pipeline if self.strategy == "megatron" else 1


@dataclass(frozen=True)
class MemoryParts:
    """Bytes of one process at one moment, by what they hold."""

    weights: float = 0.0
    gathered: float = 0.0
    gradients: float = 0.0
    optimizer: float = 0.0
    activations: float = 0.0
    logits: float = 0.0

    @property
    def total(self) -> float:
        """Return the sum of all parts."""
        return sum(getattr(self, field.name) for field in fields(self))


class EngineMemory:
    """Memory of one model in an engine."""

    def __init__(self, shape: ModelShape, sizes: EngineSizes):
        self.shape, self.sizes = shape, sizes

    def by_phase(self) -> dict[str, MemoryParts]:
        """Return the parts at the largest moment of each phase.

        "rest": between calls. "log_probs": forward pass without gradient. Of a trained model also "backward_start":
        all activations, and the head's backward pass; "backward_end": all gradients, and the embedding's; and
        "optimizer_step".
        """
        kept = 0.0 if self._is_fsdp else self.gradients  # Megatron keeps their buffer
        rest = MemoryParts(
            weights=0.0 if self.sizes.param_offload else self.weights,
            gradients=kept,
            optimizer=0.0 if self.sizes.optimizer_offload else self.optimizer,
        )
        away = 0.0 if self.sizes.optimizer_offload else self.optimizer
        phases = {
            "rest": rest,
            "log_probs": MemoryParts(
                weights=self.weights,
                gathered=self.gathered,
                gradients=0.0 if self._is_fsdp else self.gradients,
                optimizer=away,
                activations=self._tokens * self.shape.layer_working(self.sizes.element) / self.sizes.tensor,
                logits=self._logits(backward=False),
            ),
        }
        if not self.sizes.trains:
            return phases
        held = MemoryParts(weights=self.weights, gradients=self.gradients, optimizer=self.optimizer)
        head, end = self._unreduced_gradients()
        last = self._tokens * self._per_layer if self.sizes.gradient_checkpointing else 0.0
        return phases | {
            "backward_start": replace(
                held,
                gathered=self.gathered,
                gradients=self.gradients + head,
                activations=self.activations + last,
                logits=self._logits(backward=True),
            ),
            "backward_end": replace(held, gathered=self.gathered, gradients=self.gradients + end),
            "optimizer_step": held,
        }

    @property
    def peak(self) -> float:
        """Return the bytes of the largest phase."""
        return max(parts.total for parts in self.by_phase().values())

    @property
    def _is_fsdp(self) -> bool:
        return self.sizes.strategy == "fsdp"

    @property
    def _own_params(self) -> float:
        """Return the parameters of this process's model, as if data parallelism sharded nothing."""
        sizes, experts = self.sizes, self.shape.expert_params
        return (self.shape.params - experts) / sizes.model_shards + experts / (sizes.pipeline * sizes.expert)

    @property
    def _trained_params(self) -> float:
        rank, shards = self.sizes.lora_rank, self.sizes.model_shards
        return self.shape.lora_params(rank) / shards if rank else self._own_params

    @property
    def weights(self) -> float:
        """Return the bytes of stored parameters: float32 where FSDP trains, and else in the computation's dtype."""
        adapters = self.shape.lora_params(self.sizes.lora_rank) / self.sizes.model_shards
        if self._is_fsdp:
            element = FLOAT32 if self.sizes.trains else self.sizes.element
            return (self._own_params + adapters) * element / self.sizes.processes
        return (self._own_params + adapters) * self.sizes.element

    @property
    def gathered(self) -> float:
        """Return the bytes of parameters that FSDP gathers for the computation."""
        if not self._is_fsdp:
            return 0.0
        layers = GATHERED_LAYERS if self.sizes.reshard_after_forward else self.shape.layers
        return (self.shape.outer_params + layers * self.shape.layer_params) * self.sizes.element

    @property
    def gradients(self) -> float:
        """Return the bytes of summed gradients, float32."""
        if not self.sizes.trains:
            return 0.0
        return self._trained_params * FLOAT32 / (self.sizes.processes if self._is_fsdp else 1)

    @property
    def optimizer(self) -> float:
        """Return the bytes of Adam's moments, and of Megatron's float32 copy of bfloat16 parameters."""
        if not self.sizes.trains:
            return 0.0
        copies = FLOAT32 if not self._is_fsdp and self.sizes.element < FLOAT32 else 0
        if not self._is_fsdp and not self.sizes.distributed_optimizer:
            return self._trained_params * (ADAM + copies)
        rank = self.sizes.lora_rank  # each process has an equal part of the whole, whatever the layout
        return (self.shape.lora_params(rank) if rank else self.shape.params) * (ADAM + copies) / self.sizes.processes

    @property
    def activations(self) -> float:
        """Return the bytes that all decoder layers of this process keep for the backward pass.

        A pipeline's first stage holds as many micro-batches as there are stages.
        """
        sizes = self.sizes
        kept = self.shape.hidden * sizes.element if sizes.gradient_checkpointing else self._per_layer
        final_norm = 3 * self.shape.hidden * sizes.element
        return self._tokens * (self.shape.layers * kept + final_norm)

    @property
    def _tokens(self) -> float:
        return self.sizes.tokens / self.sizes.context

    @property
    def _per_layer(self) -> float:
        sizes = self.sizes
        return self.shape.layer_activations(
            element=sizes.element, tensor_parallel=sizes.tensor, sequence_parallel=sizes.sequence_parallel
        )

    def _logits(self, *, backward: bool) -> float:
        """Return the bytes of logits with what is computed of them."""
        sizes, shape = self.sizes, self.shape
        wanted = self._tokens * sizes.response_share
        words = shape.vocab / sizes.tensor
        if sizes.whole_logits:
            return wanted * words * sizes.element * (2 if backward else 1)
        states = wanted * shape.hidden * ((FLOAT32 + sizes.element) if backward else sizes.element)
        return min(sizes.chunk, wanted) * words * sizes.tile_element + states

    def _unreduced_gradients(self) -> tuple[float, float]:
        """Return the bytes of gradients that wait to be summed, at both ends of the backward pass.

        With Megatron one matrix at a time: each gradient is added to the buffer as soon as it is there.
        """
        if self.sizes.lora_rank:
            return 0.0, 0.0
        matrix = self.shape.matrix_params * self.sizes.element
        if not self._is_fsdp:
            return matrix / self.sizes.tensor, matrix / self.sizes.tensor
        outer = self.shape.outer_params
        embedding = matrix if self.shape.tied else 0
        return matrix, outer * self.sizes.element + max(embedding, outer * FLOAT32)
