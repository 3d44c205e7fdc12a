"""Several models behind one engine, each with a slot for its trained tensors.

One slot at a time is in the engine.

The training worker owns the table. A slot has adapters (or, without LoRA, all weights), Adam's state and gradients:
this rank's part of each, as the engine shards them. What is saved and loaded is whole, on every rank. The engine's
adapters have the highest rank that the server allows and every kind of layer. A slot of a lower rank has zeros
in the remaining rows of A and columns of B, and zeros in the layers that it does not train: their gradients are exactly
zero, so AdamW leaves them zero.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from hybridrl.errors import ConfigError
from hybridrl.workers.engine.lora import LoRALinear, draw_A

ALPHA = 32.0  # Tinker's messages have none; "LoRA Without Regret" (Thinking Machines, 2025) has 32 for every rank
ATTENTION = re.compile(r"(^|[._])(self_attn|attn|attention|self_attention|linear_attn|mixer)(\.|$)")
MOMENTS = ("exp_avg", "exp_avg_sq")
Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class TrainedLayers:
    """What a model trains. `rank` 0: all weights.

    Attributes:
        rank: Rank of the adapters.
        seed: Seed of A.
        train_attn: Whether layers of the attention have adapters.
        train_mlp: The same of all other layers of a block.
        train_unembed: The same of the output embedding.
    """

    rank: int
    seed: int = 0
    train_attn: bool = True
    train_mlp: bool = True
    train_unembed: bool = True

    def trains(self, layer: str, *, is_head: bool) -> bool:
        """Return whether a layer has an adapter."""
        if is_head:
            return self.train_unembed
        return self.train_attn if ATTENTION.search(layer) else self.train_mlp


@dataclass
class ModelSlot:
    """This rank's part of a model.

    `tensors` and `gradients` by name, `moments` by "NAME.exp_avg" and so on. `has_gradients`: A pass has run since the
    last step.
    """

    adapter: TrainedLayers
    tensors: Tensors
    moments: Tensors = field(default_factory=dict)
    steps: Tensors = field(default_factory=dict)
    gradients: dict[str, torch.Tensor | None] = field(default_factory=dict)
    num_updates: int = 0
    has_gradients: bool = False


class SlotTable:
    """The slots of one engine.

    Args:
        engine: A trained engine of this process, with adapters of rank `max_rank` or without any.
        max_rank: 0: the engine trains all weights.
    """

    def __init__(self, engine: Any, *, max_rank: int):
        self._engine, self._max_rank = engine, max_rank
        state = engine.state_tensors()
        [self._model], [self._optimizer] = state.modules, state.optimizers
        named = self._model.named_parameters()
        self._parameters = {name: parameter for name, parameter in named if parameter.requires_grad}
        self._initial = {name: _local(parameter).clone() for name, parameter in self._parameters.items()}
        self._slots: dict[str, ModelSlot] = {}
        self._active: str | None = None

    def create(self, name: str, adapter: TrainedLayers) -> None:
        """Add a slot with new adapters, or with the weights on the disk.

        Raises:
            ConfigError: The rank is not one that this server trains, or no layer is trained.
        """
        self._check(adapter)
        self.drop(name)
        new = self._shards(self._new_adapters(adapter)) if adapter.rank else self._initial
        self._slots[name] = ModelSlot(adapter, {key: tensor.clone() for key, tensor in new.items()})

    def _check(self, adapter: TrainedLayers) -> None:
        if self._max_rank == 0 and adapter.rank:
            raise ConfigError(f"rank={adapter.rank}: this server trains all weights; use rank=0")
        if self._max_rank and not 1 <= adapter.rank <= self._max_rank:
            raise ConfigError(
                f"rank={adapter.rank}: this server trains adapters of rank 1 to {self._max_rank}, which --max-rank sets"
            )
        if adapter.rank and not (adapter.train_attn or adapter.train_mlp or adapter.train_unembed):
            raise ConfigError("train_attn, train_mlp and train_unembed are all false: nothing would be trained")

    def _new_adapters(self, adapter: TrainedLayers) -> Tensors:
        """Return A and B of new adapters, padded with zeros.

        A is drawn as a model with adapters of this rank alone would draw it; B is 0.
        """
        tensors = self._zeros()
        generator, head = torch.Generator().manual_seed(adapter.seed), self._model.get_output_embeddings()
        for layer, module in self._layers():
            if adapter.trains(layer, is_head=module is head):
                drawn = torch.empty(adapter.rank, module.in_features)
                draw_A(drawn, generator)
                tensors[f"{layer}.lora_A"][: adapter.rank] = drawn
        return tensors

    def _zeros(self) -> Tensors:
        """Return whole tensors of zeros."""
        return {
            name: torch.zeros(parameter.shape, dtype=parameter.dtype, device=parameter.device)
            for name, parameter in self._parameters.items()
        }

    def _shards(self, tensors: Tensors) -> Tensors:
        """Return this rank's parts of whole tensors."""
        return {name: _part(tensor, self._parameters[name]) for name, tensor in tensors.items()}

    def _whole(self, parts: Tensors) -> Tensors:
        """Return whole tensors of all ranks' parts. Collective."""
        return {name: _joined(part, self._parameters[name]) for name, part in parts.items()}

    def _layers(self) -> Iterator[tuple[str, LoRALinear]]:
        return ((name, module) for name, module in self._model.named_modules() if isinstance(module, LoRALinear))

    def adapter(self, name: str) -> TrainedLayers:
        """Return what a slot trains."""
        return self._slots[name].adapter

    def use(self, name: str) -> ModelSlot:
        """Put a slot into the engine, and what was there back into its own."""
        if self._active != name:
            self._take_out()
            self._put_in(self._slots[name])
            self._active = name
        return self._slots[name]

    @torch.no_grad()
    def _take_out(self) -> None:
        if self._active is None:
            return
        slot = self._slots[self._active]
        for name, parameter in self._parameters.items():
            slot.tensors[name].copy_(_local(parameter))
            slot.gradients[name] = self._take_gradient(parameter)
            state = self._optimizer.state[parameter]
            slot.steps[name] = state["step"].clone()
            for moment in MOMENTS:
                key = f"{name}.{moment}"
                slot.moments.setdefault(key, torch.empty_like(slot.tensors[name])).copy_(_local(state[moment]))
        slot.num_updates = self._engine.num_updates
        self._active = None

    @torch.no_grad()
    def _put_in(self, slot: ModelSlot) -> None:
        for name, parameter in self._parameters.items():
            _local(parameter).copy_(slot.tensors[name])
            self._put_gradient(parameter, slot.gradients.get(name))
            state = self._optimizer.state[parameter]
            state["step"].copy_(slot.steps.get(name, torch.zeros(())))
            for moment in MOMENTS:
                stored = slot.moments.get(f"{name}.{moment}")
                _local(state[moment]).zero_() if stored is None else _local(state[moment]).copy_(stored)
        self._engine.num_updates = slot.num_updates
        for _, module in self._layers():
            module.scale = ALPHA / slot.adapter.rank

    def _take_gradient(self, parameter: torch.nn.Parameter) -> torch.Tensor | None:
        gradient, parameter.grad = parameter.grad, None
        return gradient

    def _put_gradient(self, parameter: torch.nn.Parameter, gradient: torch.Tensor | None) -> None:
        parameter.grad = gradient

    def drop(self, name: str) -> None:
        """Forget a slot."""
        if self._active == name:
            self._take_out()
        self._slots.pop(name, None)

    def trained(self, name: str) -> Tensors:
        """Return copies of a slot's tensors without padding: adapters of layers that it trains, or all weights."""
        self._take_out()
        slot = self._slots[name]
        whole = self._whole(slot.tensors)
        return {key: tensor.clone() for key, tensor in self._unpadded(slot.adapter, whole).items()}

    def state(self, name: str) -> tuple[Tensors, int]:
        """Return a slot's tensors and Adam's state, without padding and gradients, and its number of updates."""
        self._take_out()
        slot = self._slots[name]
        found = self._unpadded(slot.adapter, self._whole(slot.tensors))
        for moment in MOMENTS if slot.moments else ():
            whole = self._whole({key: slot.moments[f"{key}.{moment}"] for key in slot.tensors})
            found |= {f"{key}.{moment}": tensor for key, tensor in self._unpadded(slot.adapter, whole).items()}
        found |= {f"{key}.step": step.reshape(1) for key, step in self._steps(slot).items() if key in found}
        return {key: tensor.contiguous() for key, tensor in found.items()}, slot.num_updates

    def _steps(self, slot: ModelSlot) -> Tensors:
        """Return Adam's number of steps by names of whole tensors."""
        return slot.steps

    def load(self, name: str, adapter: TrainedLayers, tensors: Mapping[str, torch.Tensor], *, num_updates: int) -> None:
        """Make a slot of what `state` returned; of tensors alone, one with a new optimizer.

        Raises:
            ConfigError: As for `create`, or tensors are missing or of another shape.
        """
        self.create(name, adapter)
        slot, padded = self._slots[name], self._zeros()
        places = self._unpadded(adapter, padded)
        if missing := sorted(key for key in places if key not in tensors or tensors[key].shape != places[key].shape):
            raise ConfigError(f"the saved weights do not fit this model: {missing[0]} is missing or of another shape")
        for key, place in places.items():
            place.copy_(tensors[key])
        slot.tensors, slot.num_updates = self._shards(padded), num_updates
        if any(key.endswith(".exp_avg") for key in tensors):
            self._load_moments(slot, tensors)

    def _load_moments(self, slot: ModelSlot, tensors: Mapping[str, torch.Tensor]) -> None:
        for moment in MOMENTS:
            moments = self._zeros()
            for key, place in self._unpadded(slot.adapter, moments).items():
                place.copy_(tensors[f"{key}.{moment}"])
            slot.moments |= {f"{key}.{moment}": tensor for key, tensor in self._shards(moments).items()}
        steps = {key.removesuffix(".step"): tensors[key].reshape(()) for key in tensors if key.endswith(".step")}
        last = max(steps.values(), default=torch.zeros(()))
        slot.steps = {key: steps.get(key, last).clone() for key in self._initial}

    def _unpadded(self, adapter: TrainedLayers, tensors: Mapping[str, torch.Tensor]) -> Tensors:
        """Return views of the parts of tensors that a slot trains."""
        if not adapter.rank:
            return dict(tensors)
        head, found = self._model.get_output_embeddings(), {}
        for layer, module in self._layers():
            if adapter.trains(layer, is_head=module is head):
                found[f"{layer}.lora_A"] = tensors[f"{layer}.lora_A"][: adapter.rank]
                found[f"{layer}.lora_B"] = tensors[f"{layer}.lora_B"][:, : adapter.rank]
        return found


