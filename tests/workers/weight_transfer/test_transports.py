"""Every weight transport with real processes on both sides: weights arrive as sent, and no process waits forever."""

import socket
import time
from datetime import timedelta
from threading import Thread, Timer

import pytest
import torch
import torch.distributed as dist

from hybridrl.config.schema.rollout import WeightSyncConfig
from hybridrl.errors import CallTimeout, CheckpointError, ConfigError, StaleWeightsError, WorkerLost
from hybridrl.system.machine import shared_memory_id
from hybridrl.workers.weight_transfer import OutgoingWeights, Receivers, disk, make_sender
from hybridrl.workers.weight_transfer.buckets import fill_buckets, unpack
from hybridrl.workers.weight_transfer.channel import PeerLocation
from hybridrl.workers.weight_transfer.fingerprint import fingerprint
from hybridrl.workers.weight_transfer.shared_memory import slot_class
from hybridrl.workers.weight_transfer.streaming import own_location
from tests.support.ranks import FORKS

HOST = "127.0.0.1"
STREAMING, STORED = ("shared_memory", "broadcast"), ("object_store", "disk")
RECEIVERS = 2


def model_like(seed: int, *, rows: int = 700) -> list[tuple[str, torch.Tensor]]:
    """Return 4 MB in tensors of many sizes.

    One is larger than a bucket of 1 MB, one has one number, one has none, and one has integers.
    """
    generator = torch.Generator().manual_seed(seed)
    shapes = {
        "embed": (rows, 1000),
        "norm": (17,),
        "scale": (),
        "none": (0, 4),
        **{f"block.{i}": (50 + i, 101) for i in range(40)},
    }
    tensors = [(name, torch.randn(shape, generator=generator)) for name, shape in shapes.items()]
    return [*tensors, ("steps", torch.arange(5))]


def receive_all(address, rank: int, versions: list[int], answers) -> None:
    """Act as a rollout process: receive each version in turn and put what arrived, or the error, into `answers`."""
    receivers = Receivers(rank=rank, device="cpu", timeout_s=30)
    try:
        receivers.join(address)
        for version in versions:
            incoming = receivers.receive(version, None)
            arrived = {name: tensor.clone() for name, tensor in incoming}
            actual = fingerprint(arrived.items(), torch.float32)
            answers.put(
                (
                    rank,
                    version,
                    {name: t.double().sum().item() for name, t in arrived.items()},
                    actual,
                    incoming.fingerprint(),
                )
            )
    except Exception as error:
        answers.put((rank, None, f"{type(error).__name__}: {error}"))


def start(sender, versions: list[int], *, ranks=range(RECEIVERS), where=FORKS.Process):
    """Start receivers in processes of their own, or (Thread) in this one, which starts faster but cannot be killed."""
    answers = FORKS.Queue()
    receivers = [where(target=receive_all, args=(sender.address, r, versions, answers), daemon=True) for r in ranks]
    for receiver in receivers:
        receiver.start()
    return receivers, answers


def streaming_sender(name: str, *, timeout_s: float = 60.0, num_receivers: int = RECEIVERS):
    settings = WeightSyncConfig(transport=name, bucket_mb=1)
    return make_sender(name, settings, host=HOST, num_receivers=num_receivers, device="cpu", timeout_s=timeout_s)


@pytest.mark.parametrize("name", STREAMING)
def test_every_receiver_gets_every_version_as_sent(name):
    sender = streaming_sender(name)
    processes, answers = start(sender, [1, 2, 3])
    for version in (1, 2, 3):
        rows = 700 if version < 3 else 2000  # in the third push the slots have to grow
        weights = model_like(version, rows=rows)
        sent = sender.send(version, OutgoingWeights(weights, torch.float32))
        assert sent.fingerprint == fingerprint(weights, torch.float32) and sent.num_buckets >= 2
        assert sent.num_bytes == sum(tensor.nbytes for _, tensor in weights)
        sums = {name: tensor.double().sum().item() for name, tensor in weights}
        for _ in range(RECEIVERS):
            assert answers.get(timeout=60)[1:] == (version, sums, sent.fingerprint, sent.fingerprint)
    for process in processes:
        process.join(20)
        assert process.exitcode == 0
    sender.close()


@pytest.mark.parametrize("name", STREAMING)
def test_a_missing_receiver_is_named_at_the_deadline_and_the_other_receivers_get_the_reason(name):
    sender = streaming_sender(name, timeout_s=3)
    _, answers = start(sender, [1], ranks=[0], where=Thread)
    with pytest.raises(
        CallTimeout,
        match=rf"weight_sync.transport={name}: .*rank 1 .*version 1 within 3 s",
    ):
        sender.send(1, OutgoingWeights(model_like(1), torch.float32))
    rank, _, error = answers.get(timeout=60)
    assert rank == 0 and error.startswith("StaleWeightsError") and "rollout rank 1 did not receive weights" in error


