"""`check_transport`: the contract of `Transport` as a suite that any transport can be put through.

The sender runs in the calling process. Receivers of a streaming transport run in processes of their own, so that they
can be killed; those of a stored transport run in the calling process, which must be connected to Ray if the transport
needs it. A script that calls the suite needs the guard `if __name__ == "__main__":`, because it starts processes.
"""

import hashlib
import multiprocessing
import os
import pickle
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from threading import Thread, Timer
from typing import Any

import torch

from hybridrl.config.schema.rollout import WeightSyncConfig
from hybridrl.errors import CallTimeout, StaleWeightsError, WorkerLost
from hybridrl.testing.conformance import Check, expect, refuses, run_checks
from hybridrl.workers.weight_transfer.base import IncomingWeights, PushReceipt, Sender, SenderAddress
from hybridrl.workers.weight_transfer.buckets import OutgoingWeights
from hybridrl.workers.weight_transfer.fingerprint import NamedTensor, fingerprint
from hybridrl.workers.weight_transfer.transports import Receivers, make_sender, transport_class

SPAWN = multiprocessing.get_context("spawn")
HOST = "127.0.0.1"
RECEIVERS = 2
START_S = 90.0  # until a new process has imported torch, on a busy machine
MARGIN_S = 20.0  # beyond the transport's own deadline: what counts as "in time" on a busy machine
FAULTS = (CallTimeout, StaleWeightsError, WorkerLost)
Digest = list[tuple[str, str, tuple[int, ...], str]]


def check_transport(name: str, *, directory: str | None = None, timeout_s: float = 8.0) -> list[str]:
    """Put a transport through every check of its kind, and return the names of the checks.

    Args:
        name: As in `weight_sync.transport`: a registered name or an import path, which child processes load, too.
        directory: Where a transport that needs one writes; default: a temporary one.
        timeout_s: The deadline that senders and receivers get for the checks of faults.

    Raises:
        ConformanceError: The transport breaks its contract; the message has the sentence that does not hold.
    """
    capabilities = transport_class(name).capabilities
    with tempfile.TemporaryDirectory(prefix="hybridrl-testing-") as folder:
        place = (directory or folder) if capabilities.needs_directory else None
        case = TransportCase(name, place, timeout_s)
        return run_checks(CHECKS, case, capabilities=capabilities, subject=f"transport {name}")


@dataclass
class TransportCase:
    """A transport, where it may write, and the deadline for the checks of faults."""

    name: str
    directory: str | None
    timeout_s: float

    def sender(self, *, timeout_s: float = START_S, num_receivers: int = RECEIVERS) -> Sender:
        settings = WeightSyncConfig(transport=self.name, bucket_mb=1, directory=self.directory)
        return make_sender(
            self.name, settings, host=HOST, num_receivers=num_receivers, device="cpu", timeout_s=timeout_s
        )

    def receivers(self) -> Receivers:
        return Receivers(rank=0, device="cpu", timeout_s=self.timeout_s)


def sample_weights(version: int) -> list[NamedTensor]:
    """Return about 4 MB in tensors of many sizes and dtypes, the third version larger than the others.

    One is larger than a bucket of 1 MB, one has a single number, one has none, and one has integers.
    """
    generator = torch.Generator().manual_seed(version)
    shapes: dict[str, tuple[int, ...]] = {"embed": (700 if version < 3 else 2000, 500), "norm": (17,), "scale": ()}
    shapes |= {"none": (0, 4), **{f"block.{number}": (50 + number, 101) for number in range(40)}}
    weights = [(name, torch.randn(shape, generator=generator)) for name, shape in shapes.items()]
    return [*weights, ("steps", torch.arange(version, version + 5))]


def digest(tensors: Iterator[NamedTensor] | list[NamedTensor] | IncomingWeights) -> Digest:
    """Return name, dtype, shape and hash of the bytes of every tensor, in order of arrival."""
    return [
        (name, str(tensor.dtype), tuple(tensor.shape), hashlib.sha256(_bytes(tensor)).hexdigest())
        for name, tensor in tensors
    ]


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def outgoing(version: int) -> OutgoingWeights:
    return OutgoingWeights(sample_weights(version), torch.float32)


# -- Receivers and senders in processes or threads of their own.


