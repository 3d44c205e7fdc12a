"""`Finding`: one thing that was looked at."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        name: What.
        seen: The values.
        change: What to change; "" if nothing is wrong.
    """

    name: str
    seen: str
    change: str = ""

    @property
    def is_problem(self) -> bool:
        """Whether something should be changed."""
        return bool(self.change)

    def __str__(self) -> str:
        return (
            f"problem  {self.name}: {self.seen}\n         -> {self.change}"
            if self.change
            else f"ok       {self.name}: {self.seen}"
        )
