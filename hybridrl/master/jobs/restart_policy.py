"""Who is started again with a process that was lost, and how often.

Pure: the keeper of a job (`driver.py`) carries it out.
"""

from collections.abc import Iterable, Mapping, Sequence

from hybridrl.master.jobs.spec import RoleSpec
from hybridrl.master.state.reducer import REFILL_STEPS


class Budgets:
    """most: role -> losses that it survives. Steps that go well make up for losses, as in `reducer.py`."""

    def __init__(self, most: Mapping[str, int]):
        self.most = dict(most)
        self.losses: dict[str, list[str]] = {role: [] for role in most}
        self.step = 0
        self._healthy_steps = 0

    def stepped(self, step: int) -> None:
        """Note that a step begins. One that was told before says nothing."""
        if step > self.step:
            self.step = step
            self._healthy_steps += 1
        if self._healthy_steps >= REFILL_STEPS:
            for losses in self.losses.values():
                losses.clear()

    def take(self, role: str, account: str) -> bool:
        """Note a loss, in words; return whether the role survives it. After one too many nothing more is noted."""
        self._healthy_steps = 0
        if len(self.losses[role]) <= self.most[role]:
            self.losses[role].append(f"{account} (step {self.step})")
        return len(self.losses[role]) <= self.most[role]

    def report(self, role: str) -> str:
        """Return why a role is not started again, in a sentence."""
        *before, last = self.losses[role]
        times = f"{len(before)} times" if len(before) != 1 else "once"
        history = f"; before it: {'; '.join(before)}" if before else ""
        return (
            f"role {role!r} was started again {times}, which is all that max_restart({self.most[role]}) "
            "allows, so the job ends; "
            f"the last loss: {last}{history}"
        )


def started_with(
    role: RoleSpec,
    lost: Iterable[int],
    *,
    nodes: Sequence[str],
    labels: Mapping[str, Mapping[str, str]],
    places: Sequence[int],
) -> list[int]:
    """Return the ranks that are started again when these are lost.

    nodes: by rank, the machine it is on. labels: of the machines. places: by rank, its node in the role's description.
    """
    lost = sorted(set(lost))
    if role.restart == "process":
        return lost
    if role.restart == "role":
        return list(range(role.total))

    def node_of(rank: int) -> tuple[str, str | int]:
        value = labels.get(nodes[rank], {}).get(role.restart_label, "") if role.restart_label else ""
        return ("label", value) if value else ("place", places[rank])

    gone = {node_of(rank) for rank in lost}
    return [rank for rank in range(role.total) if node_of(rank) in gone]