def _receive_all(address: SenderAddress, rank: int, versions: list[int], answers: Any) -> None:
    """Act as a rollout process: receive each version and put what arrived, or the error, into `answers`."""
    receivers = Receivers(rank=rank, device="cpu", timeout_s=START_S)
    try:
        receivers.join(address)
        answers.put((rank, "joined", None))
        for version in versions:
            incoming = receivers.receive(version, None)
            arrived = digest(incoming)
            answers.put((rank, arrived, incoming.fingerprint()))
    except Exception as error:
        answers.put((rank, error.__class__.__name__, str(error)))


def _start(
    sender: Sender, versions: list[int], *, num: int = RECEIVERS, where: Callable[..., Any] = SPAWN.Process
) -> tuple[list[Any], Any]:
    """Start receivers and wait until they have joined; return them and the queue of their answers."""
    answers = SPAWN.Queue()
    jobs = [
        where(target=_receive_all, args=(sender.address, rank, versions, answers), daemon=True) for rank in range(num)
    ]
    for job in jobs:
        job.start()
    for _ in jobs:
        rank, state, reason = answers.get(timeout=START_S)
        expect(state == "joined", f"receiver {rank} could not join the sender's address: {state}: {reason}")
    return jobs, answers


def _send_half(name: str, directory: str | None, timeout_s: float, pipe: Any) -> None:
    """Act as an actor that dies in the middle of a push."""
    sender = TransportCase(name, directory, timeout_s).sender(timeout_s=timeout_s, num_receivers=1)
    pipe.send(sender.address)

    def first_half() -> Iterator[NamedTensor]:
        for number, named in enumerate(sample_weights(1)):
            if number == 20:
                time.sleep(0.3)  # the first bucket is in transit
                os._exit(9)
            yield named

    sender.send(1, OutgoingWeights(first_half(), torch.float32))


def _expect_in_time(started: float, timeout_s: float, what: str) -> None:
    seconds = time.monotonic() - started
    expect(seconds < timeout_s + MARGIN_S, f"{what} took {seconds:.0f} s with a deadline of {timeout_s:g} s")


# -- The checks. Those of streaming transports first.


def has_an_address(case: TransportCase) -> None:
    address = case.sender().address
    expect(address is not None, "a streaming sender must have an address as soon as it exists")
    expect(pickle.loads(pickle.dumps(address)).transport == case.name, f"address.transport must be {case.name!r}")


def streams_every_version(case: TransportCase) -> None:
    sender = case.sender()
    jobs, answers = _start(sender, [1, 2, 3])
    for version in (1, 2, 3):
        receipt = sender.send(version, outgoing(version))
        _expect_receipt(case, receipt, version)
        for _ in range(RECEIVERS):
            rank, arrived, last = answers.get(timeout=START_S)
            expect(
                arrived == digest(sample_weights(version)), f"receiver {rank} got other bytes, names or order: {last}"
            )
            expect(last == receipt.fingerprint, f"receiver {rank} got the fingerprint {last}")
    for job in jobs:
        job.join(MARGIN_S)
    sender.close()


def another_version_is_refused(case: TransportCase) -> None:
    sender = case.sender(timeout_s=case.timeout_s)
    _, answers = _start(sender, [5], where=Thread)
    with refuses(*FAULTS, call="send() of version 4 while the receivers expect 5"):
        sender.send(4, outgoing(4))
    _expect_errors(answers, RECEIVERS)


def a_dead_receiver_ends_the_push(case: TransportCase) -> None:
    sender = case.sender(timeout_s=case.timeout_s)
    jobs, answers = _start(sender, [1, 2])
    sender.send(1, outgoing(1))
    for _ in jobs:
        answers.get(timeout=START_S)
    jobs[1].kill()
    jobs[1].join(MARGIN_S)
    started = time.monotonic()
    with refuses(*FAULTS, call="send() after a receiver was killed"):
        sender.send(2, outgoing(2))
    _expect_in_time(started, 2 * case.timeout_s, "send() after a receiver was killed")
    jobs[0].kill()


def a_dead_sender_ends_the_wait(case: TransportCase) -> None:
    parent, child = SPAWN.Pipe()
    job = SPAWN.Process(target=_send_half, args=(case.name, case.directory, case.timeout_s, child), daemon=True)
    job.start()
    expect(parent.poll(START_S), "the sender's process did not start")
    receivers = case.receivers()
    receivers.join(parent.recv())
    started = time.monotonic()
    with refuses(*FAULTS, call="iterating over weights whose sender died"):
        list(receivers.receive(1, None))
    _expect_in_time(started, case.timeout_s, "the wait for a dead sender")
    job.join(MARGIN_S)