class MegatronSlotTable(SlotTable):
    """The slots of a Megatron engine that trains all weights.

    Slots have this process's parts under Megatron's names; what is saved has Hugging Face names.
    """

    def _zeros(self) -> Tensors:
        return {name: torch.zeros_like(tensor) for name, tensor in self._whole(self._initial).items()}

    def _shards(self, tensors: Tensors) -> Tensors:
        return self._engine.own_tensors(tensors)

    def _whole(self, parts: Tensors) -> Tensors:
        return self._engine.full_tensors(parts)

    def _take_gradient(self, parameter: Any) -> torch.Tensor | None:
        gradient = parameter.main_grad.clone()
        parameter.main_grad.zero_()
        return gradient

    def _put_gradient(self, parameter: Any, gradient: torch.Tensor | None) -> None:
        parameter.main_grad.zero_() if gradient is None else parameter.main_grad.copy_(gradient)

    def _steps(self, slot: ModelSlot) -> Tensors:
        last = max(slot.steps.values(), default=torch.zeros(()))  # every weight is in every step
        return {name: last.clone() for name in self._whole(slot.tensors)} if slot.steps else {}


def without_optimizer(tensors: Mapping[str, torch.Tensor]) -> Tensors:
    """Return a state without Adam's part."""
    ends = tuple(f".{name}" for name in (*MOMENTS, "step"))
    return {name: tensor for name, tensor in tensors.items() if not name.endswith(ends)}


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _part(tensor: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Return this rank's rows of a whole tensor, as FSDP2 cuts it; memory may be shared."""
    if not isinstance(parameter, DTensor):
        return tensor
    parts, rank = tensor.chunk(parameter.device_mesh.size()), parameter.device_mesh.get_local_rank()
    return parts[rank] if rank < len(parts) else tensor[:0]


def _joined(part: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Return the whole tensor of which each rank has a part. Collective."""
    if not isinstance(parameter, DTensor):
        return part
    of_ranks = DTensor.from_local(
        part, parameter.device_mesh, parameter.placements, shape=parameter.shape, stride=parameter.stride()
    )
    return of_ranks.full_tensor()
