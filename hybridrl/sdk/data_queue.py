"""`DataQueue`: a bounded queue between the processes of a job.

One process holds it; any other reaches it by its name.

    queue = DataQueue("samples", size=64, is_master=True)       # in the process that holds it, for example a rollout
    queue.put(sample)

    [first, second] = DataQueue("samples").get(2)               # in another process

The process that holds the queue answers in the thread `CONTROL`, so also while it works. Those answers never wait: a
process that waits for elements, or for room, asks again. Large elements stay in Ray's object store, and go from the
process that put them to the one that gets them. When the holding process is lost, so are the elements.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, cast

from hybridrl.errors import CallTimeout, ConfigError
from hybridrl.master.jobs.job_context import current_context
from hybridrl.master.jobs.roster import queue_owner, register_queue
from hybridrl.master.plan.spec import TRAINER
from hybridrl.sdk.role_calls import known_role
from hybridrl.sdk.role_group import RoleActor
from hybridrl.sdk.runtime import current_worker
from hybridrl.single_controller import endpoints
from hybridrl.single_controller.invocation import CONTROL, DEFAULT_TIMEOUT_S, Dispatch, Invocation

T = TypeVar("T")
CALL_TIMEOUT_S = 120.0  # of one question to the holding process, which never waits
FIRST_POLL_S, MAX_POLL_S = 0.005, 0.1
OPERATIONS = ("qsize", "capacity", "put_nowait", "take")


class DataQueue(Generic[T]):
    """A queue that several processes fill and empty, in the order in which elements are put.

    Args:
        name: Unique in the job.
        size: Greatest number of elements. Read by the process that holds the queue.
        is_master: This process holds the queue. Exactly one does.

    Raises:
        ConfigError: Another process holds a queue of this name, or the trainer is to hold one.
        CallTimeout: No process has made the queue within a minute.
    """

    def __init__(self, name: str, size: int = 1000, *, is_master: bool = False) -> None:
        if size < 1:
            raise ConfigError(f"DataQueue({name!r}, size={size}): must be at least 1")
        self.name = name
        self._held: HeldQueue | None = None
        if is_master:
            if current_context().role == TRAINER:
                raise ConfigError(
                    f"DataQueue({name!r}, is_master=True): the trainer cannot be called at any time; let a role hold "
                    "the queue"
                )
            self._held = HeldQueue(size)
            for operation in OPERATIONS:
                endpoints.export(f"DataQueue.{name}.{operation}", getattr(self._held, operation))
            register_queue(name, current_worker().actor_info.name)
        self._putting = ThreadPoolExecutor(1, thread_name_prefix=f"DataQueue.{name}")  # starts its thread when needed
        self._capacity = size if is_master else 0
        self._owner_actor: RoleActor | None = None

    def qsize(self) -> int:
        """Return the number of elements."""
        return cast(int, self._ask("qsize"))

    def put(self, value: T, *, timeout_s: float | None = DEFAULT_TIMEOUT_S) -> None:
        """Add an element; wait for room. Raises CallTimeout if there is none in time."""
        element: Any = value if self._held else self._stored(value)
        self._until(lambda: self._ask("put_nowait", element), timeout_s, "it is full")

    def put_async(self, value: T) -> "Future[None]":
        """Add an element without waiting for room.

        The elements of one queue object keep their order.
        """
        return self._putting.submit(self.put, value, timeout_s=None)

    def get(self, batch_size: int = 1, *, timeout_s: float | None = DEFAULT_TIMEOUT_S) -> list[T]:
        """Remove and return this many elements; wait until all are there.

        Raises:
            ValueError: The queue never has so many.
            CallTimeout: They are not there in time. None is removed.
        """
        self._check_size(batch_size)
        found: list[Any] = []

        def take() -> bool:
            found.extend(self._ask("take", batch_size, True))
            return bool(found)

        self._until(take, timeout_s, f"it has fewer than {batch_size} elements")
        return self._loaded(found)

    def get_nowait(self, max_size: int = 1) -> list[T]:
        """Remove and return what is there, up to this many elements."""
        return self._loaded(self._ask("take", max_size, False))

    def __repr__(self) -> str:
        return f"<DataQueue {self.name}{', held here' if self._held else ''}>"

    def _check_size(self, batch_size: int) -> None:
        self._capacity = self._capacity or self._ask("capacity")
        if not 1 <= batch_size <= self._capacity:
            raise ValueError(f"DataQueue({self.name!r}): get({batch_size}) of a queue of size {self._capacity}")

    def _until(self, attempt: Callable[[], Any], timeout_s: float | None, why: str) -> None:
        """Repeat an attempt until it succeeds."""
        until, poll_s = None if timeout_s is None else time.monotonic() + timeout_s, FIRST_POLL_S
        while not attempt():
            if until is not None and time.monotonic() > until:
                raise CallTimeout(f"DataQueue({self.name!r}): after {timeout_s:g} s {why}")
            time.sleep(poll_s)
            poll_s = min(2 * poll_s, MAX_POLL_S)

    def _ask(self, operation: str, *args: Any) -> Any:
        if self._held is not None:
            return getattr(self._held, operation)(*args)
        record = Invocation(Dispatch.ONE_TO_ALL, timeout_s=CALL_TIMEOUT_S, concurrency_group=CONTROL)
        return self._owner()._call(f"DataQueue.{self.name}.{operation}", args, {}, record).result()

    def _owner(self) -> RoleActor:
        if self._owner_actor is None:
            role, _, rank = queue_owner(self.name).rpartition("-")
            self._owner_actor = RoleActor(role, int(rank))
        return self._owner_actor

    def _stored(self, value: T) -> "StoredElement | T":
        """Return a value, or a reference to it if it is large."""
        stored = known_role(self._owner().role).group.put(value)
        return value if stored is value else StoredElement(stored)

    def _loaded(self, elements: Sequence[Any]) -> list[T]:
        if not (references := [element.reference for element in elements if isinstance(element, StoredElement)]):
            return list(elements)
        group = known_role(self._owner().role).group
        values = iter(group.fetch(references, method=f"DataQueue.{self.name}.get", timeout_s=CALL_TIMEOUT_S))
        return [next(values) if isinstance(element, StoredElement) else element for element in elements]


@dataclass(frozen=True)
class StoredElement:
    """An element in Ray's object store."""

    reference: Any


class HeldQueue:
    """The elements, in the process that holds them. No method waits."""

    def __init__(self, size: int) -> None:
        self._size, self._elements, self._lock = size, deque[Any](), threading.Lock()

    def qsize(self) -> int:
        return len(self._elements)

    def capacity(self) -> int:
        return self._size

    def put_nowait(self, element: Any) -> bool:
        """Add an element; return whether there was room."""
        with self._lock:
            if len(self._elements) >= self._size:
                return False
            self._elements.append(element)
            return True

    def take(self, count: int, exactly: bool) -> list[Any]:
        """Remove and return up to `count` elements, or exactly so many or none."""
        with self._lock:
            there = len(self._elements)
            wanted = 0 if exactly and there < count else min(count, there)
            return [self._elements.popleft() for _ in range(wanted)]
