"""A group of several workers in this process, called one after the other: `WorkerGroup` without Ray."""

from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

from hybridrl.single_controller.invocation import Invocation
from hybridrl.single_controller.references import OutputRefs
from hybridrl.single_controller.worker_group import Arguments, WorkerGroup


class InProcessGroup(WorkerGroup[Any]):
    def __init__(self, workers: Sequence[Any]) -> None:
        super().__init__(type(workers[0]), role="sample", world_size=len(workers))
        self.workers = list(workers)

    def start_calls(
        self,
        method: str,
        ranks: Sequence[int],
        arguments: Sequence[Arguments],
        *,
        invocation: Invocation | None = None,
        with_num_rows: bool = False,
    ) -> OutputRefs:
        attribute = self.attributes.get(method, method)
        calls = zip(ranks, arguments, strict=True)
        outputs = [getattr(self.workers[rank], attribute)(*args, **kwargs) for rank, (args, kwargs) in calls]
        return OutputRefs(outputs, ranks=ranks, fetch=list)

    def fetch(self, references: list[Any], *, method: str = "get", timeout_s: float | None = None) -> list[Any]:
        return list(references)

    def as_futures(self, references: Sequence[Any]) -> list[Future[Any]]:
        futures: list[Future[Any]] = [Future() for _ in references]
        for future, value in zip(futures, references, strict=True):
            future.set_result(value)
        return futures

    def put(self, value: Any) -> Any:
        return value

    def put_each(self, values: Sequence[Any]) -> list[Any]:
        return list(values)

    def shutdown(self) -> None:
        self.workers = []
