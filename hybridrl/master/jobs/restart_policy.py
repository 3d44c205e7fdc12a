"""Restart policy of a job's roles: which processes are restarted together, and how often.

Pure functions; `JobSupervisor` (`job_supervisor.py`) carries them out.
"""

from collections.abc import Iterable, Mapping, Sequence

from hybridrl.master.plan.spec import RoleSpec
from hybridrl.master.state.reducer import REFILL_STEPS


class RestartBudget:
    """Counts the losses of each role. `REFILL_STEPS` steps without a loss reset all counts.

    Args:
        max_restarts: Role -> losses that it survives.
    """

    def __init__(self, max_restarts: Mapping[str, int]):
        self.max_restarts = dict(max_restarts)
        self.losses: dict[str, list[str]] = {role: [] for role in max_restarts}
        self.step = 0
        self._healthy_steps = 0

    def on_step(self, step: int) -> None:
        """Count the start of a step. The same step counts once."""
        if step > self.step:
            self.step = step
            self._healthy_steps += 1
        if self._healthy_steps >= REFILL_STEPS:
            for losses in self.losses.values():
                losses.clear()

    def consume(self, role: str, reason: str) -> bool:
        """Record a loss and return whether the role survives it. Losses beyond the first fatal one are not recorded."""
        self._healthy_steps = 0
        if len(self.losses[role]) <= self.max_restarts[role]:
            self.losses[role].append(f"{reason} (step {self.step})")
        return len(self.losses[role]) <= self.max_restarts[role]

    def report(self, role: str) -> str:
        """Return why a role is not restarted, as a sentence."""
        *before, last = self.losses[role]
        times = f"{len(before)} times" if len(before) != 1 else "once"
        history = f"; before it: {'; '.join(before)}" if before else ""
        return (
            f"role {role!r} was restarted {times}, which is the limit of max_restart({self.max_restarts[role]}), "
            f"so the job ends; the last loss: {last}{history}"
        )


def restart_set(
    role: RoleSpec,
    lost: Iterable[int],
    *,
    nodes: Sequence[str],
    labels: Mapping[str, Mapping[str, str]],
    positions: Sequence[int],
) -> list[int]:
    """Return the ranks to restart when these ranks are lost.

    Args:
        role: Its `restart` and `restart_label` decide.
        lost: Ranks.
        nodes: By rank, the id of the machine it is on.
        labels: Machine -> its labels.
        positions: By rank, the number of its node in the role's description.
    """
    lost = sorted(set(lost))
    if role.restart == "process":
        return lost
    if role.restart == "role":
        return list(range(role.total))

    def node_of(rank: int) -> tuple[str, str | int]:
        value = labels.get(nodes[rank], {}).get(role.restart_label, "") if role.restart_label else ""
        return ("label", value) if value else ("position", positions[rank])

    lost_nodes = {node_of(rank) for rank in lost}
    return [rank for rank in range(role.total) if node_of(rank) in lost_nodes]
