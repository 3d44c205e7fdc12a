"""`RemoteEvaluator`: validations on the evaluator's own processes, beside training (`trainer.eval_n_gpus`).

The driver's part of a validation (decoding, scoring) runs in a thread. A newer request replaces one that still waits.
An error in the thread is raised in the training loop at its next `poll`.
"""

import contextlib
import queue
import threading
import time
from collections.abc import Callable
from typing import Any

from hybridrl.errors import WorkerLost

Evaluate = Callable[[int, Any], dict[str, float]]  # version, weights (a reference) -> metrics
DRAIN_TIMEOUT_S = 1800.0  # for the last evaluation after training


class RemoteEvaluator:
    """Run `evaluate(version, weights)` in a thread, one call at a time."""

    def __init__(self, evaluate: Evaluate):
        self._evaluate = evaluate
        self._requests: queue.Queue = queue.Queue(maxsize=1)
        self._results: queue.Queue = queue.Queue()
        self._lost: tuple[int, Any] | None = None  # request that a lost evaluator process interrupted
        self._start()

    def _start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="evaluation", daemon=True)
        self._thread.start()

    def submit(self, version: int, weights: Any) -> None:
        """Queue these weights for evaluation, replacing a request that still waits."""
        if not self._thread.is_alive():
            self._start()
        while True:
            try:
                self._requests.put_nowait((version, weights))
                return
            except queue.Full:
                _get_nowait(self._requests)

    def resubmit(self) -> None:
        """Submit the request again that a lost evaluator process interrupted, unless a newer one waits."""
        lost, self._lost = self._lost, None
        if lost is not None and self._requests.empty():
            self.submit(*lost)

    def poll(self) -> list[dict[str, float]]:
        """Return the metrics of evaluations finished since the last call, oldest first, without waiting.

        Each has `val/version`, the version of the evaluated weights. Raises the error of a failed evaluation.
        """
        finished = []
        while (result := _get_nowait(self._results)) is not None:
            if isinstance(result, BaseException):
                raise result
            finished.append(result)
        return finished

    def drain(self) -> list[dict[str, float]]:
        """Wait for the running and the waiting evaluation; return their metrics.

        Raises:
            TimeoutError: They are not finished after `DRAIN_TIMEOUT_S`.
        """
        self._end()
        return self.poll()

    def close(self) -> None:
        """Wait for the running evaluation, and forget it and the waiting one."""
        _get_nowait(self._requests)
        with contextlib.suppress(TimeoutError):
            self._end()

    def _end(self) -> None:
        deadline = time.monotonic() + DRAIN_TIMEOUT_S
        with contextlib.suppress(queue.Full):  # the thread lives, and the error below is raised
            self._requests.put(None, timeout=DRAIN_TIMEOUT_S)
            self._thread.join(max(0.0, deadline - time.monotonic()))
        if self._thread.is_alive():
            raise TimeoutError(f"the last evaluation was not finished {DRAIN_TIMEOUT_S:g} s after the end of training")

    def _run(self) -> None:
        while (request := self._requests.get()) is not None:
            version, weights = request
            try:
                self._results.put(self._evaluate(version, weights) | {"val/version": float(version)})
            except BaseException as error:
                self._lost = request if isinstance(error, WorkerLost) else None
                self._results.put(error)


def _get_nowait(source: queue.Queue) -> Any:
    try:
        return source.get_nowait()
    except queue.Empty:
        return None
