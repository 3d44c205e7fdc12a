"""Adapters in vLLM's own layers, several in one engine: a request names its own.

`RolloutExtension` owns a `HeldAdapters`. vLLM computes with a few slots, and gives one to another adapter when all are
taken. It reads the adapter from this module then, not from a directory. Whenever an adapter enters a slot, the slot's
bits are counted and compared with what was sent.

Imported inside vLLM's worker, by `worker_extension`.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.nn import functional as F
from vllm.lora.lora_model import LoRAModel
from vllm.lora.peft_helper import PEFTHelper
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU
from vllm.platforms import current_platform

from hybridrl.errors import StaleWeightsError
from hybridrl.workers.weight_transfer.fingerprint import tensor_hash

Groups = list[tuple[int, Any]]
"""Slot and rows of each adapter's tokens in a step; others have no group."""


class HeldAdapters:
    """The adapters that requests can name.

    Args:
        lora_manager: vLLM's, of the worker.
    """

    def __init__(self, lora_manager: Any):
        self._worker_manager, self._manager = lora_manager, lora_manager._adapter_manager
        self._dtype = self._manager.lora_config.lora_dtype
        self._tensors: dict[int, dict[str, torch.Tensor]] = {}
        self._expected: dict[int, int] = {}
        self._activate = self._manager.activate_adapter
        lora_manager._load_adapter = self._read
        self._manager.activate_adapter = self._activate_verified

    def add(self, number: int, tensors: Mapping[str, torch.Tensor], scale: float) -> None:
        """Hold an adapter and put it into a slot.

        Args:
            number: From 1, never used before.
            tensors: {layer}.lora_A (r, in) and {layer}.lora_B (out, r).
            scale: Factor of B A.

        Raises:
            StaleWeightsError: vLLM does not hold exactly these.
        """
        scaled = {name: tensor * scale if name.endswith(".lora_B") else tensor for name, tensor in tensors.items()}
        self._tensors[number] = {name: tensor.to(self._dtype).contiguous() for name, tensor in scaled.items()}
        self._expected[number] = _hash(self._tensors[number].values())
        try:
            self._manager.remove_adapter(number)
            self._worker_manager.add_adapter(_Named(number))
        except Exception as error:
            self.drop(number)
            raise StaleWeightsError(f"vllm rollout: vLLM does not hold adapter {number}: {error!r}") from error

    def drop(self, number: int) -> None:
        """Forget an adapter that no open request names."""
        self._manager.remove_adapter(number)
        self._tensors.pop(number, None)
        self._expected.pop(number, None)

    def num_bytes(self) -> dict[str, int]:
        """Return the bytes of the held adapters, and those of vLLM's slots."""
        held = sum(tensor.nbytes for tensors in self._tensors.values() for tensor in tensors.values())
        slots = sum(tensor.nbytes for module in self._manager.modules.values() for tensor in _stacked(module))
        return {"held": held, "slots": slots}

    def fingerprint(self, number: int) -> int | None:
        """Return the fingerprint of the slot with an adapter, None if it has no slot."""
        slots = self._manager.lora_index_to_id
        if number not in slots:
            return None
        slot = slots.index(number)
        return _hash(tensor[slot] for module in self._manager.modules.values() for tensor in _stacked(module))

    def use_for_rows(self, number: int, num_rows: int) -> None:
        """Let the next layers compute this many rows with an adapter, 0: none.

        Until vLLM's next step, which says it anew.
        """
        from vllm.lora.layers import LoRAMapping

        rows = (number,) * num_rows
        self._manager.set_adapter_mapping(LoRAMapping(rows, rows, is_prefill=True))

    def _read(self, request: Any) -> LoRAModel:
        number = request.lora_int_id
        tensors = {f"base_model.model.{name}.weight": tensor for name, tensor in self._tensors[number].items()}
        rank = max(len(tensor) for name, tensor in self._tensors[number].items() if name.endswith(".lora_A"))
        mapper = getattr(self._manager.model, "hf_to_vllm_mapper", None)
        return LoRAModel.from_lora_tensors(
            number,
            tensors,
            PEFTHelper(r=rank, lora_alpha=rank, target_modules=[]),  # the scale is in B
            device="cpu",
            dtype=self._dtype,
            weights_mapper=mapper and mapper.get_rename_mapper(),
        )

    def _activate_verified(self, number: int) -> bool:
        is_new = self._activate(number)
        if is_new and number in self._expected and (held := self.fingerprint(number)) != self._expected[number]:
            self._manager.deactivate_adapter(number)
            raise StaleWeightsError(
                f"vllm rollout: adapter {number} has the fingerprint {self._expected[number]:016x}, and vLLM holds "
                f"{held or 0:016x}; it does not compute all of these layers with an adapter"
            )
        return is_new


class _Named:
    """What vLLM's manager reads of a `LoRARequest`."""

    load_inplace = False

    def __init__(self, number: int):
        self.lora_int_id = self.adapter_id = number


def _hash(tensors: Any) -> int:
    return sum(tensor_hash(tensor, tensor.dtype) for tensor in tensors) % (1 << 64)


def _stacked(module: Any) -> Iterator[torch.Tensor]:
    """Yield A and B of all slots of a layer."""
    for part in (module.lora_a_stacked, module.lora_b_stacked):
        yield from (part,) if isinstance(part, torch.Tensor) else part


# vLLM's own functions for the CPU copy A and B for each token, and compute tokens without an adapter with that of the
# last slot. These compute the tokens of each adapter together.


def _groups(slots: torch.Tensor) -> Groups:
    found = slots.unique().tolist()
    if len(found) == 1:
        return [(found[0], slice(None))] if found[0] >= 0 else []
    return [(slot, (slots == slot).nonzero().squeeze(1)) for slot in found if slot >= 0]


def _add(
    y: torch.Tensor, x: torch.Tensor, A: torch.Tensor, B: torch.Tensor, groups: Groups, columns: slice = slice(None)
) -> None:
    for slot, rows in groups:
        added = F.linear(F.linear(x[rows].to(A.dtype), A[slot, 0]), B[slot, 0]).to(y.dtype)
        y[rows, columns] += added


class _GroupedPunica(PunicaWrapperCPU):
    """What `PunicaWrapperCPU` does, by groups."""

    def update_metadata(self, *args: Any, **kwargs: Any) -> None:
        super().update_metadata(*args, **kwargs)
        self._of_tokens, self._of_samples = _groups(self.token_lora_indices), _groups(self.sampler_indices)

    def add_lora_linear(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        lora_a_stacked: tuple[torch.Tensor, ...],
        lora_b_stacked: tuple[torch.Tensor, ...],
        scale: float,
        output_slices: tuple[int, ...],
        **kwargs: Any,
    ) -> None:
        start = 0
        for A, B, size in zip(lora_a_stacked, lora_b_stacked, output_slices, strict=True):
            _add(y, x, A, B, self._of_tokens, slice(start, start + size))
            start += size

    def add_lora_logits(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        lora_a_stacked: torch.Tensor,
        lora_b_stacked: torch.Tensor,
        scale: float,
        **kwargs: Any,
    ) -> None:
        _add(y, x, lora_a_stacked, lora_b_stacked, self._of_samples, slice(lora_b_stacked.shape[2]))  # y has padding


if current_platform.is_cpu():
    current_platform.get_punica_wrapper = lambda: f"{__name__}.{_GroupedPunica.__name__}"  # type: ignore[method-assign]
