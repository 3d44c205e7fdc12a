"""Interface of a training engine: its settings and its methods.

An engine decides *how* a model is parallel (FSDP2, Megatron-core). The worker that owns it decides *what* is computed:
it names the outputs and passes a loss function. Engines run in worker processes. This module imports no engine.

Shapes: B rows of a batch on this rank, b rows of one micro-batch, R response width.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple, Protocol

import torch

from hybridrl.config.schema.engine import EngineSettings
from hybridrl.config.schema.workers import OptimConfig
from hybridrl.protocol import DataProto

LossFn = Callable[[dict[str, torch.Tensor], DataProto], tuple[torch.Tensor, Mapping[str, torch.Tensor | float]]]
"""`loss_fn(outputs, rows) -> (loss, stats)`: outputs (b,R) with gradient, and the rows, of one micro-batch.

Both are on the engine's device. The scalar loss depends on `outputs` and is already divided by counts over all ranks
and micro-batches, because engines sum gradients.
"""


ROW_TOKENS, COMPUTED_TOKENS = "row_tokens", "computed_tokens"
"""Statistics that an engine which shares prefixes adds to those of the loss.

They are the tokens of a micro-batch's rows, and those that the model computed.
"""
ROUTED_EXPERTS = "routed_experts"
"""Column with the experts of each row's tokens, see `routing/routes.py`."""
ROUTED_TOKENS = "routing_tokens"
"""Statistic of an engine that replays routes, see `routing/replay.py`."""
COMPUTED_PAIRS = "computed_pairs"
"""Number of (token, token that it sees) for the computed tokens; `take_computed` returns it, too."""


@dataclass(frozen=True)
class TokenTerm:
    """A further output of a causal model, for response tokens.

    It is what `fn` makes of the log-probs over the vocabulary.

    Attributes:
        fn: Called with log-probs (C, V) of C tokens and their entries of the columns; returns (C,) or (C, K). It treats
            every token alone, and is differentiable in the log-probs if the output is trained on.
        columns: Columns (B, R, ...) of the batch.
    """

    fn: Callable[..., torch.Tensor]
    columns: tuple[str, ...] = ()


@dataclass(frozen=True)
class LoRA:
    """Settings of low-rank adapters, see `lora.py`.

    Attributes:
        rank: Rank r of the trained change.
        alpha: The change is scaled by alpha / r.
        target_modules: Last name components of the adapted layers, or "all-linear".
        path: Directory of a saved adapter to start from, which has its own layers. None: new adapters.
        head: Adapt the output embedding, too. Such adapters cannot be merged if it is tied to the input embedding.
    """

    rank: int
    alpha: float
    target_modules: tuple[str, ...] = ("all-linear",)
    path: str | None = None
    head: bool = False


