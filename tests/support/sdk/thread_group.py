"""`ThreadWorkerGroup`: several ranks in this process, one thread each; the rosters and the context of a job of them."""

import concurrent.futures
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from hybridrl.errors import CallTimeout, WorkerLost
from hybridrl.master.jobs.job_context import JobContext, set_context
from hybridrl.master.jobs.roster import Roster
from hybridrl.sdk import role_calls
from hybridrl.single_controller import endpoints
from hybridrl.single_controller.references import OutputRefs, resolve_awaitable
from hybridrl.single_controller.worker_group import Arguments, WorkerGroup


class ThreadWorkerGroup(WorkerGroup):
    """A group whose workers are objects; every rank runs its calls one after another."""

    def __init__(self, worker_cls: type, *, role: str, world_size: int, args: Sequence[Any] = ()) -> None:
        super().__init__(worker_cls, role=role, world_size=world_size)
        self.workers = [worker_cls(*args) for _ in range(world_size)]
        for rank, worker in enumerate(self.workers):
            worker.number = rank
        self.threads = [ThreadPoolExecutor(1) for _ in range(world_size)]
        self.lost: set[int] = set()
        self.waiting: dict[Future, int] = {}

    def lose(self, rank: int) -> None:
        """From now on, and for calls that have not ended, this rank is lost."""
        self.lost.add(rank)
        for output, its_rank in list(self.waiting.items()):
            if its_rank == rank and not output.done():
                output.set_exception(WorkerLost(self.role, rank, "?", "it was ended by the test"))

    def start_calls(
        self,
        method: str,
        ranks: Sequence[int],
        arguments: Sequence[Arguments],
        **_: Any,
    ) -> OutputRefs:
        outputs = [self._start(method, rank, *own) for rank, own in zip(ranks, arguments, strict=True)]
        return OutputRefs(outputs, ranks=list(ranks), fetch=self.fetch)

    def _start(self, method: str, rank: int, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Future:
        output: Future = Future()
        self.waiting[output] = rank
        if rank in self.lost:
            output.set_exception(WorkerLost(self.role, rank, method, "it was ended by the test"))
            return output

        def run() -> None:
            try:
                attribute = self.attributes.get(method, method)
                function = endpoints.find(method) or getattr(self.workers[rank], attribute)
                value, error = resolve_awaitable(function(*args, **kwargs)), None
            except Exception as raised:
                value, error = None, raised
            if not output.done():
                output.set_exception(error) if error else output.set_result(value)

        self.threads[rank].submit(run)
        return output

    def fetch(self, references: list[Any], *, method: str = "get", timeout_s: float | None = None) -> list[Any]:
        try:
            for output in concurrent.futures.as_completed(references, timeout=timeout_s):
                output.result()
        except TimeoutError as error:
            raise CallTimeout(f"{method}() of {self.role}", role=self.role, method=method) from error
        return [output.result() for output in references]

    def as_futures(self, references: Sequence[Any]) -> list[Future]:
        return list(references)

    def put(self, value: Any) -> Any:
        return value

    def put_each(self, values: Sequence[Any]) -> list[Any]:
        return list(values)

    def shutdown(self) -> None:
        for thread in self.threads:
            thread.shutdown(wait=False, cancel_futures=True)


class ThreadJob:
    """A job whose roles are thread groups. It has the functions of `roster.py`, which ask a job supervisor."""

    def __init__(self, roles: Mapping[str, tuple[type, int]]) -> None:
        self.roles, self.lookups = dict(roles), 0
        self.queues: dict[str, str] = {}
        self.rosters = {role: self._roster(role, epoch=0) for role in roles}
        context = JobContext(job="threads", run="threads-1", role="trainer", config={"lr": 0.5})
        sizes = {role: size for role, (_, size) in self.roles.items()} | {"trainer": 1}
        set_context(replace(context, role_sizes=sizes))

    def _roster(self, role: str, epoch: int) -> Roster:
        cls, size = self.roles[role]
        handle = ThreadHandle(ThreadWorkerGroup(cls, role=role, world_size=size), epoch)
        return Roster(epoch, handle, [0.0] * size, dict(handle.group.invocations))

    def group(self, role: str) -> ThreadWorkerGroup:
        return self.rosters[role].handle.group

    def restart(self, role: str) -> None:
        self.rosters[role] = self._roster(role, self.rosters[role].epoch + 1)

    def lookup_roster(self, role: str) -> Roster:
        self.lookups += 1
        roster = self.rosters[role]
        return replace(roster, ready_for_s=[time.monotonic() - roster.handle.ready_at] * len(roster.ready_for_s))

    def register_queue(self, name: str, process: str) -> None:
        assert self.queues.setdefault(name, process) == process

    def queue_owner(self, name: str) -> str:
        return self.queues[name]

    @staticmethod
    def loss_account(lost: WorkerLost) -> WorkerLost:
        return WorkerLost(lost.role, lost.rank, lost.method, "in the master's words")

    def close(self) -> None:
        set_context(None)
        endpoints.clear()
        role_calls.forget_processes()
        for roster in self.rosters.values():
            roster.handle.group.shutdown()


class ThreadHandle:
    """What a roster has as its handle."""

    def __init__(self, group: ThreadWorkerGroup, epoch: int) -> None:
        self.group, self.role, self.ready_at = group, group.role, time.monotonic()
        self.names = [f"threads-1/{group.role}-{rank}.{epoch}" for rank in range(group.world_size)]

    def to_group(self) -> ThreadWorkerGroup:
        return self.group
