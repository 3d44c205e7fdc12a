"""Validation in processes of its own, beside training. Training never waits for it, and what it finds says which weights it saw.

The newest request wins: weights that become due while an older evaluation is running replace those that are still waiting. The driver's
part (decoding, scoring) runs in a thread. What goes wrong there is raised in the training loop at its next look.
"""

import queue
import threading
from collections.abc import Callable
from typing import Any

from hybridrl.errors import WorkerLost

Evaluate = Callable[[int, Any], dict[str, float]]  # version, weights (a reference) -> metrics
FINISH_TIMEOUT_S = 1800.0  # for the last evaluation when training is over


class Evaluation:
    """Runs `evaluate(version, weights)` in a thread, one at a time."""

    def __init__(self, evaluate: Evaluate):
        self._evaluate = evaluate
        self._requests: queue.Queue = queue.Queue(maxsize=1)
        self._results: queue.Queue = queue.Queue()
        self._lost: tuple[int, Any] | None = None  # what was asked for when a process of the evaluator was lost
        self._start()

    def _start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="evaluation", daemon=True)
        self._thread.start()

    def request(self, version: int, weights: Any) -> None:
        """Evaluate these weights as soon as the running evaluation is over, instead of any that were waiting."""
        if not self._thread.is_alive():
            self._start()
        while True:
            try:
                self._requests.put_nowait((version, weights))
                return
            except queue.Full:
                _take(self._requests)

    def ask_again(self) -> None:
        """Evaluate what was lost with a process of the evaluator, which has a new one now, unless newer weights are waiting."""
        lost, self._lost = self._lost, None
        if lost is not None and self._requests.empty():
            self.request(*lost)

    def finished(self) -> list[dict[str, float]]:
        """Return the metrics of evaluations that ended since the last look, oldest first, each with `val/version`; waits for nothing."""
        found = []
        while (result := _take(self._results)) is not None:
            if isinstance(result, BaseException):
                raise result
            found.append(result)
        return found

    def finish(self) -> list[dict[str, float]]:
        """Wait for what is running and waiting, and return its metrics. Raises TimeoutError when it does not end."""
        self._requests.put(None, timeout=FINISH_TIMEOUT_S)
        self._thread.join(FINISH_TIMEOUT_S)
        if self._thread.is_alive():
            raise TimeoutError(f"the last evaluation did not end within {FINISH_TIMEOUT_S:g} s of the end of training")
        return self.finished()

    def _run(self) -> None:
        while (request := self._requests.get()) is not None:
            version, weights = request
            try:
                self._results.put(self._evaluate(version, weights) | {"val/version": float(version)})
            except BaseException as error:
                self._lost = request if isinstance(error, WorkerLost) else None
                self._results.put(error)


def _take(source: queue.Queue) -> Any:
    try:
        return source.get_nowait()
    except queue.Empty:
        return None
