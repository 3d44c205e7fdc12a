"""A run whose number of ranks never changes: the default. `elastic.py` is the other case (`trainer.min_ranks`)."""

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hybridrl.single_controller.placement.plan import Plan


class FixedRanks:
    """The number of ranks of a run.

    Attributes:
        grows: Whether training returns because missing ranks are taken back.
    """

    grows = False

    def plan(self, make_plan: "Callable[[], Plan]", *, job: str, reattach: bool) -> "Plan":
        """Return the placement to start.

        Args:
            make_plan: Makes a plan for the present sizes of the pools.
            job: Prefix of the names of reservations.
            reattach: Whether the processes of a previous driver are adopted, as many as it had.
        """
        return make_plan()

    def request_missing(self) -> None:
        """Request what the placement leaves out. Called when all processes run."""

    def run(self, train: Callable[[], None]) -> None:
        """Train, with another number of ranks again if that changes."""
        train()

    def can_grow(self) -> bool:
        """Return whether there are nodes for missing ranks now."""
        return False

    def on_step(self) -> None:
        """Note that a step is complete."""

    def metrics(self) -> dict[str, float]:
        """Return the number of ranks of each role, if it can change."""
        return {}

    def stop(self) -> None:
        """Withdraw the request for missing ranks. Safe to call twice."""
