"""What a trainer of a submitted job works with: its groups, where it stands, and a way to say that somebody is lost."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

import cloudpickle

from hybridrl.errors import WorkerLost
from hybridrl.single_controller.awaiting import gather
from hybridrl.single_controller.cluster import KEEPER, NOTES, RECOVERIES
from hybridrl.single_controller.placement.plan import Plan
from hybridrl.single_controller.processes.worker_processes import WorkerProcesses
from hybridrl.single_controller.ray_worker_group import RayWorkerGroup

NOTED_WITHIN_S = 30.0
RECOVERED_WITHIN_S = (
    3600.0  # for processes that load a model in their constructors; each step of it has a deadline of its own
)


@dataclass(frozen=True)
class Roster:
    """The processes of a role as they are now, by rank, for a process that calls them and did not start them.

    worker_cls: cloudpickle of the class, whose file need not be where the caller is.
    """

    role: str
    worker_cls: bytes
    hosts: list
    names: list[str]
    process_ids: list[int]
    nodes: list[str]
    master: tuple[str, int]

    @classmethod
    def of(cls, group: RayWorkerGroup) -> Self:
        now = group.processes
        known = (list(now.hosts), list(now.names), list(now.process_ids), list(now.nodes), now.master)
        return cls(group.role, cloudpickle.dumps(group.worker_cls), *known)

    def group(self) -> RayWorkerGroup:
        """Return the group; its processes are not asked, and may be busy."""
        worker_cls = cloudpickle.loads(self.worker_cls)
        known = (list(self.hosts), list(self.names), {self.role: worker_cls}, list(self.process_ids), self.master)
        return RayWorkerGroup.over(
            WorkerProcesses(self.role, *known, nodes=list(self.nodes)), worker_cls, role=self.role
        )


@dataclass(frozen=True)
class Standing:
    """Where a job stands when its trainer starts.

    restarts: how often it was started before. step, commit: what was told last, 0 and "" where nothing was. fresh: role
    -> ranks whose process no trainer has had before, so that their workers are constructed and have done nothing yet.
    """

    restarts: int = 0
    step: int = 0
    commit: str = ""
    fresh: Mapping[str, list[int]] = field(default_factory=dict)


@dataclass
class JobRun:
    """What a trainer works with. groups: role -> its worker group. config: the job's. standing: see `Standing`."""

    name: str
    config: Mapping[str, Any]
    groups: Mapping[str, RayWorkerGroup]
    plan: Plan
    standing: Standing
    keeper: Any

    def begin_step(self, step: int) -> None:
        """Tell that a step begins, and with it that the one before is done. Returns at once. Telling is not a must."""
        self.keeper.note.options(concurrency_group=NOTES).remote(step, None)

    def committed(self, step: int, path: str) -> None:
        """Tell of a commit: what a trainer that is started again finds in `standing`.

        Returns when that is known elsewhere.
        """
        told = self.keeper.note.options(concurrency_group=NOTES).remote(step, path)
        gather([told], role=KEEPER, method="note", timeout_s=NOTED_WITHIN_S)

    def recover(self, lost: WorkerLost) -> dict[str, list[int]]:
        """Have those who are lost started again, with whoever goes with them; return the ranks that are new, by role.

        Their workers are constructed and have done nothing yet. The groups are the same objects. Raises the loss, with
        a report, when the role has been lost too often.
        """
        names = {role: list(group.worker_names) for role, group in self.groups.items()}
        asked = self.keeper.recover.options(concurrency_group=RECOVERIES).remote(lost, names)
        [rosters] = gather([asked], role=KEEPER, method="recover", timeout_s=RECOVERED_WITHIN_S)
        return {role: self._renew(role, roster) for role, roster in rosters.items()}

    def _renew(self, role: str, roster: Roster) -> list[int]:
        group = self.groups[role]
        before, group.processes = group.processes, roster.group().processes
        return [rank for rank, name in enumerate(group.worker_names) if name != before.names[rank]]
