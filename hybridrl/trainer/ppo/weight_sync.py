"""`WeightSync`: pushes of weights from the actor's processes to the rollout's, and the check that ends each of them.

The driver moves nothing. It tells rank 0 of the actor to send and every rollout process to receive, and both do so when
their turn comes: calls on a process are carried out in the order in which they were made. How the bytes travel is
`workers/rollout/transport`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from hybridrl.config.schema.workers import WeightSyncConfig
from hybridrl.errors import StaleWeightsError
from hybridrl.single_controller.references import References

LIVE = ("shared_memory", "broadcast")  # sender and receivers are at work at the same time, over a channel


class WeightSync:
    """actor, rollout: groups in processes of their own. ahead: generation runs ahead of training, which should not wait
    for it.

    held: version and whereabouts of what the rollout has taken last, as `receive_weights` takes them.
    """

    def __init__(self, actor: Any, rollout: Any, settings: WeightSyncConfig, *, ahead: bool):
        self._actor, self._rollout, self._settings, self._ahead = actor, rollout, settings, ahead
        self._transport: str | None = None  # chosen, and open
        self.address: Any = None  # of the channel, if it has one
        self.held: tuple[int, Any] | None = None

    def push_later(self, version: int) -> "Push":
        """Have the actor's weights taken as `version`. After a push that failed, a new channel is opened first.

        With weight_sync.lora=adapter only the adapters go over a channel that everything has gone over before.
        """
        adapters = self._settings.lora == "adapter" and self._transport is not None
        return self.receive_later(version, self.send_later(version, adapters=adapters), adapters=adapters)

    def send_later(self, version: int, *, adapters: bool = False) -> list:
        """The actor's half of a push: have its weights sent as they are now."""
        if self._transport is None:
            self._transport = self._open()
        return self._actor.send_weights.later(version, adapters)

    def receive_later(self, version: int, sent: list, *, adapters: bool = False) -> "Push":
        """The rollout's half: have it take what `send_later` returned."""
        where = None if self._transport in LIVE else sent[0]
        health = self._rollout.receive_weights.later(version, where, adapters)
        return Push(self._rollout, health, version, sent=sent, after=partial(self._after, where))

    def abandon(self, reason: str) -> None:
        """Have an actor that waits for rollout processes wait no longer: one of them will never answer."""
        if self.address is not None:
            self.address.abandon(reason)

    def reopen(self) -> None:
        """Open a new channel before the next push: a process at its other end was replaced."""
        self._transport = None

    def _open(self) -> str:
        transport = self._settings.transport
        if transport in ("auto", "in_process"):
            transport = self._choose()
        self.address = self._actor.open_weight_channel(transport, self._rollout.world_size)[0]
        if self.address is not None:
            self._rollout.join_weight_channel(self.address)
        return transport

    def _choose(self) -> str:
        """Weights in the object store wait for a rollout that is busy; else what is fastest where the processes are."""
        if self._ahead:
            return "object_store"
        machines = {*self._actor.machine(), *self._rollout.machine()}
        return "shared_memory" if len(machines) == 1 else "broadcast"

    def _after(self, where: Any, version: int, error: BaseException | None) -> None:
        if error is not None:
            self._transport = None
            return
        self.held = version, where
        if self._transport == "disk":
            self._actor.forget_weights.later(version)


class InProcessSync:
    """Pushes inside of processes that have actor and rollout both."""

    address = None  # nobody waits for another process

    def __init__(self, group: Any, settings: WeightSyncConfig):
        self._group, self._settings = group, settings
        self._complete = False  # the rollouts hold everything that adapters alone could not bring

    def push_later(self, version: int) -> "Push":
        """Have the actor's weights taken as `version`: all of them, or the adapters alone, see
        `WeightSync.push_later`.
        """
        adapters = self._settings.lora == "adapter" and self._complete
        self._complete = True
        return Push(self._group, self._group.update_weights.later(version, adapters), version, after=self._after)

    def abandon(self, reason: str) -> None:
        """Nothing: there is no channel."""

    def reopen(self) -> None:
        """Push everything next: a process was replaced."""
        self._complete = False

    def _after(self, version: int, error: BaseException | None) -> None:
        if error is not None:
            self.reopen()


@dataclass
class Push:
    """Weights on their way to the rollout as `version`.

    health: what each process will report. sent: what each of the actor's processes will say it sent, None inside one
    process. after: told the version, and what went wrong with it.
    """

    group: Any
    health: list
    version: int
    sent: list | None = None
    after: Callable[[int, BaseException | None], None] | None = None

    def check(self) -> None:
        """Wait until they are there. Raises StaleWeightsError naming the processes that do not hold them."""
        error: BaseException | None = None
        try:
            self._check()
        except BaseException as raised:
            error = raised
            raise
        finally:
            if self.after is not None:
                self.after(self.version, error)

    def _check(self) -> None:
        if self.sent is None:
            check_health(self.group.fetch(self.health, method="load_weights"), self.version)
            return
        # Both ends at once: whichever fails first says why.
        ends = References(
            [*self.health, *self.sent], ranks=[*range(len(self.health)), *range(len(self.sent))], fetch=self.group.fetch
        )
        answers = self.group.fetch(ends, method="receive_weights")
        check_health(answers[: len(self.health)], self.version, sent=answers[len(self.health)].fingerprint)


def check_health(health: list, version: int, *, sent: int | None = None) -> None:
    """Raise StaleWeightsError unless every rollout process holds `version` with one and the same fingerprint, and has
    received what was `sent`: the weights that it holds, or adapters that it merged itself.
    """
    stale = [rank for rank, h in enumerate(health) if h.version != version]
    if stale:
        raise StaleWeightsError(
            f"rollout ranks {stale} hold version {[health[r].version for r in stale]} after a push of version {version}"
        )
    if len({h.fingerprint for h in health}) > 1 or len({h.received for h in health} | ({sent} - {None})) > 1:
        held = ", ".join(
            f"rank {rank}: {_hex(h.fingerprint)}, received {_hex(h.received)}" for rank, h in enumerate(health)
        )
        said = "" if sent is None else f"; {_hex(sent)} was sent"
        raise StaleWeightsError(
            f"rollout ranks hold different weights after a push of version {version} ({held}{said})"
        )


def _hex(fingerprint: int | None) -> str:
    return "none" if fingerprint is None else f"{fingerprint:#x}"
