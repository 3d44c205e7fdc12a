"""Which stages of a program are this process's: by labels, matched as globs, or by roles."""

import enum
import fnmatch
import os
from collections.abc import Iterable
from typing import Any

from hybridrl.framework.parallel.router import Router

LABELS_VARIABLE = (
    "HYBRIDRL_TASK_LABELS"  # environment: further labels of every task in the process, separated by commas
)


class Role(enum.StrEnum):
    """What a process does in a group of learners, collectors and evaluators."""

    LEARNER = "learner"
    COLLECTOR = "collector"
    EVALUATOR = "evaluator"
    FETCHER = "fetcher"


class VoidMiddleware:
    """What a middleware returns where it has nothing to do: `use` leaves it out, and called it does nothing."""

    def __call__(self, ctx: Any) -> None:
        pass


def environment_labels() -> set[str]:
    """Return the labels that the environment gives."""
    return {label for label in (part.strip() for part in os.environ.get(LABELS_VARIABLE, "").split(",")) if label}


def labels_of(router: Router, *, async_mode: bool, own: Iterable[str] = ()) -> set[str]:
    """Return a task's labels: `standalone`, or `distributed`, `node.N` and the group's; `async`; its own and the
    environment's.
    """
    place = {"distributed", f"node.{router.node_id}", *router.labels} if router.is_active else {"standalone"}
    return place | ({"async"} if async_mode else set()) | set(own) | environment_labels()


class Membership:
    """The part of a task that knows what kind of process it runs in.

    labels: see `labels_of`. roles: empty means all of them.
    """

    labels: set[str]
    roles: set[Role]

    def match_labels(self, patterns: str | Iterable[str]) -> bool:
        """Return whether any label matches any of the globs, for instance `"node.[12]"`."""
        patterns = [patterns] if isinstance(patterns, str) else patterns
        return any(fnmatch.filter(self.labels, pattern) for pattern in patterns)

    def add_role(self, role: Role | str) -> None:
        """Give this process one more role. A process without any has all of them."""
        try:
            self.roles.add(Role(role))
        except ValueError:
            raise ValueError(f"{role!r} is no role; there are {', '.join(Role)}") from None

    def has_role(self, role: Role | str) -> bool:
        """Return whether this process plays the role."""
        return not self.roles or role in self.roles

    def void(self) -> VoidMiddleware:
        """Return the stage that is left out."""
        return VoidMiddleware()
