"""Tensor columns that other processes may be reading from the same memory, and how writing to them stays private.

Ray maps a received buffer straight from memory that all readers on the machine share, and maps it *writable*. numpy
refuses to write to it; torch does not know: an in-place write succeeds and changes what every other reader gets from
then on. Copying on arrival would be safe and costs more than sending and receiving together. So a received column is
copied when it is first handed out for anything but reading in this package: whoever only passes a batch on,
concatenates it or picks rows from it never pays. torch's own copy-on-write storage (`torch._lazy_clone`) refuses memory
that torch did not allocate.

Numeric array columns are copied on arrival, they are small. Arrays inside object columns and inside meta_info stay
read-only, guarded by numpy: copy one before `torch.from_numpy`.
"""

import threading
from collections.abc import Iterable

import numpy as np
import torch
from tensordict import TensorDict

from hybridrl.data_plane.columns import jagged_dim

# Two stages of one driver may touch the same received batch at once; both must end up with the same copy.
_COPYING = threading.Lock()


class CopyOnTouch:
    """Holds `batch`, a TensorDict or None, of which some columns may lie in shared memory until
    `batch` is first read.
    """

    @property
    def batch(self) -> TensorDict:
        """The tensor columns, from here on private to this process; None if there are none, which no type checker need
        ask about.
        """
        self._own()
        return self._batch  # type: ignore[return-value]

    @batch.setter
    def batch(self, batch: TensorDict | None) -> None:
        self._batch = batch
        self._shared: set[str] = set()

    def _receive(self, batch: TensorDict, shared: set[str]) -> None:
        """Take a TensorDict whose columns named in `shared` must not be written to."""
        self._batch, self._shared = batch, shared

    def _own(self, names: Iterable[str] | None = None) -> None:
        """Copy the named columns (default: all) out of shared memory."""
        if not self._shared:
            return
        with _COPYING:
            for name in self._shared & set(self._shared if names is None else names):
                self._batch.set(name, own_copy(self._batch.get(name)))
                self._shared.discard(name)

    def _tensors(self) -> dict[str, torch.Tensor]:
        """The tensor columns for reading only."""
        return {} if self._batch is None else dict(self._batch.items())


def own_copy(column: torch.Tensor) -> torch.Tensor:
    """A copy of a received column.

    numpy allocates it: it asks the kernel for huge pages, and a fresh page fault is what copying costs.
    """
    if column.is_nested:
        values, offsets = (
            own_copy(column.values()),
            own_copy(column.offsets()),
        )  # clone() would leave the offsets where they are
        return torch.nested.nested_tensor_from_jagged(values, offsets, jagged_dim=jagged_dim(column))
    if not column.nbytes:
        return column.clone()
    copy = torch.from_numpy(np.empty(column.nbytes, dtype=np.uint8))
    copy.copy_(column.reshape(-1).view(torch.uint8))
    return copy.view(column.dtype).view(column.shape)
