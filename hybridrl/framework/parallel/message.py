"""A message's contents between processes: made into bytes once, whoever many receive it, and private to each receiver
when opened.

Small contents travel with the message. Large ones are put into the object store once and every receiver maps them from
there. Arrays and tensors travel as their own bytes beside the pickle; a tensor arrives on the CPU. Torch is used where
it is loaded already, and is not imported.
"""

import io
import pickle
import sys
from dataclasses import dataclass
from typing import Any

import cloudpickle
import numpy as np

# Ray itself stores larger arguments apart, once for each receiver; from here on that is done once for all.
INLINE_BYTES = 100_000
# The object is in the store of the sender's node; minutes mean that this node is gone.
FETCH_TIMEOUT_S = 300.0


@dataclass(frozen=True)
class Parcel:
    """Contents as bytes. stored: [reference] to [pickle, buffers...] in the object store, in place of both."""

    num_bytes: int
    pickled: bytes = b""
    buffers: tuple[bytes, ...] = ()
    stored: tuple = ()

    def open(self) -> Any:
        """Return the contents, in memory that belongs to this process alone.

        Raises CallTimeout or the store's error if they are gone.
        """
        pickled, buffers = self.pickled, self.buffers
        if self.stored:
            import ray

            pickled, *buffers = ray.get(self.stored[0], timeout=FETCH_TIMEOUT_S)
        # numpy's copy takes half as long as a bytearray's.
        return pickle.loads(pickled, buffers=[np.array(np.frombuffer(buffer, np.uint8)) for buffer in buffers])


def pack(contents: Any) -> Parcel:
    """Return contents as they are now as a parcel for any number of receivers.

    What cannot be pickled raises pickle's own error.
    """
    buffers: list[pickle.PickleBuffer] = []
    file = io.BytesIO()
    _Pickler(file, protocol=5, buffer_callback=buffers.append).dump(contents)
    num_bytes = file.tell() + sum(buffer.raw().nbytes for buffer in buffers)
    if num_bytes <= INLINE_BYTES:
        return Parcel(num_bytes, file.getvalue(), tuple(bytes(buffer.raw()) for buffer in buffers))
    import ray

    return Parcel(num_bytes, stored=(ray.put([file.getvalue(), *buffers]),))


class _Pickler(cloudpickle.Pickler):
    """Tensors leave their bytes beside the pickle; torch's own way copies them into it."""

    def reducer_override(self, obj: Any) -> Any:
        torch = sys.modules.get("torch")
        if torch is None or type(obj) is not torch.Tensor or not _is_plain(obj, torch):
            return super().reducer_override(obj)
        flat = obj.detach().cpu().contiguous().reshape(-1)
        return _unflatten, (
            torch.frombuffer,
            obj.dtype,
            tuple(obj.shape),
            pickle.PickleBuffer(flat.view(torch.uint8).numpy()),
        )


def _is_plain(tensor: Any, torch: Any) -> bool:
    """Whether shape, dtype and bytes are all there is to know. An empty one has no bytes to make a tensor from."""
    return (
        tensor.layout is torch.strided
        and tensor.device.type in ("cpu", "cuda")
        and not (
            tensor.requires_grad or tensor.is_complex() or tensor.is_neg() or tensor.is_quantized or tensor.is_nested
        )
        and tensor.numel() > 0
    )


def _unflatten(frombuffer: Any, dtype: Any, shape: tuple[int, ...], buffer: bytearray) -> Any:
    return frombuffer(buffer, dtype=dtype).reshape(shape)
