"""Watching processes that nobody is calling, from a thread that asks each of them to answer a call
that does nothing.
"""

import logging
import threading
from collections.abc import Callable, Sequence

from hybridrl.errors import CallTimeout, WorkerLost
from hybridrl.single_controller.awaiting import gather

logger = logging.getLogger(__name__)


class AlivenessWatch:
    """Watches Ray actors until the first death or `stop`.

    The question waits its turn behind whatever the process is doing, so a busy process is not disturbed; an idle one is
    asked every `every_s` seconds. on_lost: called from the watching thread with the WorkerLost.
    """

    def __init__(
        self, hosts: Sequence, label: str, *, every_s: float, on_lost: Callable[[WorkerLost], None] | None = None
    ):
        self.lost: WorkerLost | None = None
        self._hosts, self._label, self._every_s, self._on_lost = list(hosts), label, every_s, on_lost
        self._stopped = threading.Event()
        threading.Thread(target=self._run, name=f"aliveness of {label}", daemon=True).start()

    def stop(self) -> None:
        self._stopped.set()

    def _run(self) -> None:
        import ray

        asked: dict = {}  # reference -> rank; a busy process keeps its question until its turn comes
        while not self._stopped.is_set():
            asked |= {
                self._hosts[rank].ping.remote(): rank for rank in range(len(self._hosts)) if rank not in asked.values()
            }
            done, pending = ray.wait(list(asked), num_returns=len(asked), timeout=self._every_s, fetch_local=False)
            try:
                gather(
                    done,
                    [asked.pop(answer) for answer in done],
                    role=self._label,
                    method="ping",
                    timeout_s=self._every_s,
                )
            except WorkerLost as lost:
                return self._tell(lost)
            except CallTimeout:
                continue
            if not pending:
                self._stopped.wait(self._every_s)

    def _tell(self, error: WorkerLost) -> None:
        if self._stopped.is_set():  # ended on purpose
            return
        self.lost = error
        logger.error("%s", error)
        if self._on_lost is not None:
            self._on_lost(error)