@dataclass(frozen=True, kw_only=True)
class EngineSetup:
    """What an engine is constructed with; the worker builds it from the user's settings.

    Attributes:
        kind: What the head computes: "causal_lm" (log-probs), "value" (one number per token), "score" (one number per
            row).
        path: Directory or Hugging Face name of the model.
        device: "cpu" or "cuda". With more than one rank, torch.distributed must already have a backend for it.
        settings: The engine's own settings, an object of its class attribute `Config`.
        packed: Concatenate sequences in one row without padding. Otherwise sort them by length and pad to the longest.
        share_prefixes: Compute tokens that rows of a micro-batch have in common once, in one packed row. An engine that
            cannot do that for the model says so and computes rows apart.
        temperature: Log-probs and entropy are those of softmax(logits / temperature).
        optim: None makes a forward-only engine (reference policy, reward model).
        total_steps: Optimizer steps of the whole run, for learning-rate schedules.
        seed: Seed of new adapters, and of a head for values or scores that the checkpoint lacks. A score head must be
            in the checkpoint unless it is trained.
        lora: Train low-rank adapters and freeze the model's own parameters. None trains all parameters.
        whole_logits: Compute log-probs from whole logits, which otherwise only exist in parts.
        logits_chunk: At most as many logits exist at a time as those of this many tokens. None chooses it by the
            device.
        replays_routes: Replay the column `routed_experts` where a batch has it, see `RoutingEngine`.
        freeze_vision_tower: Do not train the part of the model that computes images.
        token_terms: Further outputs by name, besides log-probs and entropy. Engines whose settings declare
            `supports_token_terms` compute them; Megatron's does with one pipeline stage, and apart from other outputs.
    """

    kind: str
    path: str
    settings: Any
    trust_remote_code: bool = False
    override_config: dict = field(default_factory=dict)
    device: str = "cpu"
    gradient_checkpointing: bool = False
    packed: bool = False
    share_prefixes: bool = False
    temperature: float = 1.0
    optim: OptimConfig | None = None
    total_steps: int = 0
    grad_clip: float = 1.0
    seed: int = 0
    lora: LoRA | None = None
    whole_logits: bool = False
    logits_chunk: int | None = None
    replays_routes: bool = False
    token_terms: Mapping[str, TokenTerm] = field(default_factory=dict)
    freeze_vision_tower: bool = False

    @property
    def compute_dtype(self) -> torch.dtype:
        """Return the dtype of the model's computation, with `settings.dtype="auto"` resolved.

        With an optimizer, parameters, gradient reduction and optimizer state stay float32. Without one, parameters have
        this dtype.
        """
        return resolve_dtype(self.settings.dtype, self.device)


def resolve_dtype(name: str, device: str) -> torch.dtype:
    """Return the dtype of a setting: "auto" is bfloat16 on CUDA and float32 on the CPU."""
    if name == "auto":
        return torch.bfloat16 if device == "cuda" else torch.float32
    return getattr(torch, name)


@dataclass(frozen=True, kw_only=True)
class StepOptions:
    """Options of AdamW for one step. `grad_clip` 0: gradients are not clipped."""

    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    grad_clip: float


@dataclass(frozen=True)
class MeshPosition:
    """Position of a process in the data-parallel mesh.

    Processes that share a model's tensors or layers (peers) have the same `dp_rank`, receive the same rows and return
    the same outputs. Exactly one of them has `is_output_rank`: the dispatcher collects its outputs and ignores the
    others.
    """

    dp_rank: int
    dp_size: int
    is_output_rank: bool


@dataclass(frozen=True)
class MicroBatching:
    """Limits of a micro-batch: at most `max_rows` rows and `max_tokens` computed tokens. None is no limit."""

    max_rows: int | None = None
    max_tokens: int | None = None


class StateTensors(NamedTuple):
    """Modules and optimizers whose local tensors are this rank's checkpointed state, without random generators."""

    modules: list[torch.nn.Module]
    optimizers: list[torch.optim.Optimizer]


class AdapterEngine(Protocol):
    """What an engine whose settings declare `supports_lora` can do besides."""

    def adapters_off(self) -> AbstractContextManager[None]:
        """Return a context in which the model computes without its adapters."""


class PrefixEngine(Protocol):
    """What an engine that shares prefixes may do besides, so that utilization has the FLOPs that were done."""

    def take_computed(self) -> dict[str, float]:
        """Return COMPUTED_TOKENS and COMPUTED_PAIRS of this rank's passes since the last call; empty: rows apart."""


class RoutingEngine(Protocol):
    """What an engine whose settings declare `supports_routing_replay` can do besides.

    With `EngineSetup.replays_routes`, its passes replay the column `routed_experts` of a batch that has it, and
    `forward_backward` returns the statistics of `routing/replay.py`.
    """

    def forward_with_routes(
        self, batch: DataProto, micro: MicroBatching, *, outputs: tuple[str, ...]
    ) -> tuple[dict[str, torch.Tensor], Any]:
        """Return what `forward` returns, and the column `routed_experts` of what the routers chose."""