def a_cancelled_push_ends(case: TransportCase) -> None:
    sender = case.sender()
    assert sender.address is not None  # `has_an_address`
    Timer(0.5, sender.address.cancel, ("a rollout process was lost",)).start()
    started = time.monotonic()
    with refuses(StaleWeightsError, call="send() that address.cancel() ended"):
        sender.send(1, outgoing(1))
    _expect_in_time(started, 0.5, "send() after address.cancel()")


def a_push_that_fails_tells_its_receivers(case: TransportCase) -> None:
    sender = case.sender(timeout_s=case.timeout_s)
    _, answers = _start(sender, [1], where=Thread)
    with refuses(ConnectionError, call="send() of weights whose iteration raises ConnectionError"):
        sender.send(1, OutgoingWeights(_breaks_off(0), torch.float32))
    _expect_errors(answers, RECEIVERS)


def stores_every_version(case: TransportCase) -> None:
    sender = case.sender()
    expect(sender.address is None, "a sender of a stored transport has no address")
    receipts = {version: sender.send(version, outgoing(version)) for version in (1, 2, 3)}
    for version, receipt in receipts.items():
        _expect_receipt(case, receipt, version)
    for version in (2, 3, 1, 3):  # late, out of order, and twice
        _expect_stored(case, receipts[version], version)
    sender.close()


def an_older_version_may_be_deleted(case: TransportCase) -> None:
    sender = case.sender()
    receipts = {version: sender.send(version, outgoing(version)) for version in (1, 2)}
    sender.delete_older_than(2)
    _expect_stored(case, receipts[2], 2)


def a_failed_store_changes_nothing(case: TransportCase) -> None:
    sender = case.sender()
    receipt = sender.send(1, outgoing(1))
    with refuses(ConnectionError, call="send() of weights whose iteration raises ConnectionError"):
        sender.send(2, OutgoingWeights(_breaks_off(30), torch.float32))
    _expect_stored(case, receipt, 1)


def _breaks_off(number: int) -> Iterator[NamedTensor]:
    yield from sample_weights(2)[:number]
    raise ConnectionError("another training rank was lost")


def _expect_stored(case: TransportCase, receipt: PushReceipt, version: int) -> None:
    incoming = case.receivers().receive(version, receipt)
    # A store may group tensors; only adapters have a place, before the weights that they change.
    expect(sorted(digest(incoming)) == sorted(digest(sample_weights(version))), f"version {version} arrived changed")
    expect(incoming.fingerprint() == receipt.fingerprint, f"version {version} arrived with another fingerprint")


def _expect_receipt(case: TransportCase, receipt: PushReceipt, version: int) -> None:
    weights = sample_weights(version)
    expect(receipt.transport == case.name, f"the receipt's transport is {receipt.transport!r}, not {case.name!r}")
    expect(receipt.fingerprint == fingerprint(weights, torch.float32), "the receipt has another fingerprint")
    sent = sum(tensor.nbytes for _, tensor in weights)
    expect(receipt.num_bytes == sent, f"the receipt's num_bytes is {receipt.num_bytes}, and {sent} were sent")


def _expect_errors(answers: Any, num: int) -> None:
    names = {error.__name__ for error in FAULTS}
    for _ in range(num):
        rank, state, reason = answers.get(timeout=START_S)
        expect(state in names, f"receiver {rank} must raise one of {sorted(names)}, not {state}: {reason}")


CHECKS: tuple[Check[TransportCase], ...] = (
    Check("a sender has an address", has_an_address, ("streaming",)),
    Check("every receiver gets every version as it was sent", streams_every_version, ("streaming",)),
    Check("another version than expected is refused", another_version_is_refused, ("streaming",)),
    Check("a push that fails is reported to its receivers", a_push_that_fails_tells_its_receivers, ("streaming",)),
    Check("a cancelled push ends at once", a_cancelled_push_ends, ("streaming",)),
    Check("a dead receiver ends the push in time", a_dead_receiver_ends_the_push, ("streaming",)),
    Check("a dead sender ends the wait of its receivers in time", a_dead_sender_ends_the_wait, ("streaming",)),
    Check("stored versions arrive as they were sent", stores_every_version, ("stored",)),
    Check("older versions may be deleted", an_older_version_may_be_deleted, ("stored",)),
    Check("a push that fails leaves earlier versions as they were", a_failed_store_changes_nothing, ("stored",)),
)
