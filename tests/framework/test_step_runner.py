"""Concurrent stages: async mode, parallel, locks, and failures of one of them."""

import threading
import time

import pytest

from hybridrl.framework import OnlineRLContext, StepTimer, Task, stage

NAP = 0.1  # seconds; long against starting a thread
LIMIT_S = 60.0  # after which a wait that must not last fails its test


class _OwnError(Exception):
    pass


def _nap(name):
    return stage(name)(lambda ctx: time.sleep(NAP))


def _seconds(run):
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def test_stages_of_an_async_step_run_at_the_same_time_and_end_with_it():
    done, together = [], threading.Barrier(3)

    def work(ctx):
        together.wait(LIMIT_S)  # one after the other would wait for ever
        done.append(ctx.total_step)

    with Task(async_mode=True, n_async_workers=3) as task:
        task.use(work).use(work).use(work).use(lambda ctx: None)
        task.run(max_step=2)
    assert done == [0, 0, 0, 1, 1, 1], "a step begins when all stages of the last one have ended"


def test_no_more_stages_run_at_once_than_there_are_workers():
    running, most, lock, pair = 0, 0, threading.Lock(), threading.Barrier(2)

    def work(ctx):
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        pair.wait(LIMIT_S)
        time.sleep(0.02)
        with lock:
            running -= 1

    with Task(async_mode=True, n_async_workers=2) as task:
        for _ in range(6):
            task.use(work)
        task.run(max_step=1)
    assert most == 2


def test_second_halves_of_an_async_step_begin_when_all_first_halves_have_ended():
    log = []

    def layer(seconds):
        def run(ctx):
            time.sleep(seconds)
            log.append("first")
            yield
            log.append("second")

        return run

    with Task(async_mode=True) as task:
        task.use(layer(0)).use(layer(NAP)).run(max_step=1)
    assert log == ["first", "first", "second", "second"]


@pytest.mark.parametrize("end", ["backward", "renew"])
def test_a_loop_by_hand_waits_for_first_halves_before_the_second(end):
    log = []

    def layer(ctx):
        time.sleep(0.02)
        log.append("first")
        yield
        log.append("second")

    with Task(async_mode=True) as task:
        task.forward(layer)
        task.backward().sync() if end == "backward" else task.renew()
        assert log == ["first", "second"]


def test_serial_keeps_its_order_in_async_mode():
    log = []

    def slow(ctx):
        time.sleep(NAP)
        log.append("a")

    with Task(async_mode=True) as task:
        task.use(task.serial(slow, lambda ctx: log.append("b"))).run(max_step=1)
        task.use(task.sequence(slow, lambda ctx: log.append("c")))
    assert log == ["a", "b"]
    assert [spec.name for spec in task.stages] == ["serial<slow,<lambda>>"] * 2


def test_the_first_exception_ends_the_step_at_once_and_stop_waits_for_the_other_stages():
    released, ended = threading.Event(), threading.Event()

    def slow(ctx):
        released.wait(LIMIT_S)
        ended.set()

    def fail(ctx):
        raise _OwnError

    with Task(async_mode=True) as task:
        task.use(slow).use(fail)
        with pytest.raises(_OwnError) as caught:
            task.run(max_step=1)
        assert not ended.is_set()
        released.set()
    assert ended.is_set() and caught.value.__notes__ == ["in stage 'fail' of step 0"]


def test_later_failures_become_notes_of_the_first_and_their_generators_are_closed():
    closed = threading.Event()

    def wait_for_the_first():
        until = time.monotonic() + LIMIT_S
        while task.runner.error is None and time.monotonic() < until:
            time.sleep(0.01)

    def guarded(ctx):
        wait_for_the_first()
        try:
            yield
        finally:
            closed.set()

    def fail_late(ctx):
        wait_for_the_first()
        raise OSError("disk full")

    def fail(ctx):
        raise _OwnError

    with Task(async_mode=True) as task:
        task.use(guarded).use(fail_late).use(fail)
        with pytest.raises(_OwnError) as caught:
            task.run(max_step=1)
    assert closed.is_set() and any("disk full" in note for note in caught.value.__notes__)


def test_a_step_that_failed_can_be_run_again_when_its_stages_have_ended():
    attempts, running = [], []

    def slow(ctx):
        running.append(1)
        time.sleep(NAP)
        running.pop()

    def flaky(ctx):
        attempts.append(len(running))
        if len(attempts) == 1:
            raise _OwnError

    with Task(async_mode=True) as task:
        task.use(slow).use(flaky)
        with pytest.raises(_OwnError):
            task.run(max_step=1)
        task.run(max_step=1)
    assert len(attempts) == 2 and max(attempts) <= 1


