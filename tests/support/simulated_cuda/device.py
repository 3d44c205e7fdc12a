"""A simulated CUDA device, to run the code for CUDA on a machine without one.

A `SimulatedTensor` says that it is on cuda:0, and has its values in a tensor of the CPU. An operation on one of them
and on a tensor of the CPU raises, as on a real device: this finds masks, indices and states that stayed on the CPU.
`install` needs a build of torch with CUDA, and g++, but no driver. Nothing is found out about kernels, streams, speed,
peaks of memory, vLLM, or transports between processes.
"""

import contextlib
import ctypes
import functools
import gc
import subprocess
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch.nn.attention import flex_attention as flex
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

CUDA = torch.device("cuda", 0)
GIB = 2**30
OPS = torch.ops.aten
INDEXED = (OPS.index.Tensor, OPS.index_put.default, OPS.index_put_.default, OPS._index_put_impl_.default)
INDICES = (torch.int32, torch.int64, torch.bool)  # CUDA takes those of the CPU


class SimulatedTensor(torch.Tensor):
    """A tensor of cuda:0.

    Attributes:
        values: The tensor of the CPU that has its values, with the same shape and strides.
    """

    values: torch.Tensor

    @staticmethod
    def __new__(cls, values: torch.Tensor) -> "SimulatedTensor":
        layout = {"strides": values.stride(), "storage_offset": values.storage_offset(), "layout": values.layout}
        tensor = torch.Tensor._make_wrapper_subclass(cls, values.size(), dtype=values.dtype, device=CUDA, **layout)
        tensor.values = values
        return tensor

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"SimulatedTensor({self.values})"

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["values"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, torch.Tensor], *_: Any) -> "SimulatedTensor":
        return SimulatedTensor(inner["values"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with SimulatedDevice():
            return func(*args, **(kwargs or {}))


class SimulatedDevice(TorchDispatchMode):
    """Computes on the CPU what is asked of cuda:0, and refuses what a device would refuse."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if any(one.__name__ == "FakeTensor" for one in types):
            return func(*args, **kwargs)
        if any(one not in (SimulatedTensor, torch.Tensor, torch.nn.Parameter) for one in types):
            return NotImplemented  # DTensor comes here again with its local tensors
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        known = {id(_values(tensor)): tensor for tensor in tensors if isinstance(tensor, SimulatedTensor)}
        if known and func is not OPS.copy_.default:
            takes_indices = func in INDEXED and isinstance(args[0], SimulatedTensor)
            _refuse_others(func, tensors, INDICES if takes_indices else ())
        devices = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.device)]
        on_device = devices[0].type == "cuda" if devices else bool(known)
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        args, kwargs = tree_map_only(SimulatedTensor, _values, (args, kwargs))
        args, kwargs = tree_map_only(torch.device, lambda one: torch.device("cpu"), (args, kwargs))
        found = func(*args, **kwargs)
        if func is OPS.copy_.default:
            return tensors[0]
        return tree_map_only(torch.Tensor, lambda one: _wrapped(one, known), found) if on_device else found


def _values(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.values if isinstance(tensor, SimulatedTensor) else tensor


def _wrapped(values: torch.Tensor, known: dict[int, torch.Tensor]) -> torch.Tensor:
    """Return the tensor of the device; an operation in place returns the one that it got."""
    return known[id(values)] if id(values) in known else SimulatedTensor(values)


def _refuse_others(func: Any, tensors: list[torch.Tensor], taken: tuple[torch.dtype, ...]) -> None:
    """Raise for tensors of the CPU, except for numbers and for these types."""
    others = [one for one in tensors if not isinstance(one, SimulatedTensor)]
    if wrong := [one for one in others if one.dim() and one.dtype not in taken]:
        shapes = ", ".join(f"{one.dtype} {tuple(one.shape)}" for one in wrong)
        raise RuntimeError(f"{func}: some tensors are on cuda:0, and these on the CPU: {shapes}")


def dense_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, block_mask: Any, scale: float, enable_gqa: bool
) -> torch.Tensor:
    """Return what FlexAttention computes, with a mask of all pairs."""
    sizes = query.shape[-2], key.shape[-2]
    mask = flex.create_mask(block_mask.mask_mod, 1, 1, *sizes, device=str(query.device))
    settings = {"attn_mask": mask, "scale": scale, "enable_gqa": enable_gqa}
    return torch.nn.functional.scaled_dot_product_attention(query, key, value, **settings)


def allocated_bytes(*_: Any) -> int:
    """Return the bytes of the tensors that Python code can reach, without those that autograd keeps."""
    found = [one.values.untyped_storage() for one in gc.get_objects() if isinstance(one, SimulatedTensor)]
    return sum({storage._cdata: storage.nbytes() for storage in found}.values())


class _Generator(torch._C.Generator):
    def __new__(cls, device: Any = "cpu") -> "_Generator":
        return super().__new__(cls, "cpu")


class _Nothing:
    """A stream, an event, or the choice of the only device; all work has always finished."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.device = CUDA

    def __enter__(self) -> "_Nothing":
        return self

    def __exit__(self, *_: object) -> None: ...

    def query(self) -> bool:
        return True

    def record_event(self, event: Any = None) -> Any:
        return event or self

    def elapsed_time(self, _: Any) -> float:
        return 1.0

    def nothing(self, *_: Any) -> None: ...

    wait_stream = wait_event = synchronize = record = wait = nothing


PROPERTIES = SimpleNamespace(
    name="simulated", total_memory=80 * GIB, uuid="0", major=9, minor=0, multi_processor_count=1
)
FUNCTIONS: dict[str, Any] = {
    **dict.fromkeys(("is_available", "is_initialized", "is_bf16_supported"), lambda *_, **__: True),
    **dict.fromkeys(("set_device", "synchronize", "empty_cache", "reset_peak_memory_stats"), lambda *_, **__: None),
    **dict.fromkeys(("_lazy_init", "manual_seed", "manual_seed_all", "set_rng_state"), lambda *_, **__: None),
    **dict.fromkeys(("max_memory_allocated", "memory_reserved", "max_memory_reserved"), lambda *_: 0),
    **dict.fromkeys(("current_stream", "default_stream"), lambda *_: _Nothing()),
    **{name: type(name, (_Nothing,), {}) for name in ("Stream", "Event", "device")},
    "stream": lambda _: contextlib.nullcontext(),
    "current_device": lambda: 0,
    "device_count": lambda: 1,
    "memory_allocated": allocated_bytes,
    "mem_get_info": lambda *_: (70 * GIB, 80 * GIB),
    "get_device_name": lambda *_: PROPERTIES.name,
    "get_device_properties": lambda *_: PROPERTIES,
    "get_device_capability": lambda *_: (PROPERTIES.major, PROPERTIES.minor),
    "get_rng_state": lambda *_: torch.zeros(16, dtype=torch.uint8),
}


def install() -> None:
    """Simulate the device for the rest of this process.

    Raises:
        RuntimeError: torch was built without CUDA, or there is a real device.
    """
    if torch.version.cuda is None or torch.cuda.is_available():
        raise RuntimeError("a device is simulated with a build of torch for CUDA, on a machine without one")
    _use_guard()
    torch.autograd.set_multithreading_enabled(False)
    torch._C._set_only_lift_cpu_tensors(True)  # torch.tensor(..., device="cuda") makes one of the CPU, and moves it
    torch.Generator = _Generator  # type: ignore[misc]
    for name, function in FUNCTIONS.items():
        own = function if isinstance(function, type) else functools.partial(function)  # torch tells them apart by id
        setattr(torch.cuda, name, own)
    for name in ("tolist", "untyped_storage", "data_ptr"):
        setattr(torch.Tensor, name, _of_values(getattr(torch.Tensor, name)))
    torch.Tensor.data = property(_data, _set_data)  # type: ignore[assignment]
    flex.flex_attention, torch.compile = dense_attention, lambda function, **_: function  # type: ignore[assignment]
    SimulatedDevice().__enter__()


def _use_guard() -> None:
    torch_folder = Path(torch.__file__).parent
    with tempfile.TemporaryDirectory() as folder:
        library = f"{folder}/guard.so"
        command = ["g++", "-std=c++20", "-shared", "-fPIC", f"-I{torch_folder / 'include'}"]
        subprocess.run([*command, str(Path(__file__).with_name("guard.cpp")), "-o", library], check=True, timeout=600)
        for name in ("libc10.so", "libtorch_cpu.so"):
            ctypes.CDLL(str(torch_folder / "lib" / name), mode=ctypes.RTLD_GLOBAL)
        ctypes.CDLL(library).use_simulated_guard()


def _of_values(method: Any) -> Any:
    return lambda tensor: method(_values(tensor))


_plain_data = torch._C.TensorBase.data


def _data(tensor: torch.Tensor) -> torch.Tensor:
    if isinstance(tensor, SimulatedTensor):
        return SimulatedTensor(tensor.values.detach())
    return _plain_data.__get__(tensor)  # type: ignore[attr-defined]


def _set_data(tensor: torch.Tensor, value: torch.Tensor) -> None:
    if isinstance(tensor, SimulatedTensor) == isinstance(value, SimulatedTensor):
        _plain_data.__set__(tensor, value)  # type: ignore[attr-defined]
        if isinstance(tensor, SimulatedTensor):
            tensor.values = _values(value)
        return
    is_parameter = isinstance(tensor, torch.nn.Parameter)
    other = torch.nn.Parameter(value.detach(), tensor.requires_grad) if is_parameter else value.detach()
    torch.utils.swap_tensors(tensor, other)
