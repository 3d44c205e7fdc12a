"""Serialize a message's contents once for any number of receivers; each receiver loads a private copy.

Small contents travel with the message. Large ones are put into Ray's object store once, and every receiver maps them
from there. Arrays and tensors travel as raw bytes next to the pickle; a tensor arrives on the CPU. Torch is used only
if it is already loaded; it is not imported here.
"""

import io
import pickle
import sys
from dataclasses import dataclass
from typing import Any

import cloudpickle
import numpy as np

from hybridrl.single_controller.cluster import get_value

# Ray stores larger arguments in the object store, once per receiver; above this size `serialize` does it once for all.
INLINE_BYTES = 100_000
# The object is in the store of the sender's node; a wait of minutes means that this node is lost.
FETCH_TIMEOUT_S = 300.0


@dataclass(frozen=True)
class SerializedMessage:
    """Contents as bytes.

    Attributes:
        num_bytes: Total size.
        stored: [reference] to [pickle, buffers...] in the object store, instead of `pickled` and `buffers`.
    """

    num_bytes: int
    pickled: bytes = b""
    buffers: tuple[bytes, ...] = ()
    stored: tuple = ()

    def load(self) -> Any:
        """Return a private copy of the contents.

        Raises:
            CallTimeout: The object store did not answer; other errors of Ray mean that the object is lost.
        """
        pickled, buffers = self.pickled, self.buffers
        if self.stored:
            pickled, *buffers = get_value(self.stored[0], what="a stored message", timeout_s=FETCH_TIMEOUT_S)
        # numpy's copy takes half the time of a bytearray's.
        return pickle.loads(pickled, buffers=[np.array(np.frombuffer(buffer, np.uint8)) for buffer in buffers])


def serialize(contents: Any) -> SerializedMessage:
    """Return the contents in their present state as bytes for any number of receivers.

    Contents that cannot be pickled raise pickle's own error.
    """
    buffers: list[pickle.PickleBuffer] = []
    file = io.BytesIO()
    _Pickler(file, protocol=5, buffer_callback=buffers.append).dump(contents)
    num_bytes = file.tell() + sum(buffer.raw().nbytes for buffer in buffers)
    if num_bytes <= INLINE_BYTES:
        return SerializedMessage(num_bytes, file.getvalue(), tuple(bytes(buffer.raw()) for buffer in buffers))
    import ray

    return SerializedMessage(num_bytes, stored=(ray.put([file.getvalue(), *buffers]),))


class _Pickler(cloudpickle.Pickler):
    """Passes tensors as out-of-band buffers; torch's own reducer would copy them into the pickle."""

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
    """Return whether shape, dtype and bytes describe the tensor completely.

    An empty tensor does not count: there are no bytes from which to rebuild it.
    """
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
