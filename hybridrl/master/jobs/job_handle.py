"""`JobHandle`: the object with which the trainer of a submitted job works.

It holds the worker groups, the config, the plan and the resume point. It reports progress and losses to the job
supervisor.

Lives in the trainer's process.
"""

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

import cloudpickle

from hybridrl.errors import ConfigError, WorkerLost
from hybridrl.single_controller.awaiting import wait_all
from hybridrl.single_controller.cluster import JOB_SUPERVISOR, PROGRESS_GROUP, RECOVERY_GROUP
from hybridrl.single_controller.placement.plan import Plan
from hybridrl.single_controller.processes.worker_processes import WorkerProcesses
from hybridrl.single_controller.ray_worker_group import RayWorkerGroup

PROGRESS_TIMEOUT_S = 30.0
RECOVERY_TIMEOUT_S = 3600.0  # constructors may load a model; each step of a recovery has a deadline of its own
PASSED_ON = ("hosts", "names", "process_ids", "nodes", "rendezvous_address", "concurrency_groups")
"""What a handle has of its group's processes, under the same names."""


@dataclass(frozen=True)
class GroupHandle:
    """The current processes of a role, by rank, in a form that another process can turn into a worker group.

    Attributes:
        worker_cls: Cloudpickle of the class, so that the caller needs no copy of its file.
        hosts, names, process_ids, nodes, rendezvous_address, concurrency_groups: As `WorkerProcesses` has them.
    """

    role: str
    worker_cls: bytes
    hosts: list
    names: list[str]
    process_ids: list[int]
    nodes: list[str]
    rendezvous_address: tuple[str, int]
    concurrency_groups: frozenset[str] = frozenset()

    @classmethod
    def from_group(cls, group: RayWorkerGroup) -> Self:
        current = {name: copy.copy(getattr(group.processes, name)) for name in PASSED_ON}
        return cls(group.role, cloudpickle.dumps(group.worker_cls), **current)

    def to_group(self) -> RayWorkerGroup:
        """Return the group. Does not call its processes, which may be busy."""
        worker_cls = cloudpickle.loads(self.worker_cls)
        current = {name: copy.copy(getattr(self, name)) for name in PASSED_ON}
        processes = WorkerProcesses(self.role, classes={self.role: worker_cls}, **current)
        return RayWorkerGroup.from_processes(processes, worker_cls, role=self.role)


@dataclass(frozen=True)
class ResumePoint:
    """Progress of a job when its trainer starts.

    Attributes:
        restarts: Number of restarts of the trainer so far.
        step: Last reported step, or 0.
        commit: Path of the last reported commit, or "".
        new_ranks: Role -> ranks whose processes no trainer has had before. Their workers are constructed, but hold no
            state yet.
        commit_step: Step of that commit, or 0. A trainer that loads the commit continues with the step behind it;
            `step` is the one that had begun.
    """

    restarts: int = 0
    step: int = 0
    commit: str = ""
    new_ranks: Mapping[str, list[int]] = field(default_factory=dict)
    commit_step: int = 0


@dataclass
class JobHandle:
    """The job as its trainer sees it. groups: role -> worker group."""

    name: str
    config: Mapping[str, Any]
    groups: Mapping[str, RayWorkerGroup]
    plan: Plan
    resume_point: ResumePoint
    supervisor: Any

    def report_step(self, step: int, metrics: Mapping[str, float] | None = None) -> None:
        """Report that a step starts, which also completes the previous one.

        Optional; returns at once.

        Args:
            step: Number of the step that starts.
            metrics: Numbers of the previous step; `hybridrl job status` shows the newest, `job logs` all.

        Raises:
            ConfigError: A metric is no number.
        """
        for name, value in (metrics or {}).items():
            if not isinstance(value, int | float):
                raise ConfigError(f"report_step(metrics={{{name!r}: {value!r}}}): must be a number; write float(...)")
        numbers = {name: float(value) for name, value in (metrics or {}).items()}
        self.supervisor.record_progress.options(concurrency_group=PROGRESS_GROUP).remote(step, None, numbers)

    def report_commit(self, step: int, path: str) -> None:
        """Report a commit, for the `resume_point` of a restarted trainer.

        Returns when the supervisor has recorded it.
        """
        reported = self.supervisor.record_progress.options(concurrency_group=PROGRESS_GROUP).remote(step, path)
        wait_all([reported], role=JOB_SUPERVISOR, method="record_progress", timeout_s=PROGRESS_TIMEOUT_S)

    def recover(self, lost: WorkerLost) -> dict[str, list[int]]:
        """Have the supervisor restart lost processes and those that depend on them.

        The group objects stay the same. The new workers are constructed, but hold no state yet.

        Returns:
            Role -> ranks with a new process.

        Raises:
            WorkerLost: With a report, if the role was lost more often than its `max_restart`.
        """
        names = {role: list(group.worker_names) for role, group in self.groups.items()}
        call = self.supervisor.recover.options(concurrency_group=RECOVERY_GROUP).remote(lost, names)
        [handles] = wait_all([call], role=JOB_SUPERVISOR, method="recover", timeout_s=RECOVERY_TIMEOUT_S)
        return {role: self._replace_processes(role, handle) for role, handle in handles.items()}

    def _replace_processes(self, role: str, handle: GroupHandle) -> list[int]:
        group = self.groups[role]
        before, group.processes = group.processes, handle.to_group().processes
        return [rank for rank, name in enumerate(group.worker_names) if name != before.names[rank]]
