"""Task: order of stages, steps, insertion and replacement, failures, events, exit hooks."""

import threading

import pytest

from hybridrl.framework import Context, OnlineRLContext, Role, StageSpec, Task, stage
from hybridrl.framework.events.local_peers import current_router, install_router
from hybridrl.framework.events.task_events import FINISH
from hybridrl.framework.parallel.peer_router import PeerRouter


def _two_halves(name, log):
    def layer(ctx):
        log.append(f"{name}>")
        yield
        log.append(f"<{name}")

    return stage(name)(layer)


def _plain(name, log):
    def layer(ctx):
        log.append(name)

    return stage(name)(layer)


def _names(task):
    return [spec.name for spec in task.stages]


# -- order and steps


def test_second_halves_run_in_reverse_order_after_all_first_halves():
    log = []
    with Task() as task:
        task.use(_two_halves("a", log)).use(_plain("b", log)).use(_two_halves("c", log)).run(max_step=2)
    assert log == ["a>", "b", "c>", "<c", "<a"] * 2


def test_the_context_is_fresh_in_every_step_but_for_what_was_kept():
    seen = []

    def work(ctx):
        seen.append((ctx.total_step, ctx.train_iter, ctx.batch))
        ctx.train_iter += 10
        ctx.batch = "rows"

    with Task(ctx=OnlineRLContext(total_step=5)) as task:
        task.use(work).run(max_step=3)
    assert seen == [(5, 0, None), (6, 10, None), (7, 20, None)]
    assert task.ctx.total_step == 7 and task.ctx.batch == "rows", "the last step's context stays readable"
    assert task.finish


def test_a_stage_ends_the_run_and_the_step_is_completed():
    log = []

    def stop_at_two(ctx):
        ctx.finish = ctx.total_step == 2

    with Task() as task:
        task.use(_two_halves("a", log)).use(stop_at_two).use(_plain("b", log)).run(max_step=100)
    assert log == ["a>", "b", "<a"] * 3


def test_a_second_run_continues_with_the_next_step():
    steps = []
    with Task() as task:
        task.use(lambda ctx: steps.append(ctx.total_step))
        task.run(max_step=2)
        task.run(max_step=3)
        task.run(max_step=0)
    assert steps == [0, 1, 2, 3, 4]


def test_finish_set_before_the_run_is_honoured():
    steps = []
    with Task() as task:
        task.use(lambda ctx: steps.append(ctx.total_step))
        task.finish = True
        task.run(max_step=2)
    assert steps == []


def test_a_generator_that_returns_before_its_yield_has_no_second_half():
    log = []

    def sometimes(ctx):
        if ctx.total_step == 0:
            return
        yield
        log.append(ctx.total_step)

    with Task() as task:
        task.use(sometimes).run(max_step=3)
    assert log == [1, 2]


def test_a_second_yield_is_refused_because_the_rest_would_never_run():
    def twice(ctx):
        yield
        yield

    with Task() as task, pytest.raises(RuntimeError, match="yield once") as caught:
        task.use(twice).run(max_step=1)
    assert caught.value.__notes__ == ["in stage 'twice' of step 0"]


def test_a_task_without_stages_returns_at_once_and_says_so(caplog):
    with Task() as task:
        task.run()
    assert "the task has no stages" in caplog.text and task.ctx.total_step == 0


def test_a_task_is_running_until_it_stops_and_again_from_its_next_start():
    own = Task()
    with own:
        assert own.running
        own.use(_fail)
    assert not own.running
    with own.start():
        assert own.running and own.stages == []


def test_a_loop_by_hand_ends_its_steps_with_renew():
    log = []
    with Task(ctx=OnlineRLContext()) as task:
        for _ in range(2):
            task.forward(_two_halves("a", log))
            task.forward(_plain("b", log))
            task.renew()
        assert log == ["a>", "b", "<a"] * 2 and task.ctx.total_step == 2
        task.forward(lambda ctx: setattr(ctx, "finish", True))
        task.renew()
        assert task.finish and task.ctx.finish, "the loop looks at it after renew"
        assert task.ctx.total_step == 3


def test_renew_by_hand_closes_second_halves_when_one_of_them_fails():
    log = []

    def guarded(ctx):
        try:
            yield
        finally:
            log.append("closed")

    def late(ctx):
        yield
        raise _OwnError

    with Task() as task:
        task.forward(guarded)
        task.forward(late)
        with pytest.raises(_OwnError):
            task.renew()
    assert log == ["closed"] and task.ctx.total_step == 0


