"""What a process reports to the master of its job, if there is one.

Used in the driver and in workers.
"""

import logging
from collections.abc import Mapping, Sequence

from hybridrl.failure_policy import Decision
from hybridrl.single_controller.monitoring.process_state import PROCESS

logger = logging.getLogger(__name__)
RANKS_TIMEOUT_S = 20.0  # for a master that is being restarted


def report_call_timeout(role: str, ranks: Sequence[int], method: str, timeout_s: float) -> None:
    """Report to this process's master, if it has one, that workers did not answer a call in time."""
    if (master := PROCESS.master) is not None:
        call = {"role": role, "ranks": list(ranks), "method": method, "timeout_s": timeout_s}
        master.send({"call_timeout": call})


def report_decision(decision: Decision) -> None:
    """Report to this process's master, if it has one, what follows a failure."""
    if (master := PROCESS.master) is not None:
        master.send({"decision": decision.to_json()})


def report_ranks(sizes: Mapping[str, int], text: str) -> None:
    """Report to this process's master, if it has one, that all workers end now and so many start instead.

    Returns when the master has received it, so that it does not take their end for a failure.

    Args:
        sizes: Roles of a process, joined by "+" -> number of processes.
        text: Why, as a sentence.
    """
    if (master := PROCESS.master) is not None:
        master.send({"event": "RanksChanged", "sizes": dict(sizes), "text": text})
        if not master.drain(RANKS_TIMEOUT_S):
            logger.warning(
                "the master did not answer within %g s; it may report ended workers as lost", RANKS_TIMEOUT_S
            )
