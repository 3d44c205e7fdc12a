"""`TimedWorkerGroup`: a worker group of stand-ins in the calling process, each call of which takes virtual time.

It is a `LocalWorkerGroup` of many ranks: dispatch, merging, deadlines and errors are those of every group. A call
starts on a rank when it was submitted, when its arguments are ready, and when the rank's device has done its earlier
calls. In a collective call all ranks start together and wait for the slowest of them after every phase.
"""

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from benchmarks.simulation.clock import TimedRef, VirtualClock
from benchmarks.simulation.worker import COLLECTIVE, SimulatedWork, TimedAnswer, TimedWorker
from hybridrl.single_controller.invocation import DEFAULT_TIMEOUT_S, Invocation
from hybridrl.single_controller.local_worker_group import LocalWorkerGroup
from hybridrl.single_controller.placement.node_slots import ResourcePool
from hybridrl.single_controller.references import OutputRefs, materialize
from hybridrl.single_controller.worker_group import Arguments, ClassWithInitArgs, WorkerGroup


class TimedWorkerGroup(LocalWorkerGroup[TimedWorker]):
    """Stand-ins of one role. Roles on one pool share its devices.

    Attributes:
        clock, workload: Of the run; `timed_groups` sets them.
        calls_s: Method -> seconds of every call, from its submission to its last answer.
    """

    clock: VirtualClock
    workload: SimulatedWork

    def __init__(
        self, resource_pool: ResourcePool | None, ray_cls_with_init: ClassWithInitArgs[Any], *, role: str = "worker"
    ) -> None:
        assert resource_pool is not None, "a pool says how many stand-ins there are"
        WorkerGroup.__init__(self, ray_cls_with_init.cls, role=role, world_size=resource_pool.world_size)
        self.pool = id(resource_pool)
        config, own_role = ray_cls_with_init.args
        self.members = [
            TimedWorker(config, own_role, rank=rank, world_size=self.world_size, workload=self.workload)
            for rank in range(self.world_size)
        ]
        self.calls_s: dict[str, list[float]] = {}

    def start_calls(
        self,
        method: str,
        ranks: Sequence[int],
        arguments: Sequence[Arguments],
        *,
        invocation: Invocation | None = None,
        with_num_rows: bool = False,
    ) -> OutputRefs:
        answers, starts, start_cpu_s = [], [], time.thread_time()
        for rank, own in zip(ranks, arguments, strict=True):
            with self.clock.in_worker():
                args, kwargs = self._read(*own)
                answer: TimedAnswer = getattr(self.members[rank], method)(*args, **kwargs)
                answers.append(answer)
                starts.append(self.clock.free_from((self.pool, rank)))
        self.clock.workers_cpu_s += time.thread_time() - start_cpu_s
        ends = self._occupy(ranks, answers, starts, together=method in COLLECTIVE)
        self.calls_s.setdefault(method, []).append(max(ends) - self.clock.now_s)
        references = [TimedRef(answer.value, end) for answer, end in zip(answers, ends, strict=True)]
        sizes = [len(a.value) if hasattr(a.value, "__len__") else None for a in answers] if with_num_rows else None
        return OutputRefs(references, ranks=list(ranks), fetch=self.clock.fetch, sizes=sizes)

    def _read(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments with results of other calls in place of references to them."""
        args, kwargs = materialize(args, kwargs)
        return tuple(self.clock.fetch(list(args))), dict(
            zip(kwargs, self.clock.fetch(list(kwargs.values())), strict=True)
        )

    def _occupy(
        self, ranks: Sequence[int], answers: Sequence[TimedAnswer], starts: Sequence[float], *, together: bool
    ) -> list[float]:
        """Let the ranks' devices do this work, and return when each has its answer."""
        if together:
            starts = [max(starts)] * len(starts)
            phases = zip(*(answer.phases for answer in answers), strict=True)
            lasts = [sum(max(phase) for phase in phases)] * len(answers)
        else:
            lasts = [sum(answer.phases) for answer in answers]
        return [
            self.clock.occupy((self.pool, rank), start_s=start, seconds=seconds) if seconds else max(start, 0.0)
            for rank, start, seconds in zip(ranks, starts, lasts, strict=True)
        ]

    def fetch(
        self, references: list[Any], *, method: str = "get", timeout_s: float | None = DEFAULT_TIMEOUT_S
    ) -> list[Any]:
        return self.clock.fetch(references)

    def as_futures(self, references: Sequence[Any]) -> list[Future[Any]]:
        return super().as_futures(self.clock.fetch(list(references)))

    def shutdown(self) -> None:
        self.members = []


def timed_groups(clock: VirtualClock, workload: SimulatedWork) -> type[TimedWorkerGroup]:
    """Return the group class of one run."""
    return type("TimedWorkerGroup", (TimedWorkerGroup,), {"clock": clock, "workload": workload})
