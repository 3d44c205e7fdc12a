"""Weights through Ray's object store: a stored transport. Each bucket is an object; receivers on the same machine map
it, receivers elsewhere fetch it. What nobody refers to any more is freed, so pushes that are never fetched cost nothing
for long.
"""

from collections.abc import Iterator

import numpy as np
import torch

from hybridrl.errors import WorkerLost
from hybridrl.single_controller.awaiting import gather
from hybridrl.workers.weight_transfer.base import Incoming, Sent, store_buckets
from hybridrl.workers.weight_transfer.buckets import Bucket, Outgoing, unpack
from hybridrl.workers.weight_transfer.fingerprint import Named

NAME = "object_store"


class ObjectStoreSender:
    """bucket_bytes: size of a bucket, and of this process's memory for it."""

    def __init__(self, *, bucket_bytes: int):
        self._bucket_bytes = bucket_bytes

    def send(self, version: int, weights: Outgoing) -> Sent:
        parts = store_buckets(weights, num_bytes=self._bucket_bytes, store=_put)
        return Sent(NAME, weights.fingerprint, weights.num_bytes, len(parts), parts)

    def close(self) -> None:
        """Nothing: what was stored belongs to whoever refers to it."""


def receive(sent: Sent, *, timeout_s: float) -> Incoming:
    """Return the weights; a bucket that does not come in time is a CallTimeout, one whose sender died a WorkerLost."""
    return Incoming(_tensors(sent, timeout_s), fingerprint=lambda: sent.fingerprint)


def _put(number: int, bucket: Bucket) -> tuple:
    import ray

    return bucket.entries, ray.put(bucket.data.numpy())


def _tensors(sent: Sent, timeout_s: float) -> Iterator[Named]:
    from ray.exceptions import ObjectLostError

    for entries, reference in sent.parts:
        try:
            (array,) = gather([reference], role="actor", method="send_weights", timeout_s=timeout_s)
        except ObjectLostError as error:
            raise WorkerLost(
                "actor", 0, "send_weights", f"its weights in the object store went with it ({error})"
            ) from error
        # By DLPack, because the other ways warn about read-only memory; engines only read it.
        yield from unpack(Bucket(entries, torch.from_dlpack(np.asarray(array))))
