"""Transports with one fault each, which `check_transport` must find."""

import time
from dataclasses import replace

import torch

from hybridrl.workers.weight_transfer import IncomingWeights, SenderSetup
from hybridrl.workers.weight_transfer.shared_memory import (
    SharedMemoryReceiver,
    SharedMemorySender,
    SharedMemoryTransport,
)
from tests.support.third_party.toy_transport import ToyReceiver, ToySender, ToyTransport


class Rounds(ToyTransport):
    @staticmethod
    def make_receiver(setup, address):
        return RoundingReceiver()


class RoundingReceiver(ToyReceiver):
    def receive(self, version, sent):
        tensors = torch.load(sent.stored)
        rounded = ((n, t.bfloat16().to(t.dtype) if t.is_floating_point() else t) for n, t in tensors)
        return IncomingWeights(rounded, fingerprint=lambda: sent.fingerprint)


class KeepsOneFile(ToyTransport):
    @staticmethod
    def make_sender(setup: SenderSetup):
        return OneFileSender(setup)


class OneFileSender(ToySender):
    def send(self, version, weights):
        return super().send(0, weights)


class ForgetsItsName(ToyTransport):
    @staticmethod
    def make_sender(setup: SenderSetup):
        return ToySender(replace(setup, transport="disk"))


class WaitsForDeadReceivers(SharedMemoryTransport):
    @staticmethod
    def make_sender(setup: SenderSetup):
        return PatientSender(setup)


class PatientSender(SharedMemorySender):
    def send(self, version, weights):
        try:
            return super().send(version, weights)
        except TimeoutError:
            time.sleep(40)
            raise


class ReversesTheOrder(SharedMemoryTransport):
    @staticmethod
    def make_receiver(setup, address):
        return ReversingReceiver(address, rank=setup.rank, device=setup.device)


class ReversingReceiver(SharedMemoryReceiver):
    def _tensors(self, version, trailer):
        tensors = [(name, tensor.clone()) for name, tensor in super()._tensors(version, trailer)]
        return iter(reversed(tensors))
