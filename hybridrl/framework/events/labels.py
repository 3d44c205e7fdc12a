"""Labels and roles of a process, which decide which stages of a program it runs."""

import enum
import fnmatch
import os
from collections.abc import Iterable
from typing import Any

from hybridrl.framework.events.router import Router

LABELS_VARIABLE = "HYBRIDRL_TASK_LABELS"  # environment variable: labels of every task in the process, comma-separated


class Role(enum.StrEnum):
    """Role of a process in a group of learners, collectors and evaluators."""

    LEARNER = "learner"
    COLLECTOR = "collector"
    EVALUATOR = "evaluator"
    FETCHER = "fetcher"


class VoidMiddleware:
    """A stage without work: `Task.use` leaves it out, and a call does nothing."""

    def __call__(self, ctx: Any) -> None:
        pass


def environment_labels() -> set[str]:
    """Return the labels from the environment variable."""
    return {label for label in (part.strip() for part in os.environ.get(LABELS_VARIABLE, "").split(",")) if label}


def labels_of(router: Router, *, async_mode: bool, own: Iterable[str] = ()) -> set[str]:
    """Return the labels of a task.

    These are `standalone`, or `distributed`, `node.N` and those of the group; `async`; the task's own; and those of the
    environment.
    """
    group = {"distributed", f"node.{router.node_id}", *router.labels} if router.is_active else {"standalone"}
    return group | ({"async"} if async_mode else set()) | set(own) | environment_labels()


class StageLabels:
    """Base class of `Task` for the labels and roles of its process.

    Attributes:
        role: The enum of roles, so that programs may write `task.role.LEARNER`.
        labels: See `labels_of`.
        roles: Roles of the process; empty means all.
    """

    role = Role
    labels: set[str]
    roles: set[Role]

    def match_labels(self, patterns: str | Iterable[str]) -> bool:
        """Return whether any label matches any of the globs, for instance `"node.[12]"`."""
        patterns = [patterns] if isinstance(patterns, str) else patterns
        return any(fnmatch.filter(self.labels, pattern) for pattern in patterns)

    def add_role(self, role: Role | str) -> None:
        """Add a role to this process, which without any has all of them."""
        try:
            self.roles.add(Role(role))
        except ValueError:
            raise ValueError(f"role {role!r} is unknown; use one of {', '.join(Role)}") from None

    def has_role(self, role: Role | str) -> bool:
        """Return whether this process has the role."""
        return not self.roles or role in self.roles

    def void(self) -> VoidMiddleware:
        """Return a stage that is left out."""
        return VoidMiddleware()