@pytest.mark.parametrize("name", STREAMING)
@pytest.mark.slow
def test_a_receiver_that_dies_between_pushes_raises_an_error_at_the_deadline(name):
    sender = streaming_sender(name, timeout_s=15)
    processes, answers = start(sender, [1, 2])
    sender.send(1, OutgoingWeights(model_like(1), torch.float32))
    answers.get(timeout=30), answers.get(timeout=30)
    processes[1].kill()
    processes[1].join(10)

    started = time.monotonic()
    with pytest.raises(CallTimeout, match=r"rollout rank .*1 did not receive") as caught:
        sender.send(2, OutgoingWeights(model_like(2), torch.float32))
    assert time.monotonic() - started < 30 and "15 s" in str(caught.value)
    processes[0].kill()


@pytest.mark.parametrize("name", STREAMING)
def test_a_cancelled_push_ends_the_senders_wait_and_the_other_receivers_get_the_reason(name):
    sender = streaming_sender(name, timeout_s=90)
    _, answers = start(sender, [1], ranks=[0], where=Thread)
    started = time.monotonic()
    Timer(1.0, sender.address.cancel, ("rollout-1 was lost",)).start()
    with pytest.raises(StaleWeightsError, match="the push was cancelled: rollout-1 was lost"):
        sender.send(1, OutgoingWeights(model_like(1), torch.float32))
    assert time.monotonic() - started < 60  # before the deadline
    rank, _, error = answers.get(timeout=60)
    assert rank == 0 and "rollout-1 was lost" in error


@pytest.mark.parametrize("name", STREAMING)
def test_a_sender_that_dies_raises_an_error_in_the_receivers(name):
    parent, child = FORKS.Pipe()
    sender = FORKS.Process(target=dying_sender, args=(name, child), daemon=True)
    sender.start()
    address = parent.recv()
    receivers = Receivers(rank=0, device="cpu", timeout_s=10)
    receivers.join(address)
    with pytest.raises((CallTimeout, StaleWeightsError), match=f"weight_sync.transport={name}"):
        list(receivers.receive(1, None))
    sender.join(10)


def dying_sender(name: str, pipe) -> None:
    import os

    sender = streaming_sender(name, timeout_s=10, num_receivers=1)
    pipe.send(sender.address)

    def first_half():
        for number, named in enumerate(model_like(1)):
            if number == 20:
                time.sleep(0.3)  # the first bucket is in transit
                os._exit(9)
            yield named

    sender.send(1, OutgoingWeights(first_half(), torch.float32))


@pytest.mark.parametrize("name", STREAMING)
def test_a_push_of_another_version_than_expected_is_rejected(name):
    sender = streaming_sender(name, timeout_s=30)
    _, answers = start(sender, [5], where=Thread)
    refusal = "rollout rank 0 expects version 5, but version 4 is sent"
    with pytest.raises(StaleWeightsError, match=refusal):
        sender.send(4, OutgoingWeights(model_like(4), torch.float32))
    errors = [answers.get(timeout=60)[2] for _ in range(RECEIVERS)]
    assert all(refusal in error for error in errors), errors


@pytest.mark.parametrize("name", STORED)
def test_stored_weights_can_be_fetched_late_out_of_order_and_twice(name, tmp_path, ray_cluster):
    settings = WeightSyncConfig(
        transport=name, bucket_mb=1, directory=str(tmp_path / "weights") if name == "disk" else None
    )
    sender = make_sender(name, settings, host=HOST, num_receivers=2, device="cpu")
    pushes = {version: sender.send(version, OutgoingWeights(model_like(version), torch.bfloat16)) for version in (1, 2)}
    for version in (2, 1, 2):  # the newest, an older one, the newest again
        incoming = Receivers(rank=0, device="cpu", timeout_s=20).receive(version, pushes[version])
        arrived = {name: tensor.clone() for name, tensor in incoming}
        for key, tensor in model_like(version):
            assert torch.equal(arrived[key], tensor.bfloat16() if tensor.is_floating_point() else tensor)
        assert incoming.fingerprint() == fingerprint(arrived.items(), torch.bfloat16)


