"""`Channel`: how a live sender and its receivers talk about buckets; what carries the bytes is the transport's
business.

Both ends of a channel count pushes. In push k every receiver says that it is ready and where it is; the sender
announces bucket after bucket; each receiver says of each bucket that it has taken it; the last announcement carries the
fingerprint. All of it are keys in a TCP store that the sender's process holds. Every wait has a deadline and an error
that names who was waited for; who knows better, such as a driver that was told of a death, ends them all before
(`Address.abandon`). A channel on which something went wrong is of no more use: the next push opens another.
"""

import contextlib
import json
import socket
import time
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from hybridrl.errors import CallTimeout, StaleWeightsError
from hybridrl.workers.weight_transfer.base import KEY

# The sender knows who is missing: it gives up first, so that the receivers hear why instead of finding only that it is
# silent.
GRACE_S = 3.0
ABANDONED = "abandoned"  # key of the reason
LOOK_S = 0.5  # how often a sender that waits looks for it
KNOCK_S = 2.0


@dataclass(frozen=True)
class Address:
    """Where a sender waits for its receivers. num_receivers: all of them, ranks 0 and up."""

    transport: str
    host: str
    port: int
    num_receivers: int
    timeout_s: float

    def abandon(self, reason: str) -> None:
        """Have the sender stop waiting for receivers, if it does, with a StaleWeightsError of this reason.

        Nothing if it is gone.
        """
        with contextlib.suppress(OSError, dist.DistError):
            socket.create_connection(
                (self.host, self.port), timeout=KNOCK_S
            ).close()  # a store would try again and again
            store = dist.TCPStore(self.host, self.port, None, False, timedelta(seconds=KNOCK_S), False)
            store.set(ABANDONED, reason)


@dataclass(frozen=True)
class Place:
    """Where a receiver is: its machine, its process, and its GPU's identity where it has one."""

    machine: str
    process: int
    gpu: str | None = None


class SenderEnd:
    """The sender's end. It listens from the start and waits for nobody until `begin`."""

    def __init__(self, transport: str, *, host: str, num_receivers: int, timeout_s: float):
        self.store = dist.TCPStore(host, 0, None, True, timedelta(seconds=timeout_s), False)
        self.address = Address(transport, host, self.store.port, num_receivers, timeout_s)
        self._push = 0

    def begin(self, version: int) -> list[Place]:
        """Wait for every receiver to be ready for a push of `version`, and return where they are, by rank.

        Raises StaleWeightsError naming a receiver that was told to take another version.
        """
        self._push += 1
        self._wait_for_all("ready", f"take weights of version {version}")
        said = [json.loads(self._take(f"ready/{rank}")) for rank in range(self.address.num_receivers)]
        for rank, ready in enumerate(said):
            if ready["version"] != version:
                raise StaleWeightsError(
                    f"rollout rank {rank} was told to take version {ready['version']}; version {version} is sent"
                )
        return [Place(**ready["place"]) for ready in said]

    def greet(self, message: dict[str, Any]) -> None:
        """Answer the receivers that are ready."""
        for rank in range(self.address.num_receivers):
            self.store.set(f"{self._push}/greeting/{rank}", json.dumps(message))

    def announce(self, number: int, message: dict[str, Any]) -> None:
        """Tell the receivers about bucket `number`: where it is, or `{"fingerprint": ...}` after the last."""
        self.store.set(f"{self._push}/said/{number}", json.dumps(message))

    def give_up(self, number: int, reason: str) -> None:
        """Tell the receivers, wherever they are in the push, that nothing more will come."""
        self.greet({"failed": reason})
        self.announce(number, {"failed": reason})

    def wait_taken(self, number: int) -> None:
        """Wait until every receiver has taken bucket `number`; nobody needs its announcement any more."""
        self._wait_for_all(f"taken/{number}", f"take bucket {number}")
        self._take(f"said/{number}")
        for rank in range(self.address.num_receivers):
            self._take(f"taken/{number}/{rank}")

    def missing(self, what: str) -> list[int]:
        """Return the receivers that have not said `what` in this push."""
        return [
            rank for rank in range(self.address.num_receivers) if not self.store.check([f"{self._push}/{what}/{rank}"])
        ]

    def late(self, what: str, doing: str) -> CallTimeout:
        """The error for receivers that have not said `what`."""
        ranks = ", ".join(map(str, self.missing(what))) or "none that can be named"
        return CallTimeout(
            f"{KEY}.transport={self.address.transport}: rollout rank {ranks} did not {doing} within "
            f"{self.address.timeout_s:g} s "
            f"(trainer.call_timeout_s); is it alive, and was it told to receive?"
        )

    def _wait_for_all(self, what: str, doing: str) -> None:
        keys = [f"{self._push}/{what}/{rank}" for rank in range(self.address.num_receivers)]
        until = time.monotonic() + self.address.timeout_s
        while True:
            try:
                return self.store.wait(keys, timedelta(seconds=max(0.001, min(LOOK_S, until - time.monotonic()))))
            except dist.DistError as error:
                if self.store.check([ABANDONED]):
                    raise StaleWeightsError(f"the push was given up: {self.store.get(ABANDONED).decode()}") from error
                if time.monotonic() >= until:
                    raise self.late(what, doing) from error

    def _take(self, key: str) -> bytes:
        value = self.store.get(f"{self._push}/{key}")
        self.store.delete_key(f"{self._push}/{key}")
        return value


class ReceiverEnd:
    """A receiver's end, for the rollout process of this rank."""

    def __init__(self, address: Address, *, rank: int):
        self.address, self.rank = address, rank
        self.store = dist.TCPStore(address.host, address.port, None, False, timedelta(seconds=address.timeout_s), False)
        self._push = 0

    def begin(self, version: int, place: Place) -> dict[str, Any]:
        """Say that this process is ready to take `version` and where it is; return what the sender answers."""
        self._push += 1
        self.store.set(f"{self._push}/ready/{self.rank}", json.dumps({"version": version, "place": asdict(place)}))
        message = self._hear(f"greeting/{self.rank}", f"begin to send version {version}")
        self.store.delete_key(f"{self._push}/greeting/{self.rank}")
        return message

    def listen(self, number: int) -> dict[str, Any]:
        """Return what the sender says about bucket `number`."""
        return self._hear(f"said/{number}", f"announce bucket {number}")

    def _hear(self, key: str, doing: str) -> dict[str, Any]:
        try:
            self.store.wait([f"{self._push}/{key}"], timedelta(seconds=self.address.timeout_s + GRACE_S))
            message = json.loads(self.store.get(f"{self._push}/{key}"))
        except dist.DistNetworkError as error:
            raise StaleWeightsError(
                f"{KEY}.transport={self.address.transport}: actor rank 0 was to {doing}, and its connection ended; "
                f"rollout rank {self.rank} holds no weights now"
            ) from error
        except dist.DistError as error:
            raise self.late(doing) from error
        if "failed" in message:
            raise StaleWeightsError(
                f"{KEY}.transport={self.address.transport}: actor rank 0 gave the push up: {message['failed']}"
            )
        return message

    def took(self, number: int) -> None:
        """Say that bucket `number` was taken."""
        self.store.set(f"{self._push}/taken/{number}/{self.rank}", "")

    def late(self, doing: str) -> CallTimeout:
        """The error for a sender that is silent or gone."""
        return CallTimeout(
            f"{KEY}.transport={self.address.transport}: actor rank 0 did not {doing} within "
            f"{self.address.timeout_s:g} s "
            f"(trainer.call_timeout_s); rollout rank {self.rank} holds no weights now"
        )
