"""A transport outside the package, in one file: each push is one file of torch.

python -m hybridrl.main_ppo actor_rollout_ref.rollout.weight_sync.transport=path/to/toy_transport.py:ToyTransport \
    actor_rollout_ref.rollout.weight_sync.directory=/shared/weights ...
"""

import os

import torch

from hybridrl.workers.weight_transfer import (
    IncomingWeights,
    OutgoingWeights,
    PushReceipt,
    Receiver,
    ReceiverSetup,
    Sender,
    SenderSetup,
    Transport,
    TransportCapabilities,
)


class ToySender(Sender):
    def __init__(self, setup: SenderSetup) -> None:
        self.setup = setup

    def send(self, version: int, weights: OutgoingWeights) -> PushReceipt:
        tensors = [(name, tensor.clone()) for name, tensor in weights]
        path = f"{self.setup.directory}/version_{version}.pt"
        os.makedirs(self.setup.directory, exist_ok=True)
        torch.save(tensors, path + ".partial")
        os.replace(path + ".partial", path)
        return PushReceipt(self.setup.transport, weights.fingerprint, weights.num_bytes, 1, path)


class ToyReceiver(Receiver):
    def receive(self, version: int, sent: PushReceipt | None) -> IncomingWeights:
        return IncomingWeights(iter(torch.load(sent.stored)), fingerprint=lambda: sent.fingerprint)


class ToyTransport(Transport):
    """Stored: the sender continues at once, and the rollout reads the file whenever it gets the receipt."""

    capabilities = TransportCapabilities(streaming=False, needs_directory=True)

    @staticmethod
    def make_sender(setup: SenderSetup) -> ToySender:
        return ToySender(setup)

    @staticmethod
    def make_receiver(setup: ReceiverSetup, address: None) -> ToyReceiver:
        return ToyReceiver()
