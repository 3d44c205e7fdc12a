"""Composed stages (`wrap`, `serial`), step wrappers, and the interfaces of both versions of DI-engine."""

import pickle

import cloudpickle
import pytest

import hybridrl.framework as framework
from hybridrl.framework import (
    Context,
    OfflineRLContext,
    OnlineRLContext,
    Role,
    StepTimer,
    Task,
    VoidMiddleware,
    stage,
    task,
)


def _two_halves(name, log):
    def layer(ctx):
        log.append(f"{name}>")
        yield
        log.append(f"<{name}")

    return stage(name)(layer)


def test_wrap_gives_back_the_second_half_of_a_child():
    log = []
    with Task() as loop:
        child = loop.wrap(_two_halves("child", log))

        def parent(ctx):
            for _ in range(2):
                back = child(ctx)
                log.append("between")
                back()
                back()
            yield
            log.append("<parent")

        loop.use(parent).run(max_step=1)
    assert log == ["child>", "between", "<child"] * 2 + ["<parent"]


def test_a_second_half_that_was_not_called_runs_with_the_others_of_the_step():
    log = []
    with Task() as loop:
        child = loop.wrap(_two_halves("child", log))
        loop.use(_two_halves("first", log)).use(lambda ctx: child(ctx) and None).use(_two_halves("last", log)).run(
            max_step=1
        )
    assert log == ["first>", "child>", "last>", "<last", "<child", "<first"]


def test_back_of_a_child_without_second_half_does_nothing():
    with Task() as loop:
        back = loop.wrap(lambda ctx: None)(loop.ctx)
        back()


def test_children_of_a_serial_stage_end_with_it():
    log = []
    with Task() as loop:
        child = loop.wrap(_two_halves("child", log))
        loop.use(loop.serial(lambda ctx: child(ctx) and None, _two_halves("b", log))).use(
            _two_halves("after", log)
        ).run(max_step=1)
    assert log == ["child>", "b>", "after>", "<after", "<b", "<child"]


def test_a_wrapper_wraps_each_stage_once_and_a_step_wrapper_every_call():
    seen = {"wrapper": [], "step": []}

    def counting(kind):
        def wrap(fn):
            def wrapped(ctx):
                seen[kind].append(framework.spec_of(fn).name)
                return fn(ctx)

            return wrapped

        return wrap

    a, b, c = (stage(name)(lambda ctx: None) for name in "abc")
    with Task() as loop:
        loop.use(a).use_wrapper(counting("wrapper")).use_step_wrapper(counting("step")).use(loop.serial(b, c))
        loop.run(max_step=1)
        loop.forward(c)
    assert seen["wrapper"] == ["a", "serial<b,c>"]
    assert seen["step"] == ["a", "serial<b,c>", "b", "c", "c"]


def test_the_step_timer_is_a_step_wrapper_under_di_engines_import_path():
    from hybridrl.framework import wrapper

    timer = wrapper.StepTimer(print_per_step=1)
    assert wrapper.StepTimer is StepTimer
    with Task() as loop:
        loop.use_step_wrapper(timer).use(stage("a")(lambda ctx: None)).run(max_step=3)
    assert len(timer.records["a"]) == 3


def test_everything_can_be_given_to_the_constructor():
    log = []
    with Task(
        middleware=[_two_halves("a", log), _two_halves("b", log)],
        step_wrappers=[StepTimer()],
        event_listeners={"e": [lambda: log.append("on")]},
        once_listeners={"e": [lambda: log.append("once")]},
        labels={"mine"},
    ) as loop:
        loop.run(max_step=1)
        loop.emit("e")
        loop.emit("e")
    assert log == ["a>", "b>", "<b", "<a", "on", "once", "on"]
    assert "mine" in loop.labels and "a" in loop.ctx.timing


def test_an_own_backward_stack_is_run_by_its_owner_only():
    log, stack = [], []
    with Task() as loop:
        loop.forward(_two_halves("own", log), backward_stack=stack)
        loop.use(_two_halves("a", log)).run(max_step=1)
        assert log == ["own>", "a>", "<a"]
        loop.backward(stack)
    assert log[-1] == "<own"


