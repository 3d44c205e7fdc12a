"""Check in a thread that worker processes are alive, also between calls: `start_worker_aliveness_check`."""

import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any

from hybridrl.errors import CallTimeout, WorkerLost
from hybridrl.single_controller.awaiting import wait_all

logger = logging.getLogger(__name__)


class LivenessChecker:
    """Pings Ray actors until the first death or `stop`.

    A ping waits in the actor's queue behind the current call, so it does not disturb a busy process. An idle process is
    pinged every `period_s` seconds.

    Args:
        label: roles of the processes, for messages.
        on_lost: called from the thread with the WorkerLost.

    Attributes:
        lost: the first death, or None.
    """

    def __init__(
        self, hosts: Sequence[Any], label: str, *, period_s: float, on_lost: Callable[[WorkerLost], None] | None = None
    ) -> None:
        self.lost: WorkerLost | None = None
        self._hosts, self._label, self._period_s, self._on_lost = list(hosts), label, period_s, on_lost
        self._stopped = threading.Event()
        threading.Thread(target=self._run, name=f"liveness of {label}", daemon=True).start()

    def stop(self) -> None:
        self._stopped.set()

    def _run(self) -> None:
        import ray

        pings: dict[Any, int] = {}  # reference -> rank; at most one per process
        while not self._stopped.is_set():
            pings |= {
                self._hosts[rank].ping.remote(): rank for rank in range(len(self._hosts)) if rank not in pings.values()
            }
            done, pending = ray.wait(list(pings), num_returns=len(pings), timeout=self._period_s, fetch_local=False)
            try:
                ranks = [pings.pop(ping) for ping in done]
                wait_all(done, ranks, role=self._label, method="ping", timeout_s=self._period_s)
            except WorkerLost as lost:
                return self._report(lost)
            except CallTimeout:
                continue
            if not pending:
                self._stopped.wait(self._period_s)

    def _report(self, error: WorkerLost) -> None:
        if self._stopped.is_set():  # the group was shut down
            return
        self.lost = error
        logger.error("%s", error)
        if self._on_lost is not None:
            self._on_lost(error)
