"""The control channel of a streaming weight push: which bucket is ready, and who has received it.

A streaming sender (trainer's rank 0) and its receivers (rollout processes) exchange messages as keys in a TCP store in
the sender's process. The transport (`shared_memory`, `broadcast`) carries the bytes.

Both sides count pushes. In push k
  1. every receiver reports that it is ready, and where it runs,
  2. the sender accepts, and announces bucket after bucket,
  3. every receiver reports each bucket as received, and
  4. the last announcement carries the fingerprint.

Every wait has a deadline, and its error names the missing ranks. A driver that knows of a lost process ends the
sender's wait earlier (`ChannelAddress.cancel`). After an error the channel is not used again: the next push opens
another.
"""

import contextlib
import hmac
import json
import secrets
import socket
import time
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from hybridrl.errors import CallTimeout, StaleWeightsError
from hybridrl.workers.weight_transfer.base import KEY

# Receivers wait this much longer than the sender. The sender knows which rank is missing, so it must fail first and
# report the reason to the receivers.
GRACE_S = 3.0
CANCELLED = "cancelled"  # key of the reason
POLL_PERIOD_S = 0.5  # how often a waiting sender looks for CANCELLED
CONNECT_TIMEOUT_S = 2.0
SIGNATURE_BYTES = 32


class SignedStore(dist.PrefixStore):
    """A store whose messages are signed with a secret.

    torch's store shows its keys and values to whoever reaches the port.
    """

    def __init__(self, secret: str, store: dist.Store):
        super().__init__("channel", store)
        self._secret = secret.encode()

    def set(self, key: str, value: str) -> None:
        signed: Any = self._signature(key, value.encode()) + value.encode()  # torch takes bytes, too
        super().set(key, signed)

    def get(self, key: str) -> bytes:
        found = super().get(key)
        signature, value = found[:SIGNATURE_BYTES], found[SIGNATURE_BYTES:]
        if not hmac.compare_digest(signature, self._signature(key, value)):
            raise StaleWeightsError(
                f"{KEY}: the message {key} of the weight channel is none of this job's: another program writes to the "
                "channel's port; let no other users on these machines reach it"
            )
        return value

    def _signature(self, key: str, value: bytes) -> bytes:
        return hmac.digest(self._secret, key.encode() + b"\0" + value, "sha256")


@dataclass(frozen=True)
class ChannelAddress:
    """Where a sender waits for its receivers.

    Attributes:
        num_receivers: Their number; their ranks start at 0.
        secret: Signs all messages. Who reaches the port without it can read and delete messages, and write none.
    """

    transport: str
    host: str
    port: int
    num_receivers: int
    timeout_s: float
    secret: str

    def connect(self, *, timeout_s: float) -> dist.Store:
        """Return the sender's store, for a receiver. timeout_s: Limit of every operation."""
        store = dist.TCPStore(self.host, self.port, None, False, timedelta(seconds=timeout_s), False)
        return SignedStore(self.secret, store)

    def cancel(self, reason: str) -> None:
        """End the sender's wait for its receivers with a StaleWeightsError of this reason.

        Does nothing if the sender is gone or not waiting.
        """
        with contextlib.suppress(OSError, dist.DistError):
            # Fails fast without a sender; a store would retry.
            socket.create_connection((self.host, self.port), timeout=CONNECT_TIMEOUT_S).close()
            self.connect(timeout_s=CONNECT_TIMEOUT_S).set(CANCELLED, reason)


@dataclass(frozen=True)
class PeerLocation:
    """Where a process runs: machine (`shared_memory_id`), process id, and GPU's UUID if any."""

    machine: str
    process: int
    gpu: str | None = None


