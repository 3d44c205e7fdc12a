"""`PolicyGroups`: the policy's worker groups behind one face, whether actor and rollout share processes or not.

Hybrid (`Role.ActorRollout`, `Role.ActorRolloutRef`): weights go from engine to rollout inside each process. Separated (`Role.Actor`
and `Role.Rollout` on their own pools): rank 0 of the actor gathers them, every rollout process receives them. Either way a push ends
with the version and fingerprint each rollout process reports, compared here before anything is generated.
"""

from collections.abc import Mapping
from typing import Any

from hybridrl.errors import ConfigError, StaleWeightsError
from hybridrl.protocol import DataProto
from hybridrl.trainer.roles import Role

HYBRID = (Role.ActorRolloutRef, Role.ActorRollout)


class PolicyGroups:
    """groups: role name -> worker group, as `launch` returns them. sleep: free the rollout's device memory while training."""

    def __init__(self, groups: Mapping[str, Any], *, sleep: bool = False):
        self.hybrid = next((groups[str(role)] for role in HYBRID if str(role) in groups), None)
        self.actor = self.hybrid or groups.get(str(Role.Actor))
        self.rollout = self.hybrid or groups.get(str(Role.Rollout))
        self.ref = groups.get(str(Role.RefPolicy)) or groups.get(str(Role.ActorRolloutRef))
        self.sleep = sleep and self.hybrid is not None
        self._asleep = False
        if self.actor is None or self.rollout is None:
            raise ConfigError("the policy needs Role.ActorRollout, or both Role.Actor and Role.Rollout, in role_worker_mapping")

    def generate(self, prompts: DataProto) -> DataProto:
        """Return responses; see `ActorRolloutRefWorker.generate_sequences`."""
        self._wake_up()
        return self.rollout.generate_sequences(prompts)

    def rest(self) -> None:
        """Give the rollout's device memory to training until it generates or receives weights again."""
        if self.sleep and not self._asleep:
            self.rollout.rollout_sleep()
            self._asleep = True

    def push_weights(self, version: int) -> None:
        """Make every rollout process hold the actor's weights as `version`. Raises StaleWeightsError naming who does not."""
        self._wake_up()
        if self.hybrid is not None:
            health = self.hybrid.update_weights(version)
        else:
            health = self.rollout.receive_weights(version, self.actor.gather_weights()[0])
        check_health(health, version)

    def _wake_up(self) -> None:
        if self._asleep:
            self.rollout.rollout_wake_up()
            self._asleep = False


def check_health(health: list, version: int) -> None:
    """Raise StaleWeightsError unless every rollout process holds `version` with one and the same fingerprint."""
    stale = [rank for rank, h in enumerate(health) if h.version != version]
    if stale:
        raise StaleWeightsError(
            f"rollout ranks {stale} hold version {[health[r].version for r in stale]} after a push of version {version}"
        )
    if len({h.fingerprint for h in health}) > 1:
        held = ", ".join(f"rank {rank}: {h.fingerprint:#x}" for rank, h in enumerate(health))
        raise StaleWeightsError(f"rollout ranks hold different weights after a push of version {version} ({held})")
