"""Buckets of weights: named tensors end to end in a flat byte buffer.

So one copy or collective moves many.

No process ever needs memory for the whole model twice. On the sender `OutgoingWeights` casts to the rollout's dtype,
counts bytes and fingerprints, and `fill_buckets` packs. On the receiver `unpack` returns the tensors.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from hybridrl.workers.weight_transfer.fingerprint import Dtypes, NamedTensor, as_pushed, pushed_dtype, tensor_hash

ALIGNMENT = 64  # bytes: suits a tensor of any dtype, and gives the fastest copies


@dataclass(frozen=True)
class TensorEntry:
    """The position of a tensor in a bucket's bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int


@dataclass(frozen=True)
class Bucket:
    """Some tensors and their bytes: data (n,) uint8, valid until the next bucket is requested."""

    entries: tuple[TensorEntry, ...]
    data: torch.Tensor


class OutgoingWeights:
    """Weights as they leave the trainer; floating-point ones are cast by `as_pushed`.

    Iterate once, then read `fingerprint` and `num_bytes`.
    """

    def __init__(self, weights: Iterable[NamedTensor], dtype: Dtypes):
        self._weights, self._dtype = iter(weights), dtype
        self._total = 0
        self.num_bytes = 0

    def __iter__(self) -> Iterator[NamedTensor]:
        for name, tensor in self._weights:
            sent = as_pushed(name, tensor, self._dtype) if tensor.is_floating_point() else tensor.detach()
            self._total += tensor_hash(sent, pushed_dtype(name, self._dtype))
            self.num_bytes += sent.nbytes
            yield name, sent

    def drain(self) -> None:
        """Consume the remaining weights without sending them.

        Iterating may be a collective call of all training ranks, so a rank that stops early would block the others.
        """
        for _ in self._weights:
            pass

    @property
    def fingerprint(self) -> int:
        """The fingerprint of the tensors yielded so far; see `fingerprint.fingerprint`."""
        return self._total % (1 << 64)


def fill_buckets(
    weights: Iterable[NamedTensor], *, num_bytes: int, buffer: Callable[[int], torch.Tensor]
) -> Iterator[Bucket]:
    """Yield buckets of at most `num_bytes` bytes; a larger tensor gets a bucket of its own.

    Args:
        weights: to pack, in order.
        num_bytes: size of a bucket.
        buffer: called with a size in bytes at the start of a bucket. Returns at least that much memory (uint8,
            aligned), which may be that of an earlier bucket.
    """
    entries: list[TensorEntry] = []
    data, used = torch.empty(0, dtype=torch.uint8), 0
    for name, tensor in weights:
        end = used + tensor.nbytes
        if entries and end > len(data):
            yield Bucket(tuple(entries), data[:used])
            entries, used, end = [], 0, tensor.nbytes
        if not entries:
            data = buffer(max(num_bytes, end))
        data[used:end].view(tensor.dtype).view(tensor.shape).copy_(tensor)
        entries.append(TensorEntry(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), used))
        used = min(len(data), -(-end // ALIGNMENT) * ALIGNMENT)
    if entries:
        yield Bucket(tuple(entries), data[:used])


def unpack(bucket: Bucket) -> Iterator[NamedTensor]:
    """Yield the bucket's tensors, as views of its bytes."""
    for entry in bucket.entries:
        dtype, size = getattr(torch, entry.dtype), torch.Size(entry.shape)
        yield (
            entry.name,
            bucket.data[entry.offset : entry.offset + size.numel() * dtype.itemsize].view(dtype).view(size),
        )


def entries_to_json(entries: Iterable[TensorEntry]) -> list[list]:
    """Return the entries as JSON-compatible lists."""
    return [[e.name, e.dtype, list(e.shape), e.offset] for e in entries]


def entries_from_json(rows: list[list[Any]]) -> tuple[TensorEntry, ...]:
    """Return the entries that `entries_to_json` wrote."""
    return tuple(TensorEntry(name, dtype, tuple(shape), offset) for name, dtype, shape, offset in rows)