def test_a_failure_in_a_second_half_is_raised_with_its_stage():
    def late(ctx):
        yield
        raise _OwnError

    with pytest.raises(_OwnError) as caught, Task(async_mode=True) as task:
        task.use(late).use(_nap("nap")).run(max_step=1)
    assert caught.value.__notes__ == ["in stage 'late' of step 0"]


def test_stages_with_a_lock_do_not_run_at_the_same_time():
    running, most = 0, 0

    def halves(ctx):
        nonlocal running, most
        running += 1
        most = max(most, running)
        time.sleep(0.03)
        running -= 1
        yield

    with Task(async_mode=True, n_async_workers=4) as task:
        for _ in range(3):
            task.use(halves, lock=True)
        task.run(max_step=1)
    assert most == 1
    with Task(async_mode=True) as task:
        own = threading.Lock()
        task.use(lambda ctx: time.sleep(NAP), lock=own).use(lambda ctx: time.sleep(NAP), lock=own)
        assert _seconds(lambda: task.run(max_step=1)) >= 2 * NAP


def test_parallel_runs_its_children_at_the_same_time_as_one_stage():
    log, together = [], threading.Barrier(3)

    def child(name):
        def run(ctx):
            together.wait(LIMIT_S)
            yield
            log.append(f"<{name}")

        return stage(name)(run)

    with Task() as task:
        task.use(task.parallel(child("a"), child("b"), child("c"))).use(lambda ctx: log.append("next"))
        task.run(max_step=1)
    assert [spec.name for spec in task.stages][0] == "parallel<a,b,c>"
    assert log[0] == "next" and sorted(log[1:]) == ["<a", "<b", "<c"]


def test_parallel_raises_its_first_failure_and_closes_the_other_children():
    closed = []

    def guarded(ctx):
        try:
            yield
        finally:
            closed.append(ctx.total_step)

    def fail(ctx):
        time.sleep(NAP)
        raise _OwnError

    with pytest.raises(_OwnError) as caught, Task() as task:
        task.use(task.parallel(guarded, fail)).run(max_step=1)
    assert closed == [0] and caught.value.__notes__[0] == "in stage 'fail' of step 0"


def test_the_step_timer_times_stages_of_several_threads():
    timer, began = StepTimer(), time.perf_counter()
    with Task(async_mode=True, ctx=OnlineRLContext()) as task:
        task.use_wrapper(timer).use(_nap("a")).use(_nap("b")).use(_nap("a")).run(max_step=1)
    elapsed = time.perf_counter() - began
    assert NAP <= timer.last["b"] <= elapsed
    assert 2 * NAP <= task.ctx.timing["a"] <= 2 * elapsed, "stages of one name add up, also when they run together"


def test_a_waiting_stage_receives_an_event_of_a_concurrent_stage():
    received = []
    with Task(async_mode=True, n_async_workers=2) as task:
        task.use(lambda ctx: received.append(task.wait_for("hello", timeout=20)))
        task.use(lambda ctx: task.emit("hello", ctx.total_step, loud=True))
        task.run(max_step=10)
    assert received == [((step,), {"loud": True}) for step in range(10)], (
        "each step its own, also if it was emitted before the wait began"
    )


def test_a_waiting_stage_is_cancelled_when_another_fails():
    def fail(ctx):
        time.sleep(NAP)
        raise _OwnError

    with Task(async_mode=True) as task:
        task.use(lambda ctx: task.wait_for("never")).use(fail)
        with pytest.raises(_OwnError) as caught:
            task.run(max_step=1)
    assert any("cancelled because another stage failed" in note for note in caught.value.__notes__)


def test_eager_forward_inside_an_async_stage_runs_at_once():
    log = []

    def child(ctx):
        log.append("child")
        yield
        log.append("child's second half")

    def parent(ctx):
        task.forward(child)
        log.append("parent")

    with Task(async_mode=True) as task:
        task.use(parent).run(max_step=1)
    assert log == ["child", "parent", "child's second half"]


def test_zero_threads_are_refused():
    with pytest.raises(ValueError, match="0 threads cannot run stages"):
        Task(async_mode=True, n_async_workers=0)
