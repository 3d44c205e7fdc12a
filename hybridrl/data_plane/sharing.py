"""Keep writes to received tensor columns private to the process.

Ray maps a received buffer straight from memory that all readers on the machine share, and maps it *writable*. numpy
refuses to write to it. torch does not: an in-place write succeeds and changes what every other reader gets from then
on. Copying on arrival would be safe but costs more than sending and receiving together. So a received column is copied
when it is first handed out for anything but reading in this package. Code that only forwards a batch, concatenates it
or selects rows never pays. torch's own copy-on-write storage (`torch._lazy_clone`) refuses memory that torch did not
allocate.

Numeric array columns are small and copied on arrival. Arrays inside object columns and inside meta_info stay read-only,
enforced by numpy: copy one before `torch.from_numpy`.
"""

import threading
from collections.abc import Iterable
from typing import cast

import numpy as np
import torch
from tensordict import TensorDict

from hybridrl.data_plane.columns import jagged_dim, jagged_offsets

# Two threads of a driver may read the same received batch at once; both must get the same copy.
_COPYING = threading.Lock()


class CopyOnWrite:
    """Holder of `batch`, whose columns may be in shared memory until it is first read."""

    @property
    def batch(self) -> TensorDict:
        """The tensor columns, private to this process from now on.

        None if there are no columns; the annotation omits this.
        """
        self._make_private()
        return self._batch  # type: ignore[return-value]

    @batch.setter
    def batch(self, batch: TensorDict | None) -> None:
        self._batch = batch
        self._shared: set[str] = set()

    def _set_shared(self, batch: TensorDict, shared: set[str]) -> None:
        """Set a TensorDict whose columns named in `shared` must not be written to."""
        self._batch, self._shared = batch, shared

    def _make_private(self, names: Iterable[str] | None = None) -> None:
        """Copy the named columns (default: all) out of shared memory."""
        if self._batch is None or not self._shared:
            return
        with _COPYING:
            for name in self._shared & set(self._shared if names is None else names):
                self._batch.set(name, private_copy(self._batch.get(name)))
                self._shared.discard(name)

    def _tensors(self) -> dict[str, torch.Tensor]:
        """Return the tensor columns, for reading only."""
        return {} if self._batch is None else cast(dict[str, torch.Tensor], dict(self._batch.items()))


def private_copy(column: torch.Tensor) -> torch.Tensor:
    """Return a copy of a received column.

    numpy allocates it, because it asks the kernel for huge pages: page faults dominate the cost of copying.
    """
    if column.is_nested:
        # clone() would not copy the offsets.
        values, offsets = private_copy(column.values()), private_copy(jagged_offsets(column))
        return torch.nested.nested_tensor_from_jagged(values, offsets, jagged_dim=jagged_dim(column))
    if not column.nbytes:
        return column.clone()
    copy = torch.from_numpy(np.empty(column.nbytes, dtype=np.uint8))
    copy.copy_(column.reshape(-1).view(torch.uint8))
    return copy.view(column.dtype).view(column.shape)
