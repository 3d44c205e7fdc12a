"""Weight transport between two processes that share a GPU: with `shared_memory` the bytes never leave the device.

GPU_TESTS_ON=cpu uses host memory.
"""

import multiprocessing

import pytest
import torch

from hybridrl.config.schema.rollout import WeightSyncConfig
from hybridrl.workers.weight_transfer import OutgoingWeights, Receivers, make_sender
from hybridrl.workers.weight_transfer.fingerprint import fingerprint

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(240)]
SPAWN = multiprocessing.get_context("spawn")
VERSIONS = (1, 2, 3)


def weights(version: int, device: str) -> list[tuple[str, torch.Tensor]]:
    """Return 12 MB, and in the last version 24 MB, for which the buckets must grow."""
    generator = torch.Generator().manual_seed(version)
    rows = 600 if version == VERSIONS[-1] else 300
    return [(f"w{i}", torch.randn(rows, 1000, generator=generator).to(device)) for i in range(10)]


def receive(address, device: str, answers) -> None:
    receivers = Receivers(rank=0, device=device, timeout_s=60)
    receivers.join(address)
    for version in VERSIONS:
        devices, arrived = set(), {}
        incoming = receivers.receive(version, None)
        for name, tensor in incoming:
            devices.add(tensor.device.type)
            arrived[name] = tensor.clone()
        answers.put((version, devices, fingerprint(arrived.items(), torch.bfloat16), incoming.fingerprint()))


@pytest.mark.parametrize("transport", ["shared_memory", "broadcast"])
def test_two_processes_on_one_device_receive_what_was_sent(device, transport):
    settings = WeightSyncConfig(transport=transport, bucket_mb=2)
    sender = make_sender(transport, settings, host="127.0.0.1", num_receivers=1, device=device, timeout_s=120)
    answers = SPAWN.Queue()
    process = SPAWN.Process(target=receive, args=(sender.address, device, answers), daemon=True)
    process.start()
    # Processes that share a GPU cannot make an NCCL group: a broadcast between them goes through host memory.
    expected = {device} if transport == "shared_memory" else {"cpu"}
    for version in VERSIONS:
        sent = sender.send(version, OutgoingWeights(weights(version, device), torch.bfloat16))
        assert answers.get(timeout=60) == (version, expected, sent.fingerprint, sent.fingerprint)
    process.join(30)
    assert process.exitcode == 0
    sender.close()
