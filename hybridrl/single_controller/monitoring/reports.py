"""What a process reports to the master of its job, if there is one.

Used in the driver and in workers.
"""

from collections.abc import Sequence

from hybridrl.failure_policy import Decision
from hybridrl.single_controller.monitoring.process_state import PROCESS


def report_call_timeout(role: str, ranks: Sequence[int], method: str, timeout_s: float) -> None:
    """Report to this process's master, if it has one, that workers did not answer a call in time."""
    if (master := PROCESS.master) is not None:
        call = {"role": role, "ranks": list(ranks), "method": method, "timeout_s": timeout_s}
        master.send({"call_timeout": call})


def report_decision(decision: Decision) -> None:
    """Report to this process's master, if it has one, what follows a failure."""
    if (master := PROCESS.master) is not None:
        master.send({"decision": decision.to_json()})
