"""`ProgramRunner`: the sandbox of a run's settings, as `reward_score.code` uses it."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from hybridrl.rewards import sandbox
from hybridrl.rewards.sandbox.job import Limits, Outcome, Program, SandboxUnavailable


@dataclass(frozen=True)
class ProgramRunner:
    """Runs Python programs in the sandbox that the settings name. Nothing is started before the first use.

    Attributes:
        url: Of a remote sandbox; None: this machine's.
        max_concurrent: Requests of this process to a remote sandbox at the same time.
        memory_limit_mb: Of each program.
        time_limit_s: Of one test case.
        budget_s: Time in which the test cases of one response begin.
    """

    url: str | None = None
    max_concurrent: int = 16
    memory_limit_mb: int = 1024
    time_limit_s: float = 4.0
    budget_s: float = 5.0

    @property
    def concurrency(self) -> int:
        """How many programs of one response run at the same time: on this machine, other processes have theirs."""
        return 1 if self.url is None else self.max_concurrent

    def run(self, code: str, *, stdin: str = "", files: Mapping[str, bytes], time_limit_s: float) -> Outcome:
        """Return what became of a program. Raises SandboxFailed if the sandbox failed."""
        limits = Limits(wall_s=time_limit_s, memory_mb=self.memory_limit_mb)
        return self._sandbox.run(Program(code, stdin=stdin, files=files, limits=limits))

    def check(self) -> str:
        """Return what this sandbox is. Raises SandboxUnavailable with the reason and the way out."""
        if self.budget_s < self.time_limit_s:
            least_s = 2 * self.time_limit_s + 1
            raise SandboxUnavailable(
                f"reward_model.sandbox_fusion.timeout_s={self.time_limit_s:g} leaves no time for a second test case: "
                f"set reward_model.timeout_s={least_s:g} or more, or a shorter limit"
            )
        return self._sandbox.check()

    @cached_property
    def _sandbox(self) -> "sandbox.Sandbox":
        if self.url is None:
            return sandbox.LocalSandbox()
        return sandbox.HttpSandbox(self.url, max_concurrent=self.max_concurrent)
