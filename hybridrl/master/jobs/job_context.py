"""`JobContext`: what a process of a submitted job knows about its job and its own role.

Every such process has it before the user's code is imported: workers, programs, and the trainer. Code in it calls
`current_context()`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from hybridrl.errors import ConfigError
from hybridrl.master.plan.spec import TRAINER, JobSpec, Resource


@dataclass(frozen=True)
class JobContext:
    """The job of this process, and the role that it has.

    Attributes:
        job: Name of the job.
        run: Unique name of this run; the names of its actors start with it.
        role: Role of this process.
        config: The job's config, as JSON types.
        role_sizes: Role -> number of its processes, including the trainer's.
        device_type: Kind of device: GPU, CPU, TPU or NPU.
        entry: What the process runs, as in the job's spec.
        resource: Resources of the process, as requested.
    """

    job: str
    run: str
    role: str
    config: Mapping[str, Any] = field(default_factory=dict)
    role_sizes: Mapping[str, int] = field(default_factory=dict)
    device_type: str = "GPU"
    entry: str = ""
    resource: Resource = field(default_factory=Resource)

    @classmethod
    def of_role(cls, spec: JobSpec, role: str, *, job: str, run: str) -> Self:
        """Return the context of a role's processes. role: one of the spec's roles, or its trainer."""
        described = spec.trainer if role == TRAINER and spec.trainer is not None else spec.role(role)
        sizes = {one.name: one.total for one in spec.roles} | ({TRAINER: 1} if spec.trainer is not None else {})
        return cls(job, run, role, spec.config, sizes, spec.device_type, described.entry, described.resource)


_context: JobContext | None = None  # of this process


def set_context(context: JobContext | None) -> None:
    """Set the context of this process. Called before the user's code is imported."""
    global _context
    _context = context


def current_context() -> JobContext:
    """Return the context of this process.

    Raises:
        ConfigError: Outside of a submitted job.
    """
    if _context is None:
        raise ConfigError(
            "this process belongs to no submitted job, so it has no role and can call no role; start it as a role of a "
            "job with `RLJobBuilder` or `DLJobBuilder` and submit()"
        )
    return _context
