"""`WeightSync`: pushes of the actor's weights to the rollout, each verified at its end.

`RolloutPipeline` uses it in the driver: `InProcessWeightSync`, or with a rollout in processes of its own
`CrossProcessWeightSync` (`cross_process_sync.py`). A job that only validates has no actor: `WeightsOfModel`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from hybridrl.config.schema.rollout import WeightSyncConfig
from hybridrl.errors import StaleWeightsError
from hybridrl.single_controller.references import OutputRefs
from hybridrl.trainer.ppo.policy.generator import Pending
from hybridrl.workers.rollout.requests import Probe, ProbedTokens

Turn = Callable[[int, Callable[[], Pending]], Pending]


def at_once(version: int, receive: Callable[[], Pending]) -> Pending:
    """Let the rollout receive without waiting for other work."""
    return receive()


class WeightSync(Protocol):
    """Starts pushes of the actor's weights.

    Attributes:
        address: Address of the open channel between processes, None without one.
    """

    address: Any

    @property
    def resend(self) -> Callable[[Sequence[int]], None] | None:
        """Function that sends the current weights to restarted rollout processes, given their ranks.

        None: no rollout process can restart alone. It holds the actor, too, or the actor trains meanwhile and the
        weights of the last push are nowhere else.
        """

    def push(self, version: int, turn: Turn = at_once, probing: "Probing | None" = None) -> Pending:
        """Start a push of the actor's weights, as they are now, as `version`.

        Args:
            version: Version of the weights.
            turn: A generator's `push`, which lets the rollout receive after everything submitted before.
            probing: What every rollout process samples after it.
        """

    def cancel(self, reason: str) -> None:
        """Release an actor that waits for rollout processes: one of them was lost."""

    def reset(self) -> None:
        """Make the next push a full one, over a new channel, because a process was replaced."""


class InProcessWeightSync:
    """Pushes inside processes that hold both actor and rollout."""

    address: Any = None
    resend: Callable[[Sequence[int]], None] | None = None

    def __init__(self, group: Any, settings: WeightSyncConfig):
        self._group, self._settings = group, settings
        self._complete = False  # whether the rollouts have had a full push, which adapters need

    def push(self, version: int, turn: Turn = at_once, probing: "Probing | None" = None) -> Pending:
        """Start a push: each process sends to itself."""
        adapters = self._settings.lora == "adapter" and self._complete
        self._complete = True

        def receive() -> PendingPush:
            health, method = self._group.update_weights.submit(version, adapters, *probe_of(probing)), "update_weights"
            return PendingPush(self._group, health, version, after=self._after, method=method, probing=probing)

        return turn(version, receive)

    def cancel(self, reason: str) -> None:
        """Do nothing: there is no channel."""

    def reset(self) -> None:
        self._complete = False

    def _after(self, version: int, error: BaseException | None) -> None:
        if error is not None:
            self.reset()


class WeightsOfModel:
    """No pushes: the rollout has read its weights from the model's directory.

    A restarted process reads them itself.
    """

    address: Any = None
    resend = staticmethod(lambda ranks: None)

    def __init__(self, group: Any):
        self._group = group

    def push(self, version: int, turn: Turn = at_once, probing: "Probing | None" = None) -> Pending:
        """Verify that every rollout process holds the model's weights, which are version 0.

        Nothing is probed.
        """
        ask, ignore = self._group.rollout_health.submit, lambda version, error: None
        return turn(version, lambda: PendingPush(self._group, ask(), version, after=ignore, method="rollout_health"))

    def cancel(self, reason: str) -> None:
        """Do nothing: there is no channel."""

    def reset(self) -> None:
        """Do nothing: there is no channel."""


@dataclass
class Probing:
    """A probe that goes with a push, and what rollout processes sampled for it."""

    probe: Probe
    found: Sequence[ProbedTokens] = ()


def probe_of(probing: Probing | None) -> tuple[Probe, ...]:
    """Return the last argument of a push; a worker of the user's own may have none for it."""
    return () if probing is None else (probing.probe,)


@dataclass
class PendingPush:
    """A submitted push of weights as `version`.

    Attributes:
        group: Group that fetches the results.
        health: References to the `RolloutHealth` of each rollout process.
        version: Version of the weights.
        after: Called at the end with the version and the error, if any.
        sent: References to the receipts of the actor's processes; none inside one process.
        probing: What goes with the push.
        method: The rollout's method that was called, for errors.
    """

    group: Any
    health: list
    version: int
    after: Callable[[int, BaseException | None], None]
    sent: Sequence = ()
    probing: Probing | None = None
    method: str = "receive_weights"

    def wait(self) -> None:
        """Wait for the push and verify it.

        Raises:
            StaleWeightsError: Some rollout processes do not hold these weights.
        """
        ranks = [*range(len(self.health)), *range(len(self.sent))]
        ends = OutputRefs([*self.health, *self.sent], ranks=ranks, fetch=self.group.fetch)
        try:  # both ends at once: the first failure has the cause
            results = self.group.fetch(ends, method=self.method)
            health, sent = results[: len(self.health)], results[len(self.health) :]
            verify_push(health, self.version, sent=sent[0].fingerprint if sent else None)
            if self.probing is not None:
                self.probing.found = [each.probed for each in health]
        except BaseException as error:
            self.after(self.version, error)
            raise
        self.after(self.version, None)


def verify_push(health: list, version: int, *, sent: int | None = None) -> None:
    """Raise StaleWeightsError unless every rollout process holds the pushed weights.

    Args:
        health: `RolloutHealth` of each rollout process. All must have the same version, fingerprint and receipt; a
            rollout that cannot read its own weights has no fingerprint.
        version: Version that they must hold.
        sent: Fingerprint of what the actor sent: the weights, or adapters that each rollout merges itself.
    """
    stale = [rank for rank, h in enumerate(health) if h.version != version]
    if stale:
        raise StaleWeightsError(
            f"rollout ranks {stale} hold version {[health[r].version for r in stale]} after a push of version {version}"
        )
    fingerprints = {h.fingerprint for h in health if h.reads_own_weights}
    received = {h.received for h in health if h.reads_own_weights or h.received is not None} | ({sent} - {None})
    if len(fingerprints) > 1 or len(received) > 1:
        held = ", ".join(
            f"rank {rank}: {_hex(h.fingerprint)}, received {_hex(h.received)}" for rank, h in enumerate(health)
        )
        expected = "" if sent is None else f"; {_hex(sent)} was sent"
        raise StaleWeightsError(
            f"rollout ranks hold different weights after a push of version {version} ({held}{expected})"
        )


def _hex(fingerprint: int | None) -> str:
    return "none" if fingerprint is None else f"{fingerprint:#x}"