class Engine(Protocol):
    """One model on all ranks of the process group.

    `actor_rollout_ref.actor.strategy` names an engine's class or has its import path. `Config` is the dataclass of its
    own settings; driver and workers read what `EngineSettings` declares. `hybridrl.testing.check_engine` tests a class
    against this contract.

    Every method except `to` and `state_tensors` is collective: all ranks call it, in the same order. After `setup`, the
    engine has `mesh_position` and `num_updates`. The latter counts applied (not skipped) optimizer steps and is
    checkpointed.
    """

    Config: ClassVar[type[EngineSettings]]
    mesh_position: MeshPosition
    num_updates: int

    def __init__(self, setup: EngineSetup) -> None:
        """Store the setup."""

    def setup(self) -> None:
        """Load and shard the model and build the optimizer. The constructor does none of this."""

    def forward(self, batch: DataProto, micro: MicroBatching, *, outputs: tuple[str, ...]) -> dict[str, torch.Tensor]:
        """Return the named outputs without gradient, float32 on the CPU, in the row order of `batch`.

        Ranks may hold different numbers of rows, also none.

        Args:
            outputs: "log_probs", "entropy" and "sum_pi_squared" for kind causal_lm, "values" for kind value: (B,R), 0
                where response_mask is 0. "scores" for kind score: (B,). Names of the setup's `token_terms`: (B,R) or
                (B,R,K). Only the optimal token baseline asks for "sum_pi_squared", sum_v pi_v^2.
        """

    def forward_backward(
        self, batch: DataProto, micro: MicroBatching, loss_fn: LossFn, *, outputs: tuple[str, ...]
    ) -> list[dict[str, float]]:
        """Add this batch's gradients, summed over micro-batches and ranks, to the existing ones.

        Returns:
            The loss function's stats, one dict per micro-batch of this rank. Empty on a rank without rows and on a peer
            that is not the output rank.
        """

    def optimizer_step(self, *, skip: bool = False) -> dict[str, float]:
        """Clip gradients, update the parameters, advance the schedule and clear the gradients.

        Args:
            skip: Do not update. The same on all ranks.

        Returns:
            "grad_norm" (before clipping), "lr" and "skipped", equal on all ranks. "skipped" is 1.0 if the gradient norm
            is not finite or `skip` is set. Parameters, optimizer state and schedule are then unchanged.
        """

    def weights(self, *, lora: str = "merged") -> Iterator[tuple[str, torch.Tensor]]:
        """Yield every full parameter under its Hugging Face name, tied ones once.

        All ranks must exhaust the iterator together. A tensor may share memory with the model and is valid only until
        the next one is requested: copy it to keep it.

        Args:
            lora: How adapters are exported: "merged" into the weights, "base_and_adapters" (adapters first, then the
                base weights), "adapters" alone, or "unscaled_adapters". See `lora.py` for their names.
        """

    def save(self, directory: str) -> None:
        """Write model, optimizer, schedule and every rank's random state into `directory`.

        The caller publishes the directory by renaming it. Every rank writes a file by which the driver sees that all
        ranks share the storage: `rank_N.*` for rank N, or those of torch.distributed.checkpoint.

        Raises:
            NonFiniteError: A parameter or optimizer state is not finite on some rank. Raised on all ranks, before any
                write.
            StorageError: Some rank cannot write. Raised on all ranks.
        """

    def load(self, directory: str) -> None:
        """Read what `save` wrote, also with another number of ranks.

        Raises:
            CheckpointError: Part of the state is missing.
        """

    def state_tensors(self) -> StateTensors:
        """Return the modules and optimizers whose state `save` would write.

        Optimizers have a state for each parameter, also before the first step.
        """

    def to(self, device: str, *, params: bool = True, optimizer: bool = True) -> None:
        """Move parameters and optimizer state to "cpu" or to the engine's device.

        Other methods move back whatever they need.
        """
