"""Restart policy of a job's roles: which processes are restarted together, and the report when a role is not.

Pure functions; `JobSupervisor` (`job_supervisor.py`) carries them out. `failure_policy.py` decides how often.
"""

from collections.abc import Iterable, Mapping, Sequence

from hybridrl.failure_policy import RestartBudget
from hybridrl.master.plan.spec import EdgeSpec, RoleSpec


def restart_report(role: str, budget: RestartBudget) -> str:
    """Return why a role whose budget is spent is not restarted, as a sentence."""
    *before, last = budget.failures
    times = f"{len(before)} times" if len(before) != 1 else "once"
    history = f"; before it: {'; '.join(before)}" if before else ""
    return (
        f"role {role!r} was restarted {times}, which is the limit of max_restart({budget.limit}), "
        f"so the job ends; the last loss: {last}{history}"
    )


def downstream(edges: Iterable[EdgeSpec], role: str) -> list[str]:
    """Return the other roles that data or weights of a role reach over the declared edges, in any number of steps."""
    edges, reached = list(edges), [role]
    for source in reached:  # grows while it is read
        for edge in edges:
            if edge.source == source and edge.target not in reached:
                reached.append(edge.target)
    return reached[1:]


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
    if role.restart in ("role", "downstream"):
        return list(range(role.total))

    def node_of(rank: int) -> tuple[str, str | int]:
        value = labels.get(nodes[rank], {}).get(role.restart_label, "") if role.restart_label else ""
        return ("label", value) if value else ("position", positions[rank])

    lost_nodes = {node_of(rank) for rank in lost}
    return [rank for rank in range(role.total) if node_of(rank) in lost_nodes]