class SenderEnd:
    """The sender's side. It listens from the start.

    Consumes: reports of receivers.
    Waits for: all of them, at most `address.timeout_s`, when a push starts and before a bucket's memory is used again.
    Unblocked by: the last report, or `ChannelAddress.cancel`.
    """

    def __init__(self, transport: str, *, host: str, num_receivers: int, timeout_s: float):
        with socket.create_server((host, 0)) as listener:
            port, timeout = listener.getsockname()[1], timedelta(seconds=timeout_s)
            store = dist.TCPStore(host, port, None, True, timeout, False, master_listen_fd=listener.fileno())
            listener.detach()  # the store closes it
        self.address = ChannelAddress(transport, host, port, num_receivers, timeout_s, secrets.token_hex(16))
        self.store: dist.Store = SignedStore(self.address.secret, store)
        self._push = 0

    def start_push(self, version: int) -> list[PeerLocation]:
        """Wait until every receiver is ready for a push of `version`, and return their locations by rank.

        Raises:
            CallTimeout: a receiver was not ready in time; the error names it.
            StaleWeightsError: a receiver expects another version.
        """
        self._push += 1
        self._wait_for_all("ready", f"receive weights of version {version}")
        messages = [json.loads(self._pop(f"ready/{rank}")) for rank in range(self.address.num_receivers)]
        for rank, ready in enumerate(messages):
            if ready["version"] != version:
                raise StaleWeightsError(
                    f"rollout rank {rank} expects version {ready['version']}, but version {version} is sent"
                )
        return [PeerLocation(**ready["location"]) for ready in messages]

    def accept(self, message: dict[str, Any]) -> None:
        """Answer the receivers that are ready."""
        for rank in range(self.address.num_receivers):
            self.store.set(f"{self._push}/accepted/{rank}", json.dumps(message))

    def announce(self, number: int, message: dict[str, Any]) -> None:
        """Announce bucket `number` to the receivers, or `{"fingerprint": ...}` after the last bucket."""
        self.store.set(f"{self._push}/announced/{number}", json.dumps(message))

    def abort_push(self, number: int, reason: str) -> None:
        """Report to the receivers, at whatever bucket they wait, that the push failed."""
        self.accept({"failed": reason})
        self.announce(number, {"failed": reason})

    def wait_received(self, number: int) -> None:
        """Wait until every receiver has received bucket `number`, and delete its messages."""
        self._wait_for_all(f"received/{number}", f"receive bucket {number}")
        self._pop(f"announced/{number}")
        for rank in range(self.address.num_receivers):
            self._pop(f"received/{number}/{rank}")

    def missing_ranks(self, event: str) -> list[int]:
        """Return the receivers that have not reported `event` in this push."""
        return [
            rank for rank in range(self.address.num_receivers) if not self.store.check([f"{self._push}/{event}/{rank}"])
        ]

    def timeout_error(self, event: str, action: str) -> CallTimeout:
        """Return the error for receivers that have not reported `event`."""
        ranks = ", ".join(map(str, self.missing_ranks(event))) or "unknown"
        return CallTimeout(
            f"{KEY}.transport={self.address.transport}: rollout rank {ranks} did not {action} within "
            f"{self.address.timeout_s:g} s (trainer.call_timeout_s); is the process alive, and was receive_weights "
            "called there?"
        )

    def _wait_for_all(self, event: str, action: str) -> None:
        keys = [f"{self._push}/{event}/{rank}" for rank in range(self.address.num_receivers)]
        deadline = time.monotonic() + self.address.timeout_s
        while True:
            remaining_s = deadline - time.monotonic()
            try:
                return self.store.wait(keys, timedelta(seconds=max(0.001, min(POLL_PERIOD_S, remaining_s))))
            except dist.DistError as error:
                if self.store.check([CANCELLED]):
                    raise StaleWeightsError(f"the push was cancelled: {self.store.get(CANCELLED).decode()}") from error
                if time.monotonic() >= deadline:
                    raise self.timeout_error(event, action) from error

    def _pop(self, key: str) -> bytes:
        value = self.store.get(f"{self._push}/{key}")
        self.store.delete_key(f"{self._push}/{key}")
        return value


class ReceiverEnd:
    """A receiver's side, in the rollout process of this rank.

    Consumes: announcements of buckets.
    Waits for: the sender, at most `address.timeout_s`.
    Unblocked by: its announcement, or `ChannelAddress.cancel`.
    """

    def __init__(self, address: ChannelAddress, *, rank: int):
        self.address, self.rank = address, rank
        self.store = address.connect(timeout_s=address.timeout_s)
        self._push = 0

    def start_push(self, version: int, location: PeerLocation) -> dict[str, Any]:
        """Report that this process is ready for `version`, and return the sender's answer."""
        self._push += 1
        self.store.set(
            f"{self._push}/ready/{self.rank}", json.dumps({"version": version, "location": asdict(location)})
        )
        message = self._receive(f"accepted/{self.rank}", f"start to send version {version}")
        self.store.delete_key(f"{self._push}/accepted/{self.rank}")
        return message

    def next_message(self, number: int) -> dict[str, Any]:
        """Return the sender's announcement of bucket `number`."""
        return self._receive(f"announced/{number}", f"announce bucket {number}")

    def report_received(self, number: int) -> None:
        self.store.set(f"{self._push}/received/{number}/{self.rank}", "")

    def timeout_error(self, action: str) -> CallTimeout:
        """Return the error for a sender that is silent or gone."""
        return CallTimeout(
            f"{KEY}.transport={self.address.transport}: actor rank 0 did not {action} within "
            f"{self.address.timeout_s:g} s (trainer.call_timeout_s); rollout rank {self.rank} holds no valid "
            "weights now"
        )

    def _receive(self, key: str, action: str) -> dict[str, Any]:
        try:
            self.store.wait([f"{self._push}/{key}"], timedelta(seconds=self.address.timeout_s + GRACE_S))
            message = json.loads(self.store.get(f"{self._push}/{key}"))
        except dist.DistNetworkError as error:
            raise StaleWeightsError(
                f"{KEY}.transport={self.address.transport}: the connection to actor rank 0 closed before it could "
                f"{action}; rollout rank {self.rank} holds no valid weights now"
            ) from error
        except dist.DistError as error:
            raise self.timeout_error(action) from error
        if "failed" in message:
            raise StaleWeightsError(
                f"{KEY}.transport={self.address.transport}: actor rank 0 aborted the push: {message['failed']}"
            )
        return message
