"""`RunContext`: supervisor channel, SIGTERM state, trace and run id of one run.

`main_ppo` and `main_sft` create one and pass it to whatever asks. A trainer that is constructed without one creates its
own, so that several trainers in one process do not see each other's attempts or signals. State that the process has
once, such as its connection to a master, is in `single_controller/monitoring/process.py`.
"""

from dataclasses import dataclass, field
from typing import Any, Protocol

from hybridrl.driver.lifecycle import DriverLifecycle
from hybridrl.driver.termination import TerminationSignal


class Trace(Protocol):
    """A trace that is being recorded."""

    def close(self) -> None:
        """End the recording."""


@dataclass(eq=False)
class RunContext:
    """State of one run in its driver; for one trainer.

    Attributes:
        lifecycle: Channel to the supervisor; without one, this driver is attempt 1.
        termination: Whether SIGTERM has arrived.
        trace: The trace that this run records; None without `trainer.trace`.
        config: The run's settings, once they are read and checked; None if the program only shows them.
        directory: The run's directory, once it is prepared.
    """

    lifecycle: DriverLifecycle = field(default_factory=DriverLifecycle)
    termination: TerminationSignal = field(default_factory=TerminationSignal)
    trace: Trace | None = None
    config: Any = None
    directory: str | None = None

    @property
    def run_id(self) -> str:
        """Tells this run apart from others of its experiment; the same in every attempt."""
        return self.lifecycle.run_id
