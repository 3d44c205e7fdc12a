"""Weights on their way, bucket by bucket: named tensors laid end to end in a flat buffer of bytes, so that one copy or
one collective carries many of them and no process ever needs room for the whole model twice.

The way out: `Outgoing` casts to the rollout's dtype, counts and fingerprints; `fill_buckets` packs. The way in:
`unpack`.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from hybridrl.workers.weight_transfer.fingerprint import Named, pushed_dtype, tensor_hash

ALIGNMENT = 64  # bytes: a tensor of any dtype may start there, and copies are as fast as they get


@dataclass(frozen=True)
class Entry:
    """Where in a bucket's bytes a tensor lies."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int


@dataclass(frozen=True)
class Bucket:
    """Some tensors and their bytes: data (n,) uint8, valid until the next bucket is asked for."""

    entries: tuple[Entry, ...]
    data: torch.Tensor


class Outgoing:
    """Weights as they leave the trainer: floating-point ones in `pushed_dtype`.

    Iterate once, then ask for `fingerprint`.
    """

    def __init__(self, weights: Iterable[Named], dtype: torch.dtype):
        self._weights, self._dtype = iter(weights), dtype
        self._total = 0
        self.num_bytes = 0

    def __iter__(self) -> Iterator[Named]:
        for name, tensor in self._weights:
            sent, dtype = tensor.detach(), pushed_dtype(name, self._dtype)
            if sent.is_floating_point():
                sent = sent.to(dtype)
            self._total += tensor_hash(sent, dtype)
            self.num_bytes += sent.nbytes
            yield name, sent

    def drain(self) -> None:
        """Take what is left without sending it: iterating may be a collective of all training ranks, who must not be
        left waiting.
        """
        for _ in self._weights:
            pass

    @property
    def fingerprint(self) -> int:
        """Return the fingerprint of what was passed on so far; see `fingerprint`."""
        return self._total % (1 << 64)


def fill_buckets(
    weights: Iterable[Named], *, num_bytes: int, buffer: Callable[[int], torch.Tensor]
) -> Iterator[Bucket]:
    """Yield buckets of at most `num_bytes` bytes; a tensor that is larger gets a bucket of its own.

    buffer: called with a size in bytes when a bucket is begun; returns (at least) that much memory, uint8, aligned,
    which may be that of an earlier bucket.
    """
    entries: list[Entry] = []
    data, used = torch.empty(0, dtype=torch.uint8), 0
    for name, tensor in weights:
        end = used + tensor.nbytes
        if entries and end > len(data):
            yield Bucket(tuple(entries), data[:used])
            entries, used, end = [], 0, tensor.nbytes
        if not entries:
            data = buffer(max(num_bytes, end))
        data[used:end].view(tensor.dtype).view(tensor.shape).copy_(tensor)
        entries.append(Entry(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), used))
        used = min(len(data), -(-end // ALIGNMENT) * ALIGNMENT)
    if entries:
        yield Bucket(tuple(entries), data[:used])


def unpack(bucket: Bucket) -> Iterator[Named]:
    """Yield the bucket's tensors, as views of its bytes."""
    for entry in bucket.entries:
        dtype, size = getattr(torch, entry.dtype), torch.Size(entry.shape)
        yield (
            entry.name,
            bucket.data[entry.offset : entry.offset + size.numel() * dtype.itemsize].view(dtype).view(size),
        )


def entries_to_json(entries: Iterable[Entry]) -> list[list]:
    return [[e.name, e.dtype, list(e.shape), e.offset] for e in entries]


def entries_from_json(rows: list[list[Any]]) -> tuple[Entry, ...]:
    return tuple(Entry(name, dtype, tuple(shape), offset) for name, dtype, shape, offset in rows)