def test_a_step_driven_by_hand_is_a_step():
    log = []
    with Task(ctx=OnlineRLContext()) as loop:
        for _ in range(2):
            loop.forward(lambda ctx: log.append(ctx.total_step))
            loop.sync().backward().sync()
            loop.renew()
    assert log == [0, 1] and loop.ctx.total_step == 2


def test_start_resets_the_module_task():
    with task.start(ctx=OnlineRLContext(), labels={"first"}):
        task.add_role(Role.LEARNER)
        task.use(lambda ctx: None).run(max_step=2)
        assert task.ctx.total_step == 1 and isinstance(task.ctx, OnlineRLContext)
    with task.start(async_mode=True, n_async_workers=1) as same:
        assert same is task and task.stages == [] and task.roles == set()
        assert task.labels == {"standalone", "async"} and type(task.ctx) is Context


def test_the_module_task_unpickles_as_itself_and_other_tasks_cannot_be_pickled():
    assert pickle.loads(cloudpickle.dumps(task)) is task
    with pytest.raises(TypeError, match="make it in `main`"):
        pickle.dumps(Task())


def test_total_step_after_n_steps_is_n_minus_1_and_the_last_context_stays():
    with Task(ctx=Context()) as loop:
        loop.use(lambda ctx: ctx.setdefault("seen", ctx.total_step)).run(max_step=5)
    assert (loop.ctx.total_step, loop.ctx.seen, loop.ctx.finish) == (4, 4, True)


def test_stopping_runs_the_exit_hooks_once_and_emits_exit_first():
    log = []
    loop = Task()
    loop.on("exit", lambda: log.append("exit"))
    loop.on_exit(lambda: log.append("hook"))
    loop.stop()
    with loop:
        pass
    assert log == ["exit", "hook", "exit"]


def test_the_offline_context_keeps_its_counters():
    ctx = OfflineRLContext(train_iter=3, train_epoch=1, batch="rows").renew()
    assert (ctx.train_iter, ctx.train_epoch, ctx.last_eval_iter, ctx.batch) == (3, 1, -1, None)


def test_a_context_serves_as_a_mapping():
    ctx = Context()
    ctx.update({"a": 1, "b": 2})
    assert ctx.has_attr("a") and not ctx.has_attr("c")
    assert dict(ctx) == {"total_step": 0, "finish": False, "a": 1, "b": 2}
    assert ctx.pop("a") == 1 and ctx.pop("a", None) is None
    with pytest.raises(KeyError):
        ctx.pop("a")


# -- labels and roles


def test_stages_are_filtered_by_globs_over_labels():
    with Task(labels={"gpu.3"}) as loop:
        for name, labels in {
            "a": ["standalone"],
            "b": ["node.*"],
            "c": ["x", "gpu.[0-3]"],
            "d": None,
            "e": ["async"],
        }.items():
            loop.use(stage(name)(lambda ctx: None), filter_labels=labels)
    assert [spec.name for spec in loop.stages] == ["a", "c", "d"]
    assert loop.match_labels("stand*") and not loop.match_labels(["distributed", "node.0"])


def test_labels_come_from_the_environment_too(monkeypatch):
    monkeypatch.setenv("HYBRIDRL_TASK_LABELS", " spot, zone.a ,")
    assert Task().labels == {"standalone", "spot", "zone.a"}


def test_a_process_without_roles_has_all_of_them():
    loop = Task()
    assert loop.has_role(Role.EVALUATOR)
    loop.add_role("learner")
    assert loop.has_role(Role.LEARNER) and not loop.has_role(Role.EVALUATOR) and loop.roles == {Role.LEARNER}
    with pytest.raises(ValueError, match="'leaner'.*learner, collector, evaluator, fetcher"):
        loop.add_role("leaner")


def test_void_stages_are_left_out_wherever_they_stand():
    log = []
    with Task() as loop:
        loop.use(loop.void()).use(loop.serial(_two_halves("a", log), loop.void())).use(VoidMiddleware())
        loop.wrap(loop.void())(loop.ctx)()
        loop.run(max_step=1)
    assert [spec.name for spec in loop.stages] == ["serial<a>"] and log == ["a>", "<a"]


def test_a_process_without_matching_stages_runs_no_step():
    with Task() as loop:
        loop.use(lambda ctx: None, filter_labels=["node.1"]).run()
    assert loop.ctx.total_step == 0 and not loop.finish
