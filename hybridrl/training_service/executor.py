"""`JobExecutor`: one thread that computes for models and samplers, one job at a time, in turns.

In one process there is one; on Ray the trainers and each replica have one of their own, with the same lock.

A lane is a model, whose operations run in order, or a version that is sampled. The tenant that has used the least time
gets the next turn, and of its lanes the one that has waited longest. The service adds lanes; lanes know what to run.
"""

import logging
import threading
import time
from collections.abc import Callable
from typing import Any, Protocol

logger = logging.getLogger(__name__)
LOOK_PERIOD_S = 60.0  # between two looks at lanes that nothing has changed
STOP_TIMEOUT_S = 60.0  # for the job that runs when the server stops

Job = Callable[[], None]


class Lane(Protocol):
    """Something that has jobs."""

    tenant: str

    def next_job(self) -> Job | None:
        """Return what to run now, or None. Called with the executor's lock held."""
        ...


class JobExecutor:
    """See above.

    Attributes:
        lock: Guards the lanes and what their jobs are taken from.
    """

    def __init__(self, lock: Any = None) -> None:
        self.lock = lock or threading.RLock()
        self._changed = threading.Condition(self.lock)
        self._lanes: dict[str, Lane] = {}  # in the order of their turns
        self._used: dict[str, float] = {}  # tenant -> seconds
        self._is_stopping = False
        self._thread = threading.Thread(target=self._run, name="training-service", daemon=True)

    def start(self) -> None:
        """Begin to run jobs."""
        self._thread.start()

    def stop(self) -> None:
        """Run no further job, and wait for the one that runs."""
        with self.lock:
            self._is_stopping = True
            self._changed.notify_all()
        self._thread.join(STOP_TIMEOUT_S)

    def add(self, name: str, lane: Lane) -> None:
        """Add a lane, unless there is one of this name.

        A new tenant starts with the least time that others used.
        """
        with self.lock:
            active = {lane.tenant for lane in self._lanes.values()}
            least = min((self._used[tenant] for tenant in active), default=0.0)
            if lane.tenant not in active:
                self._used[lane.tenant] = max(self._used.get(lane.tenant, 0.0), least)
            self._lanes.setdefault(name, lane)
            self._changed.notify_all()

    def remove(self, name: str) -> None:
        """Take a lane out."""
        with self.lock:
            self._lanes.pop(name, None)

    def notify(self) -> None:
        """Look at the lanes again."""
        with self.lock:
            self._changed.notify_all()

    def _run(self) -> None:
        """Run jobs until `stop`.

        Consumes: The next job of the lanes.
        Waits for: A lane that has one.
        Unblocked by: `add`, `notify` and `stop`.
        """
        while True:
            with self.lock:
                while not self._is_stopping and (turn := self._next_turn()) is None:
                    self._changed.wait(LOOK_PERIOD_S)
                if self._is_stopping:
                    return
            assert turn is not None, "the loop has ended with a turn"
            tenant, job = turn
            started = time.monotonic()
            try:
                job()
            except Exception:
                logger.exception("a job of the training service failed outside an operation; the service goes on")
            with self.lock:
                self._used[tenant] += time.monotonic() - started

    def _next_turn(self) -> tuple[str, Job] | None:
        order = sorted(self._lanes, key=lambda name: self._used[self._lanes[name].tenant])
        for name in order:
            lane = self._lanes[name]
            if (job := lane.next_job()) is not None:
                self._lanes[name] = self._lanes.pop(name)  # to the end
                return lane.tenant, job
        return None
