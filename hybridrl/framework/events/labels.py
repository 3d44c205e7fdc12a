"""Labels and roles of a process, which decide which stages of a program it runs."""

import enum
import fnmatch
import os
from collections.abc import Iterable

from hybridrl.framework.events.local_peers import LocalPeers
from hybridrl.framework.stage import VoidMiddleware

LABELS_VARIABLE = "HYBRIDRL_TASK_LABELS"  # environment variable: labels of every task in the process, comma-separated


class ProcessRole(enum.StrEnum):
    """Role of a process in a group of learners, collectors and evaluators."""

    LEARNER = "learner"
    COLLECTOR = "collector"
    EVALUATOR = "evaluator"
    FETCHER = "fetcher"


Role = ProcessRole  # DI-engine's name


def environment_labels() -> set[str]:
    """Return the labels from the environment variable."""
    return {label for label in (part.strip() for part in os.environ.get(LABELS_VARIABLE, "").split(",")) if label}


class ProcessLabels:
    """Labels and roles of the process of a task.

    Args:
        router: Of the process.
        async_mode: Of the task.
        own: Labels of the task.

    Attributes:
        labels: `standalone`, or `distributed`, `node.N` and those of the group; `async`; the task's own; and those of
            the environment.
        roles: Roles of the process; empty means all.
        role: The enum of roles, so that programs may write `task.role.LEARNER`.
    """

    role = ProcessRole

    def __init__(self, router: LocalPeers, *, async_mode: bool, own: Iterable[str] = ()) -> None:
        group = {"distributed", f"node.{router.node_id}", *router.labels} if router.is_active else {"standalone"}
        self.labels = group | ({"async"} if async_mode else set()) | set(own) | environment_labels()
        self.roles: set[ProcessRole] = set()

    def match_labels(self, patterns: str | Iterable[str]) -> bool:
        """Return whether any label matches any of the globs, for instance `"node.[12]"`."""
        patterns = [patterns] if isinstance(patterns, str) else patterns
        return any(fnmatch.filter(self.labels, pattern) for pattern in patterns)

    def add_role(self, role: ProcessRole | str) -> None:
        """Add a role to this process, which without any has all of them."""
        try:
            self.roles.add(ProcessRole(role))
        except ValueError:
            raise ValueError(f"role {role!r} is unknown; use one of {', '.join(ProcessRole)}") from None

    def has_role(self, role: ProcessRole | str) -> bool:
        """Return whether this process has the role."""
        return not self.roles or role in self.roles

    def void(self) -> VoidMiddleware:
        """Return a stage that is left out."""
        return VoidMiddleware()