def test_a_listener_that_failed_at_the_end_of_a_loop_by_hand_skips_no_exit_hook():
    log, before, router = [], current_router(), PeerRouter()

    def deliver(stream, number, message):
        if message.topic == FINISH:
            router.post(lambda: _fail(None))  # in the thread of listeners
        return number

    router.activate(0, name="test/node-0", labels=(), attached_to=())
    router.connect("test/node-1", deliver)
    install_router(router)
    try:
        with pytest.raises(_OwnError), Task() as task:
            task.on_exit(lambda: log.append("saved"))
            task.forward(lambda ctx: None)
            task.renew()
        assert log == ["saved"] and not task.running and router.finish_hooks == []
    finally:
        install_router(before)


def test_a_stage_may_renew_the_context_in_the_middle_of_a_step():
    log = []
    with Task() as task:
        task.use(_two_halves("a", log)).use(lambda ctx: task.renew() and None).use(_plain("b", log)).run(max_step=1)
    assert log == ["a>", "b", "<a"] and task.ctx.total_step == 1


@pytest.mark.parametrize("lock", [True, threading.Lock()])
def test_a_lock_may_stand_in_the_second_place_as_in_di_engine(lock):
    held = []
    with Task() as task:
        own = task.composition.lock if lock is True else lock
        task.use(lambda ctx: held.append(own.acquire(blocking=False) if lock is not True else True), lock)
        task.use(lambda ctx: None, False).run(max_step=1)
    assert held == [lock is True] and len(task.stages) == 2


def test_roles_are_found_at_the_task():
    with Task() as task:
        task.add_role(task.role.LEARNER)
        assert task.has_role(task.role.LEARNER) and not task.has_role(task.role.COLLECTOR)
        assert {task.role.EVALUATOR, task.role.FETCHER} <= set(Role)
        with pytest.raises(RuntimeError, match="no group"):
            task.get_attch_to_len()


def test_forward_and_backward_can_be_driven_by_hand():
    log = []
    with Task() as task:
        assert task.forward(_plain("a", log)) is None
        assert task.forward(_two_halves("b", log)) is not None
        task.backward()
        task.backward()
    assert log == ["a", "b>", "<b"]


def test_serial_runs_its_children_as_one_stage():
    log = []
    with Task() as task:
        pair = task.serial(_two_halves("b", log), _two_halves("c", log))
        task.use(_two_halves("a", log)).use(pair).use(_two_halves("d", log)).run(max_step=1)
    assert log == ["a>", "b>", "c>", "d>", "<d", "<c", "<b", "<a"]
    assert _names(task) == ["a", "serial<b,c>", "d"]


# -- editing the loop


def test_stages_are_inserted_and_replaced_by_name():
    log = []
    with Task() as task:
        task.use(_plain("a", log)).use(_plain("c", log))
        task.insert_before("a", _plain("first", log)).insert_after("a", _plain("b", log)).insert_after(
            "c", _plain("last", log)
        )
        task.replace("c", _plain("C", log))
        task.run(max_step=1)
    assert log == _names(task) == ["first", "a", "b", "C", "last"]


def test_a_plain_function_takes_over_the_spec_of_the_stage_it_replaces():
    @stage("adv", reads=["rewards"], writes=["advantages"])
    def advantage(ctx):
        pass

    def mine(ctx):
        ctx.seen = True

    with Task() as task:
        task.use(advantage).replace("adv", mine).run(max_step=1)
    assert task.stages == [StageSpec("adv", None, ("rewards",), ("advantages",), True)] and task.ctx.seen


def test_an_unknown_name_lists_the_stages_and_the_nearest_one():
    with Task() as task:
        task.use(_plain("generate", [])).use(_plain("reward", []))
        with pytest.raises(ValueError, match="'genrate'; .*generate, reward.*did you mean 'generate'"):
            task.replace("genrate", _plain("x", []))


def test_a_name_that_is_not_unique_is_refused():
    with Task() as task:
        task.use(_plain("a", [])).use(_plain("a", []))
        with pytest.raises(ValueError, match="2 stages are called 'a'"):
            task.insert_before("a", _plain("b", []))


def test_wrappers_apply_once_to_earlier_and_to_later_stages_and_leave_the_spec():
    calls = []

    def wrapper(label):
        def wrap(fn):
            return lambda ctx: (calls.append(label), fn(ctx))[1]  # keeps nothing of fn's name

        return wrap

    log = []
    with Task() as task:
        task.use(_two_halves("a", log)).use_wrapper(wrapper("w")).use(_plain("b", log)).use_wrapper(wrapper("v"))
        task.insert_after("a", _plain("i", log)).replace("b", _plain("b", log)).run(max_step=1)
    assert calls == ["v", "w"] * 3 and log == ["a>", "i", "b", "<a"]
    assert _names(task) == ["a", "i", "b"]