def test_a_sender_that_has_died_is_named_as_the_lost_worker_where_its_stored_weights_are_fetched(ray_cluster):
    import ray

    actor = ray.remote(num_cpus=0)(StoringSender).remote()
    push = actor.send.remote()
    ray.wait([push], timeout=60)
    ray.kill(actor)
    receivers, until = Receivers(rank=0, device="cpu", timeout_s=20), time.monotonic() + 30
    with pytest.raises(WorkerLost) as caught:
        while time.monotonic() < until:  # Ray frees the objects some time after the death
            list(receivers.receive(1, ray.get(push)))
    assert (caught.value.role, caught.value.rank, caught.value.method) == ("actor", 0, "send_weights")


class StoringSender:
    """A trainer's side with the object store, in an actor of its own."""

    def send(self):
        settings = WeightSyncConfig(transport="object_store", bucket_mb=1)
        sender = make_sender("object_store", settings, host=HOST, num_receivers=1, device="cpu")
        return sender.send(1, OutgoingWeights(model_like(1), torch.float32))


def test_a_directory_keeps_the_last_version_and_errors_name_what_is_wrong(tmp_path):
    sender = make_sender(
        "disk",
        WeightSyncConfig(transport="disk", bucket_mb=1, directory=str(tmp_path)),
        host="",
        num_receivers=1,
        device="cpu",
    )
    sent = {
        version: sender.send(version, OutgoingWeights(model_like(version), torch.float32)) for version in (9, 10, 11)
    }
    sender.delete_older_than(11)
    assert [path.name for path in tmp_path.iterdir()] == ["version_11"]
    assert sorted(path.suffix for path in (tmp_path / "version_11").iterdir())[0] == ".json"
    with pytest.raises(CheckpointError, match="version_9 holds no manifest.json"):
        list(disk.DiskReceiver().tensors(sent[9]))
    sender.send(11, OutgoingWeights(model_like(12), torch.float32))
    with pytest.raises(CheckpointError, match="do two runs write to the same"):
        list(disk.DiskReceiver().tensors(sent[11]))


def test_a_bucket_is_no_larger_than_requested_and_nothing_is_lost():
    weights = model_like(3)
    sizes, seen = [], []

    def buffer(num_bytes):
        sizes.append(num_bytes)
        return torch.full((num_bytes,), 255, dtype=torch.uint8)

    for bucket in fill_buckets(weights, num_bytes=100_000, buffer=buffer):
        seen += [(name, tensor.clone()) for name, tensor in unpack(bucket)]
    assert sorted(set(sizes)) == [100_000, 2_800_000]  # the embedding, 700 * 1000 * 4 bytes, has a bucket of its own
    assert [name for name, _ in seen] == [name for name, _ in weights]
    assert all(torch.equal(a, b) and a.dtype == b.dtype for (_, a), (_, b) in zip(seen, weights, strict=True))


def test_memory_is_shared_on_one_machine_only():
    own = own_location("cpu")
    assert own.machine == shared_memory_id() and own.machine.startswith(socket.gethostname())
    assert slot_class([own, own], own).__name__ == "HostSlot"
    with pytest.raises(ConfigError, match="rollout rank 1 is on elsewhere"):
        slot_class([own, PeerLocation("elsewhere", 1)], own)
    gpus = [PeerLocation(own.machine, 1, "GPU-a"), PeerLocation(own.machine, 2, "GPU-b")]
    assert slot_class(gpus, gpus[0]).__name__ == "HostSlot" and slot_class(gpus[:1], gpus[0]).__name__ == "GpuSlot"


@pytest.mark.parametrize("is_replayed", [False, True])
def test_a_stranger_at_the_port_cannot_speak_on_the_channel(is_replayed):
    sender = streaming_sender("shared_memory", timeout_s=2.0, num_receivers=1)
    address = sender.address
    receiver = address.connect(timeout_s=5.0)
    receiver.set("0/ready/0", "{}")
    stranger = dist.TCPStore(address.host, address.port, None, False, timedelta(seconds=5), False)
    (key,) = stranger.list_keys()  # torch tells everybody
    for name in ("cancelled", "1/ready/0", "1/received/0/0"):
        stranger.set(key.replace("0/ready/0", name), stranger.get(key) if is_replayed else "{}")
    with pytest.raises(StaleWeightsError, match="the message 1/ready/0 of the weight channel is none of this job's"):
        sender.send(1, OutgoingWeights(model_like(1), torch.float32))
    with pytest.raises(StaleWeightsError, match="none of this job's"):
        receiver.get("1/received/0/0")


def test_the_channel_listens_at_its_own_address_only():
    sender = streaming_sender("shared_memory", num_receivers=1)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", sender.address.port), timeout=5)
