"""DLRover's own tests of its runtime, asked of this SDK.

One test per test of DLRover's `api/test_runtime`. What a user has to change, besides the import:

| in DLRover | here |
|---|---|
| `RPC_REGISTRY["name"]` | `hybridrl.single_controller.endpoints.find("name")` |
| exporting a name again is a ValueError | only if it is another function; a ConfigError, which is a ValueError |
| "No actors found for role 'empty'" | "the job has no such role" |
| `call_rank0` and `call_batch` of an absent optional role: ValueError | `None`, and `None` for each element |
| a batch over 2 processes of `[1, 2, 3, 4]` | the same; `repr` says how many elements are ready |
| `DataQueue.get(2)` of a queue with one element gives one | it waits for two; `get_nowait(2)` gives one |
| `patch_dataloader_ray()` | nothing: the workers of torch's DataLoader run in a process of a role |

DLRover replaces calls, master and object store by mocks. Here the processes are threads (`ThreadJob`) or real ones.
"""

import asyncio
import threading
import time
from concurrent.futures import Future
from dataclasses import replace

import pytest

from hybridrl.errors import CallTimeout, ConfigError
from hybridrl.master.jobs.job_context import current_context, set_context
from hybridrl.sdk import (
    DataQueue,
    DLJobBuilder,
    FutureSequence,
    RoleGroup,
    create_rpc_proxy,
    export_rpc_instance,
    export_rpc_method,
    rpc,
)
from hybridrl.single_controller import endpoints
from tests.master.jobs.test_submit import SMALL, left_of, wait_until
from tests.support.sdk import queue_job


@pytest.fixture(autouse=True)
def _no_exports_left():
    yield
    endpoints.clear()


class Worker:
    """A process of the role `worker`. `number` is its rank."""

    number = 0

    @rpc()
    def foo_method(self, *args, **kwargs):
        return f"worker-{self.number}-foo_method-{args}-{kwargs}"

    @rpc()
    def names(self, items):
        return [f"worker-{self.number}-{item}" for item in items]


@pytest.fixture
def job(make_job):
    return make_job(worker=(Worker, 2))


@pytest.fixture
def as_worker(job):
    """This process has a rank of the role `worker`."""
    set_context(replace(current_context(), role="worker"))


# -- api/test_runtime


def test_rpc(job):
    @rpc(export=True)
    def some_method():
        return "test1"

    @rpc(export=True)
    async def some_async_method():
        return "test2"

    def foo_stub(x, y=0): ...

    @rpc(foo_stub, export=True)
    def foo_method_impl(x, y=0):
        return f"{x}-{y}"

    assert endpoints.find("some_method") is some_method
    assert endpoints.find("some_async_method") is some_async_method
    assert endpoints.find("foo_stub") is foo_method_impl
    export_rpc_method("some_method", some_method)  # the same function: nothing changes
    with pytest.raises(ValueError, match="endpoint 'some_method' is exported twice"):
        export_rpc_method("some_method", foo_method_impl)
    group = RoleGroup("worker")
    assert group.call_rank0("some_method").result() == "test1"
    assert group.call("some_async_method").result() == ["test2", "test2"]
    assert group.call_rank0(foo_stub, 5, y=6).result() == "5-6"


def test_rpc_proxy(job):
    class SimpleClass:
        @rpc()
        def hello(self, name: str) -> str:
            return f"Hello, {name}!"

        @rpc()
        async def hello_later(self, name: str) -> str:
            return f"Later, {name}!"

    export_rpc_instance("simple_class", SimpleClass())
    assert "simple_class.hello" in endpoints.names()
    proxy = create_rpc_proxy("worker-0", "simple_class", SimpleClass)
    assert proxy.hello("World") == "Hello, World!"
    assert asyncio.run(proxy.hello_later("World")) == "Later, World!"


def test_queue(job, as_worker):
    held = DataQueue[str]("test_queue", size=10, is_master=True)
    assert job.queues == {"test_queue": "worker-0"} and "DataQueue.test_queue.qsize" in endpoints.names()
    other = DataQueue[str]("test_queue")
    assert other.qsize() == 0
    held.put("item1")
    assert other.qsize() == 1 and other.get(1) == ["item1"]
    other.put("item2")
    assert held.get_nowait(1) == ["item2"] and held.get_nowait(1) == []


def test_role_group_basic(job):
    group = RoleGroup("worker")
    assert len(group) == 2 and group[0].name == "worker-0"
    assert group.call("foo_method").result() == ["worker-0-foo_method-()-{}", "worker-1-foo_method-()-{}"]

    def foo_method(x, y=0): ...

    assert group.call(foo_method, 5, y=10).result() == [
        "worker-0-foo_method-(5,)-{'y': 10}",
        "worker-1-foo_method-(5,)-{'y': 10}",
    ]
    assert group.call(foo_method, [5, 10], y=[10, 20], _scatter=True).result() == [
        "worker-0-foo_method-(5,)-{'y': 10}",
        "worker-1-foo_method-(10,)-{'y': 20}",
    ]
    first = group.call_rank0(foo_method, 3, y=4)
    assert isinstance(first, Future) and first.result() == "worker-0-foo_method-(3,)-{'y': 4}"