# -- failures


class _OwnError(Exception):
    pass


def _fail(ctx):
    raise _OwnError("no")


def test_a_failure_keeps_its_type_and_names_stage_and_step():
    with pytest.raises(_OwnError) as caught, Task(ctx=Context(total_step=3)) as task:
        task.use(lambda ctx: None).use(_fail).run(max_step=1)
    assert caught.value.__notes__ == ["in stage '_fail' of step 3"]


def test_a_failure_in_a_second_half_is_named_too():
    def late(ctx):
        yield
        raise _OwnError

    with pytest.raises(_OwnError) as caught, Task() as task:
        task.use(late).run(max_step=1)
    assert caught.value.__notes__ == ["in stage 'late' of step 0"]


def test_a_failure_in_serial_names_the_child_and_the_stage():
    with pytest.raises(_OwnError) as caught, Task() as task:
        task.use(task.serial(_fail)).run(max_step=1)
    assert caught.value.__notes__ == ["in stage '_fail' of step 0", "in stage 'serial<_fail>' of step 0"]


def test_a_stage_that_runs_out_of_data_does_not_pass_for_a_finished_generator():
    def empty(ctx):
        next(iter(()))

    with pytest.raises(StopIteration) as caught, Task() as task:
        task.use(empty).run(max_step=1)
    assert caught.value.__notes__ == ["in stage 'empty' of step 0"]


@pytest.mark.parametrize("nested", [False, True])
def test_generators_that_wait_are_closed_when_a_later_stage_fails(nested):
    log = []

    def guarded(ctx):
        try:
            yield
            log.append("second half")
        finally:
            log.append("closed")

    with pytest.raises(_OwnError), Task() as task:
        task.use(task.serial(guarded, _fail) if nested else task.serial(guarded)).use(_fail).run(max_step=1)
    assert log == ["closed"]


def test_a_failed_step_can_be_run_again_with_its_context():
    attempts = []

    def flaky(ctx):
        attempts.append(ctx.total_step)
        if len(attempts) == 2:
            raise _OwnError

    with Task() as task:
        task.use(flaky)
        with pytest.raises(_OwnError):
            task.run(max_step=3)
        task.run(max_step=2)
    assert attempts == [0, 1, 1, 2]


def test_exit_hooks_run_in_reverse_order_also_when_a_stage_fails():
    log = []
    with pytest.raises(_OwnError), Task() as task:
        task.on_exit(lambda: log.append("first"))
        task.on_exit(lambda: log.append("second"))
        task.use(_fail).run(max_step=1)
    assert log == ["second", "first"]


def test_a_failing_exit_hook_stops_no_other_and_hides_no_failure():
    log = []

    def broken():
        raise OSError("disk full")

    with pytest.raises(_OwnError) as caught, Task() as task:
        task.on_exit(lambda: log.append("ran"))
        task.on_exit(broken)
        task.use(_fail).run(max_step=1)
    assert log == ["ran"] and "disk full" in caught.value.__notes__[-1]


def test_a_failing_exit_hook_is_raised_when_nothing_else_failed():
    with pytest.raises(OSError, match="disk full"), Task() as task:
        task.on_exit(lambda: (_ for _ in ()).throw(OSError("disk full")))
        task.use(lambda ctx: None).run(max_step=1)


# -- events


def test_listeners_have_run_in_order_when_emit_returns():
    received = []
    task = Task()
    task.on("saved", lambda *args, **kwargs: received.append(("a", args, kwargs)))
    task.on("saved", lambda *args, **kwargs: received.append(("b", args, kwargs)))
    task.emit("saved", 1, path="x")
    task.emit("other", 2)
    assert received == [("a", (1,), {"path": "x"}), ("b", (1,), {"path": "x"})]


def test_a_once_listener_receives_one_event_even_if_it_emits_the_same():
    received = []
    task = Task()

    def again(n):
        received.append(n)
        task.emit("e", n + 1)

    task.once("e", again)
    task.emit("e", 0)
    assert received == [0]


def test_off_removes_one_listener_or_all_and_also_those_of_once():
    received = []
    task = Task()
    task.on("e", received.append)
    task.once("e", received.extend)
    task.off("e", received.extend)
    task.emit("e", [1])
    assert received == [[1]]
    task.off("e")
    task.emit("e", [2])
    assert received == [[1]]


def test_a_listener_may_end_the_run():
    with Task() as task:
        task.on("enough", lambda: setattr(task, "finish", True))
        task.use(lambda ctx: task.emit("enough") if ctx.total_step == 1 else None).run(max_step=50)
    assert task.ctx.total_step == 1
