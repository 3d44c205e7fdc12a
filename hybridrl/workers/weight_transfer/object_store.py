"""A stored transport through Ray's object store: each bucket is one object.

Receivers on the same machine map an object, receivers elsewhere fetch it. Ray frees objects without references, so
pushes that are never fetched do not accumulate.
"""

from collections.abc import Iterator

import numpy as np
import torch

from hybridrl.config.capabilities import TransportCapabilities
from hybridrl.errors import ObjectLost, WorkerLost
from hybridrl.single_controller.awaiting import wait_all
from hybridrl.workers.weight_transfer import base
from hybridrl.workers.weight_transfer.buckets import Bucket, OutgoingWeights, unpack
from hybridrl.workers.weight_transfer.fingerprint import NamedTensor

NAME = "object_store"


class ObjectStoreSender(base.Sender):
    """The trainer's side; see `base.Sender`.

    bucket_bytes: size of a bucket, and of this process's memory for it.
    """

    def __init__(self, *, bucket_bytes: int):
        self._bucket_bytes = bucket_bytes

    def send(self, version: int, weights: OutgoingWeights) -> base.PushReceipt:
        stored = base.store_buckets(weights, num_bytes=self._bucket_bytes, store=_put)
        return base.PushReceipt(NAME, weights.fingerprint, weights.num_bytes, len(stored), stored)


class ObjectStoreReceiver(base.StoredReceiver):
    """A rollout's side; see `base.Receiver`."""

    def __init__(self, *, timeout_s: float):
        self._timeout_s = timeout_s

    def tensors(self, sent: base.PushReceipt) -> Iterator[NamedTensor]:
        """Yield the weights of a push.

        Raises:
            CallTimeout: A bucket was late.
            WorkerLost: The sender died, and a bucket with it.
        """
        for entries, reference in sent.stored:
            try:
                (array,) = wait_all([reference], role="actor", method="send_weights", timeout_s=self._timeout_s)
            except ObjectLost as error:
                raise WorkerLost(
                    "actor", 0, "send_weights", f"its weights in the object store were lost with it ({error})"
                ) from error
            # By DLPack, because other conversions warn about read-only memory. Engines only read it.
            yield from unpack(Bucket(entries, torch.from_dlpack(np.asarray(array))))


class ObjectStoreTransport(base.Transport):
    """See the module."""

    capabilities = TransportCapabilities(streaming=False)

    @staticmethod
    def make_sender(setup: base.SenderSetup) -> ObjectStoreSender:
        return ObjectStoreSender(bucket_bytes=setup.bucket_bytes)

    @staticmethod
    def make_receiver(setup: base.ReceiverSetup, address: None) -> ObjectStoreReceiver:
        return ObjectStoreReceiver(timeout_s=setup.timeout_s)


def _put(number: int, bucket: Bucket) -> tuple:
    import ray

    return bucket.entries, ray.put(bucket.data.numpy())
