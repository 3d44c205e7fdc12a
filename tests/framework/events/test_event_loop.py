"""Events: local loops, late listeners, and `wait_for`."""

import threading
import time

import pytest

from hybridrl.framework import EventLoop, Task
from hybridrl.framework.events import event_loop as module
from hybridrl.framework.events.event_loop import ReplayingLoop
from hybridrl.framework.events.task_events import MAX_UNCLAIMED


def test_there_is_one_loop_of_each_name_until_it_stops():
    loop = EventLoop.get_event_loop("tests")
    assert EventLoop.get_event_loop("tests") is loop is not EventLoop.get_event_loop("others")
    loop.on("e", print)
    loop.stop()
    assert not loop.has_listener("e") and EventLoop.get_event_loop("tests") is not loop


def test_listeners_run_in_order_before_emit_returns_and_once_means_once():
    received = []
    loop = EventLoop()
    loop.on("e", lambda x: received.append(("on", x)))
    loop.once("e", lambda x: received.append(("once", x)))
    loop.emit("e", 1)
    loop.emit("e", 2)
    assert received == [("on", 1), ("once", 1), ("on", 2)]


def test_off_takes_a_glob_and_finds_listeners_of_once():
    loop, received = EventLoop(), []
    for event in ("a.1", "a.2", "b"):
        loop.once(event, received.append)
    loop.off("a.*", received.append)
    assert [loop.has_listener(event) for event in ("a.1", "a.2", "b")] == [False, False, True]


def test_a_listeners_exception_reaches_the_emitter():
    loop = EventLoop()
    loop.on("e", lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        loop.emit("e")


def test_two_threads_that_emit_at_once_call_a_once_listener_once():
    for _ in range(50):
        loop, received, gate = EventLoop(), [], threading.Barrier(4)
        loop.once("e", received.append)

        def emit(loop=loop, gate=gate):
            gate.wait()
            loop.emit("e", 1)

        threads = [threading.Thread(target=emit) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert received == [1]


def test_a_late_listener_receives_earlier_events_in_order_until_buffering_stops():
    loop = ReplayingLoop("peers", lambda fn: fn())
    for i in range(3):
        loop.emit_and_buffer("e", (i,), {})
        loop.emit_and_buffer("other", (i,), {})
        loop.emit_and_buffer("newest", (i,), {}, newest_only=True)
    first, second, newest, late = [], [], [], []
    loop.on("e", first.append)
    loop.on("newest", newest.append)
    loop.emit_and_buffer("e", (3,), {})
    loop.on("e", second.append)
    loop.stop_buffering()
    loop.on("e", late.append)
    loop.emit_and_buffer("e", (4,), {})
    assert (first, second, newest, late) == ([0, 1, 2, 3, 4], [0, 1, 2, 3, 4], [2], [4])


def test_the_buffer_for_late_listeners_is_bounded_in_events_and_bytes(monkeypatch, caplog):
    monkeypatch.setattr(module, "MAX_BUFFERED_EVENTS", 3)
    monkeypatch.setattr(module, "MAX_BUFFERED_BYTES", 100)
    loop = ReplayingLoop("peers", lambda fn: fn())
    for i in range(5):
        loop.emit_and_buffer("small", (i,), {}, num_bytes=1)
    loop.emit_and_buffer("large", ("a",), {}, num_bytes=99)
    loop.emit_and_buffer("large", ("b",), {}, num_bytes=200)
    small, large = [], []
    loop.on("small", small.append)
    loop.on("large", large.append)
    assert (small, large) == ([], ["b"]), "the newest stays, whatever its size"
    assert "dropped an event 'small'" in caplog.text


# -- waiting


def test_wait_for_returns_what_was_emitted_from_another_thread():
    with Task() as task:
        threading.Timer(0.05, task.emit, ("e", 1), {"a": 2}).start()
        assert task.wait_for("e", timeout=20) == ((1,), {"a": 2})


def test_all_waiters_receive_the_event():
    received = []
    with Task(async_mode=True, n_async_workers=3) as task:
        for _ in range(2):
            task.use(lambda ctx: received.append(task.wait_for("e", timeout=20)))

        def emit(ctx):
            time.sleep(0.2)
            task.emit("e", 1)

        task.use(emit).run(max_step=1)
    assert received == [((1,), {})] * 2


def test_after_its_timeout_wait_for_returns_none_or_raises():
    with Task() as task:
        assert task.wait_for("never", timeout=0.01) is None
        with pytest.raises(TimeoutError, match="no 'never' arrived within 0.01 s"):
            task.wait_for("never", timeout=0.01, ignore_timeout_exception=False)


def test_an_endless_wait_without_a_possible_emitter_is_refused():
    with Task() as task, pytest.raises(RuntimeError, match="give it a timeout"):
        task.wait_for("never")


def test_an_event_may_come_before_the_wait_for_it_but_not_two_steps_before():
    found = []

    def look(ctx):
        found.append(task.wait_for("e", timeout=0))
        if ctx.total_step == 1:
            task.emit("e", "after the wait of step 1")
            task.emit("other", "never waited for in time")
        if ctx.total_step == 3:
            found.append(task.wait_for("other", timeout=0))

    with Task() as task:
        task.use(look).run(max_step=4)
    assert found == [None, None, (("after the wait of step 1",), {}), None, None]


def test_of_many_unclaimed_events_the_newest_are_kept():
    with Task() as task:
        for i in range(MAX_UNCLAIMED + 5):
            task.emit("e", i)
        assert task.wait_for("e", timeout=0) == ((5,), {})


def test_waiting_ends_when_the_task_is_to_finish():
    with Task(async_mode=True) as task:

        def finish(ctx):
            time.sleep(0.05)
            task.finish = True

        task.use(lambda ctx: task.wait_for("never")).use(finish).run()
    assert task.ctx.total_step == 0


def test_an_emit_that_would_reach_no_listener_is_refused():
    with Task() as task, pytest.raises(ValueError, match="reaches no listener"):
        task.emit("e", only_local=True, only_remote=True)


def test_without_peers_only_remote_reaches_no_listener():
    received = []
    with Task() as task:
        task.on("e", received.append)
        task.emit("e", 1, only_remote=True)
        task.emit("e", 2, only_local=True)
    assert received == [2]
