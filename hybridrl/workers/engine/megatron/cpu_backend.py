"""Run megatron-core on a machine without CUDA: gloo process groups, tensors on the CPU.

`parallel_groups` calls it in worker processes. It refuses to act where CUDA is available.

megatron-core names the accelerator in four ways: `torch.cuda.f()`, `device="cuda"`, `tensor.cuda()` and `tensor.type()
== "torch.cuda.FloatTensor"`. Without CUDA each of them raises or is false, so redirecting them to the CPU breaks
nothing. The first two are replaced only in the `torch` that modules of megatron-core see, also in those imported later.
The two tensor methods change for the whole process; only processes that run megatron-core call this.

Two simpler ways fail. A TorchFunctionMode is off inside `autograd.backward`, where recomputation runs. Patching the
modules imported so far misses those that megatron-core imports later.
"""

import contextlib
import importlib.machinery
import logging
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch

from hybridrl.errors import ConfigError

PACKAGE = "megatron.core"
CPU = torch.device("cpu")


def patch_cuda_to_cpu() -> None:
    """Make megatron-core in this process compute on the CPU. Idempotent.

    Raises:
        ConfigError: CUDA is available.
    """
    if torch.cuda.is_available():
        raise ConfigError(
            "trainer.device=cpu: with strategy=megatron a process that sees CUDA computes there; set "
            "trainer.device=cuda, or hide the devices with CUDA_VISIBLE_DEVICES=''"
        )
    if any(isinstance(finder, _TorchSwapFinder) for finder in sys.meta_path):
        return
    sys.meta_path.insert(0, _TorchSwapFinder())
    for name, module in list(sys.modules.items()):
        if name.startswith(PACKAGE):
            _swap_torch(module)
    random: Any = importlib.import_module(f"{PACKAGE}.tensor_parallel.random")
    random._get_cuda_rng_state, random._set_cuda_rng_state = _get_rng_state, _set_rng_state
    # It warns that the CPU's random state changed; here that is the intended state.
    logging.getLogger(random.__name__).setLevel(logging.ERROR)
    dispatcher: Any = importlib.import_module(f"{PACKAGE}.transformer.moe.token_dispatcher")
    dispatcher.maybe_move_tensor_to_cpu = _counts_to_numpy
    real_type = torch.Tensor.type
    tensor_class: Any = torch.Tensor
    tensor_class.cuda = lambda tensor, *args, **kwargs: tensor
    tensor_class.type = lambda tensor, *args, **kwargs: (
        real_type(tensor, *args, **kwargs) if args or kwargs else real_type(tensor).replace("torch.", "torch.cuda.", 1)
    )


def _counts_to_numpy(tensor: torch.Tensor, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """Return token counts per expert as numpy, as collectives need them.

    megatron-core leaves a CPU tensor a tensor.
    """
    return tensor.numpy() if as_numpy and isinstance(tensor, torch.Tensor) else tensor


class _AttributeOverride:
    """Proxy of an object with some attributes replaced."""

    def __init__(self, real: Any, **replaced: Any):
        self.__dict__.update(replaced, _real=real)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


class _NoOpStream:
    """Stand-in for a CUDA stream or event: the CPU executes in order."""

    def __init__(self, *args: Any, **kwargs: Any):
        pass

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return lambda *args, **kwargs: self


def _on_cpu(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def make(*args: Any, **kwargs: Any) -> torch.Tensor:
        if kwargs.get("device") is not None and torch.device(kwargs["device"]).type == "cuda":
            kwargs["device"] = CPU
        kwargs.pop("pin_memory", None)
        return factory(*args, **kwargs)

    return make


def _get_rng_state(*args: Any, **kwargs: Any) -> torch.Tensor:
    return torch.get_rng_state()


def _set_rng_state(state: torch.Tensor, *args: Any, **kwargs: Any) -> None:
    torch.set_rng_state(state)


_CUDA = _AttributeOverride(
    torch.cuda,
    current_device=lambda: CPU,
    synchronize=lambda *args: None,
    manual_seed=torch.manual_seed,
    get_rng_state=_get_rng_state,
    set_rng_state=_set_rng_state,
    Stream=_NoOpStream,
    Event=_NoOpStream,
    current_stream=_NoOpStream,
    stream=lambda stream: contextlib.nullcontext(),
)
_TORCH = _AttributeOverride(
    torch,
    cuda=_CUDA,
    **{name: _on_cpu(getattr(torch, name)) for name in ("empty", "empty_like", "zeros", "ones", "tensor")},
)


def _swap_torch(module: Any) -> None:
    if getattr(module, "torch", None) is torch:
        module.torch = _TORCH


class _TorchSwapFinder:
    """Import hook that swaps `torch` in megatron-core's modules after they are imported."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        found = importlib.machinery.PathFinder.find_spec(name, path, target) if name.startswith(PACKAGE) else None
        if found is not None and found.loader is not None:
            loader: Any = found.loader
            run = loader.exec_module

            def run_and_swap(module: ModuleType) -> None:
                run(module)
                _swap_torch(module)

            loader.exec_module = run_and_swap
        return found