def test_role_group_optional(job):
    assert len(RoleGroup("not_exist", optional=True)) == 0


def test_role_group_no_actors(job):
    def f(x): ...

    with pytest.raises(ValueError, match=r"RoleGroup\('empty'\).*no such role.* worker"):
        RoleGroup("empty")
    absent = RoleGroup("empty", optional=True)
    assert absent.call(f, 4).result() == []
    assert list(absent.call_batch(f, 4, [1, 2, 3, 4])) == [None] * 4 and absent.call_rank0(f, []).result() is None


def test_rolegroup_call_batch(job):
    sequence = RoleGroup("worker").call_batch("names", 4, [1, 2, 3, 4])
    assert isinstance(sequence, FutureSequence) and len(sequence) == 4
    results = sequence.wait()
    assert results == ["worker-0-1", "worker-0-2", "worker-1-3", "worker-1-4"]
    assert list(sequence) == results and list(sequence[1:2]) == results[1:2]
    assert repr(sequence) == "<FutureSequence of 4, 4 ready>"


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.usefixtures("ray_cluster")
def test_ray_dataloader(tmp_path):
    builder = DLJobBuilder().device_type("CPU").config({"out": str(tmp_path / "out")})
    assert builder.role("reader").run(queue_job.loads_data).resource(**SMALL).build().submit("loader") == 0
    role, batches = eval((tmp_path / "out").read_text())
    assert [len(rows) for rows, _ in batches] == [10] * 10
    assert [row for rows, _ in batches for row in rows] == list(range(100))
    readers = {reader for _, pids in batches for reader in pids}
    assert len(readers) == 2 and role not in readers
    wait_until(lambda: not left_of("loader-"))


# -- the queue further


def test_a_queue_is_in_order_and_waits_for_room_and_for_elements(job, as_worker):
    held, other = DataQueue("q", size=2, is_master=True), DataQueue("q")
    putting = [other.put_async(number) for number in range(4)]
    while held.qsize() < 2:
        time.sleep(0.01)
    assert [one.done() for one in putting][2:] == [False, False]
    assert held.get(2) + held.get(2) == [0, 1, 2, 3]
    assert [one.result(60) for one in putting] == [None] * 4
    threading.Timer(0.1, other.put, ["late"]).start()
    assert held.get(1, timeout_s=60) == ["late"]


def test_a_queue_names_what_is_waited_for(job, as_worker):
    held, other = DataQueue("q", size=2, is_master=True), DataQueue("q")
    with pytest.raises(CallTimeout, match=r"DataQueue\('q'\): after 0.05 s.* 2 elements"):
        other.get(2, timeout_s=0.05)
    held.put(1)
    with pytest.raises(CallTimeout, match="fewer than 2"):
        other.get(2, timeout_s=0.05)
    assert held.qsize() == 1  # nothing was removed
    held.put(2)
    with pytest.raises(CallTimeout, match="after 0.05 s it is full"):
        other.put(3, timeout_s=0.05)
    with pytest.raises(ValueError, match=r"get\(3\) of a queue of size 2"):
        other.get(3)
    with pytest.raises(ConfigError, match="size=0"):
        DataQueue("q", size=0)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.usefixtures("ray_cluster")
def test_a_queue_between_processes_answers_while_its_process_works_and_comes_back_empty(tmp_path):
    builder = DLJobBuilder().device_type("CPU").config({"out": str(tmp_path / "out")})
    builder.trainer(queue_job.Trainer).resource(**SMALL)
    builder.role("holder").run(queue_job.Holder).total(2).resource(**SMALL).restart("process").not_driver()
    builder.role("producer").run(queue_job.Producer).resource(**SMALL).not_driver()
    assert builder.build().submit("queue") == 0
    numbers, sizes, answers_while_busy, full, empty, twice, late, of_trainer, again = eval(
        (tmp_path / "out").read_text()
    )
    assert numbers == list(range(10)) and sizes == {queue_job.LARGE} and answers_while_busy
    assert full == 4 and empty == []
    assert twice == "queue 'samples': holder-0 holds it already, and holder-1 cannot; give it another name"
    assert "after 0.3 s it has fewer than 1" in late and "let a role hold the queue" in of_trainer
    assert again == [(7, b"again")]  # what was in the lost process is lost
    wait_until(lambda: not left_of("queue-"))
