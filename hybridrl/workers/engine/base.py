"""What a training engine is: its settings and its methods.

An engine says *how* a model is parallel (FSDP2, Megatron-core); the worker that owns it says *what* is computed, by
naming the outputs it wants and handing in a loss. Nothing here imports an engine.

Shapes: B rows of a batch on this rank, b rows of one micro-batch, R response width.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch

from hybridrl.config.schema.workers import MegatronConfig, OptimConfig
from hybridrl.protocol import DataProto
from hybridrl.workers.engine.lora import LoRA

LossFn = Callable[[dict[str, torch.Tensor], DataProto], tuple[torch.Tensor, dict[str, torch.Tensor | float]]]
"""`loss_fn(outputs, rows) -> (loss, stats)`: outputs (b,R) with gradient and rows of one micro-batch.

Both are on the engine's device. The scalar loss depends on `outputs` and is already divided by counts over all ranks
and micro-batches: engines sum gradients.
"""


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Everything an engine needs to know; the worker makes it from the user's settings.

    kind         what the head computes: "causal_lm" (log-probs), "value" (one number per token), "score" (one number
    per row)
    path         directory or Hugging Face name of the model
    device       "cpu" or "cuda"; torch.distributed is initialised with a backend for it if there is more than one rank
    dtype        "float32", "bfloat16" or "auto" (bfloat16 on CUDA, float32 on the CPU): what is computed in. With an
    optimizer,
                 parameters, their gradients' reduction and the optimizer's state stay float32; without, parameters have
                 this dtype
    packed       lay sequences end to end in one row, without padding, instead of sorting them by length and padding to
    the longest
    temperature  log-probs and entropy are those of softmax(logits / temperature)
    optim        None makes an engine that only runs forward (reference policy, reward model)
    total_steps  optimizer steps of the whole run, for learning-rate schedules
    seed         of a new value head, if the checkpoint has none (a score head has to be there), and of new adapters
    lora         train low-rank adapters and leave the model's own parameters as they are; None trains all of them
    megatron     how the Megatron engine is parallel; others do not read it
    """

    kind: str
    path: str
    trust_remote_code: bool = False
    override_config: dict = field(default_factory=dict)
    device: str = "cpu"
    dtype: str = "auto"
    reshard_after_forward: bool = True
    param_offload: bool = False
    optimizer_offload: bool = False
    gradient_checkpointing: bool = False
    packed: bool = False
    temperature: float = 1.0
    optim: OptimConfig | None = None
    total_steps: int = 0
    grad_clip: float = 1.0
    seed: int = 0
    lora: LoRA | None = None
    megatron: MegatronConfig = MegatronConfig()

    @property
    def compute_dtype(self) -> torch.dtype:
        """The dtype of the model's computation, with "auto" resolved."""
        if self.dtype == "auto":
            return torch.bfloat16 if self.device == "cuda" else torch.float32
        return {"float32": torch.float32, "bfloat16": torch.bfloat16}[self.dtype]


@dataclass(frozen=True)
class Place:
    """A process among the data-parallel ranks. Peers, which share a model's tensors or layers, have the same `dp_rank`,
    get the same rows and return the same outputs; exactly one of them answers.
    """

    dp_rank: int
    dp_size: int
    answers: bool


@dataclass(frozen=True)
class MicroBatching:
    """How a rank's rows are cut into micro-batches: at most `max_rows` rows and `max_tokens` computed tokens; None is
    no limit.
    """

    max_rows: int | None = None
    max_tokens: int | None = None


class Durable(NamedTuple):
    """modules, optimizers: those whose tensors on this rank are its part of the durable state, but for random
    generators.
    """

    modules: list[torch.nn.Module]
    optimizers: list[torch.optim.Optimizer]


class Engine(Protocol):
    """One model on all ranks of the process group. Every method but `to` and `durable` is collective: all ranks call
    it, in the same order.

    `place` and `num_updates` (optimizer steps that were taken, not skipped; part of the durable state) are there after
    `setup`.
    """

    place: Place
    num_updates: int

    def setup(self) -> None:
        """Load the model, shard it, and make the optimizer; engines do nothing before."""
        ...

    def forward(self, batch: DataProto, micro: MicroBatching, *, outputs: tuple[str, ...]) -> dict[str, torch.Tensor]:
        """Return the named outputs without gradient, float32 on the CPU, rows in the order of `batch`.

        outputs: of "log_probs", "entropy" (kind causal_lm), "values" (kind value): (B,R), 0 where response_mask is 0;
        "scores" (kind score): (B,). Ranks may hold different numbers of rows, also none.
        """
        ...

    def forward_backward(
        self, batch: DataProto, micro: MicroBatching, loss_fn: LossFn, *, outputs: tuple[str, ...]
    ) -> list[dict[str, float]]:
        """Add this batch's gradients, summed over micro-batches and ranks, to those already there.

        Returns the loss function's stats, one dict per micro-batch of this rank (none on a rank without rows, or that
        does not answer).
        """
        ...

    def optimizer_step(self, *, skip: bool = False) -> dict[str, float]:
        """Clip, update, advance the schedule, drop gradients. Returns "grad_norm" (before clipping), "lr", "skipped".

        "skipped" is 1.0, and parameters, optimizer state and schedule stay as they were, if the gradient norm is not
        finite, or if the caller says so (the same on all ranks). Equal on all ranks.
        """
        ...

    def weights(self, *, lora: str = "merged") -> Iterator[tuple[str, torch.Tensor]]:
        """Yield every parameter whole under its Hugging Face name, tied ones once; all ranks must exhaust it together.

        lora: what becomes of adapters, where there are any: "merged" into the weights, "apart" (they come first, and
        the weights are those below them), or "adapters" alone; see `lora.py` for their names. A tensor may share memory
        with the model and is valid until the next one is asked for: copy what is kept.
        """
        ...

    def save(self, directory: str) -> None:
        """Write model, optimizer, schedule and every rank's random state into `directory`; the caller makes it durable
        by a rename.

        Raises NonFiniteError on all ranks, before anything is written, if a parameter or the optimizer's state is not
        finite anywhere, and StorageError on all ranks if any of them cannot write.
        """
        ...

    def load(self, directory: str) -> None:
        """Read what `save` wrote, also with another number of ranks. Raises CheckpointError if something is missing."""
        ...

    def durable(self) -> Durable:
        """Return where the state is that `save` would write.

        Optimizers have a state for each parameter, also before the first step.
        """
        ...

    def to(self, device: str, *, params: bool = True, optimizer: bool = True) -> None:
        """Move parameters and optimizer state to "cpu" or the engine's device.

        What a call needs and finds moved away, it moves back.
        """
        ...
