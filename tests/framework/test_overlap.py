"""Overlap: concurrent stages, their dependencies, and equality with the serial result."""

import threading
import time
from concurrent.futures import Future

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridrl.framework import OnlineRLContext, StageSpec, StepTimer, Task, stage
from hybridrl.framework.overlap import OverlapPlan, conflict, dependencies

NAP = 0.1
SLOTS = {"actor": {0, 1}, "ref": {1, 2}, "critic": {3}}


def _spec(name="s", role=None, reads=(), writes=(), pure=True):
    return StageSpec(name, role, tuple(reads), tuple(writes), pure)


@pytest.mark.parametrize(
    ("first", "second", "reason"),
    [
        (_spec(writes="a"), _spec(reads="a"), "columns a"),  # read after write
        (_spec(reads="a"), _spec(writes="a"), "columns a"),  # write after read
        (_spec(writes="ab"), _spec(writes="ab"), "columns a, b"),  # write after write
        (_spec(reads="a"), _spec(reads="a"), None),
        (_spec(reads="a", role="actor"), _spec(reads="a", role="ref"), "slots 1"),
        (_spec(reads="a", role="actor", pure=False), _spec(reads="a", role="actor"), "slots 0, 1"),
        (_spec(reads="a", role="actor", pure=False), _spec(reads="a", role="critic", pure=False), None),
        (_spec(reads="a"), _spec(reads="a", role="critic"), None),
        (_spec("log"), _spec(reads="a"), "log is a barrier"),  # names no column
        (_spec(reads="a"), _spec("adv", reads="b", pure=False), "adv is a barrier"),  # changes state of the driver
    ],
)
def test_two_stages_may_not_overlap_for_a_reason(first, second, reason):
    assert conflict(first, second, SLOTS) == conflict(second, first, SLOTS) == reason


def test_the_waits_of_a_ppo_step():
    step = [
        _spec("next_batch", writes=["ids"], pure=False),
        _spec("gen", "actor", ["ids"], ["responses"]),
        _spec("reward", None, ["responses"], ["scores"]),
        _spec("old_log_prob", "actor", ["responses"], ["old"]),
        _spec("ref", "ref", ["responses"], ["ref"]),
        _spec("values", "critic", ["responses"], ["values"]),
        _spec("adv", None, ["scores", "old", "values"], ["advantages"], pure=False),
        _spec("update_critic", "critic", ["values", "advantages"], pure=False),
        _spec("update_actor", "actor", ["old", "advantages"], pure=False),
    ]
    waits = dependencies(step, SLOTS)
    assert waits[2] == waits[3] == waits[5] == {0, 1}, "reward, log-probs and values run together"
    assert waits[4] == {0, 1, 3}, "the reference shares a device with the actor"
    assert waits[6] == set(range(6)) and waits[7] == {0, 5, 6} and waits[8] == {0, 1, 3, 4, 6}
    assert OverlapPlan(step, SLOTS).exclusive == {0, 1, 6}


def test_a_role_without_device_slots_is_refused():
    with pytest.raises(
        ValueError,
        match="stage 'judge' runs in role 'rm', which has no device slots; roles that have: actor, ref, critic",
    ):
        dependencies([_spec("judge", "rm", ["a"])], SLOTS)


def _nap(name, *, reads=(), writes=()):
    def work(ctx):
        time.sleep(NAP)
        for column in writes:
            ctx.batch[column] = name

    return stage(name, reads=reads, writes=writes)(work)


@pytest.mark.parametrize("overlap", [None, {}], ids=["serial", "overlapped"])
def test_three_independent_stages_run_at_once_if_they_may_and_the_timer_is_right(overlap):
    running, most, lock, together = 0, 0, threading.Lock(), threading.Barrier(1 if overlap is None else 3)

    def nap(name):
        def work(ctx):
            nonlocal running, most
            with lock:
                running += 1
                most = max(most, running)
            together.wait(60)
            time.sleep(NAP)
            with lock:
                running -= 1
            ctx.batch[name] = name

        return stage(name, writes=name)(work)

    with Task(ctx=OnlineRLContext(batch={})) as task:
        task.use_wrapper(StepTimer())
        for name in "abc":
            task.use(nap(name))
        start = time.perf_counter()
        task.run(max_step=1, overlap=overlap)
        elapsed = time.perf_counter() - start
    assert task.ctx.batch == {"a": "a", "b": "b", "c": "c"} and most == (1 if overlap is None else 3)
    assert all(NAP <= task.ctx.timing[name] <= elapsed for name in "abc")


def test_a_stage_starts_when_its_own_inputs_are_ready():
    order = []

    def mark(name, seconds, **columns):
        def work(ctx):
            time.sleep(seconds)
            order.append(name)

        return stage(name, **columns)(work)

    with Task() as task:
        task.use(mark("short", 0.0, writes="a")).use(mark("long", 3 * NAP, writes="b")).use(
            mark("after short", 0.0, reads="a")
        )
        task.run(max_step=1, overlap={})
    assert order == ["short", "after short", "long"]


def test_an_exclusive_stage_runs_in_the_callers_thread():
    threads = {}

    def record_thread(name, **columns):
        return stage(name, **columns)(lambda ctx: threads.update({name: threading.current_thread()}))

    with Task() as task:
        task.use(record_thread("barrier")).use(record_thread("a", writes="a")).use(record_thread("b", writes="b")).use(
            record_thread("end", reads="ab")
        )
        task.run(max_step=1, overlap={})
    main = threading.current_thread()
    assert threads["barrier"] is threads["end"] is main and main not in (threads["a"], threads["b"])


def test_second_halves_run_in_reverse_order_whichever_first_half_ended_first():
    log = []

    def layer(name, seconds):
        def run(ctx):
            time.sleep(seconds)
            yield
            log.append(name)

        return stage(name, writes=name)(run)

    with Task() as task:
        task.use(layer("a", 2 * NAP)).use(layer("b", NAP)).use(layer("c", 0)).run(max_step=1, overlap={})
    assert log == ["c", "b", "a"]


def test_the_first_exception_is_raised_at_once_and_dependent_stages_never_run():
    log, released, ended = [], threading.Event(), threading.Event()

    def slow(ctx):
        released.wait(60)
        ended.set()

    def fail(ctx):
        raise KeyError("x")

    with Task() as task:
        task.use(stage("a", writes="a")(slow)).use(stage("fail", writes="b")(fail))
        task.use(stage("c", reads="b")(lambda ctx: log.append("c")))
        task.ctx.batch = {}
        with pytest.raises(KeyError) as caught:
            task.run(max_step=1, overlap={})
        assert not ended.is_set()
        released.set()
    assert log == [] and caught.value.__notes__ == ["in stage 'fail' of step 0"]


def test_concurrent_stages_do_not_see_partial_results_of_each_other():
    seen = {}

    def writer(ctx):
        ctx.batch["a"] = ctx.metrics["a"] = ctx.attribute = 1
        time.sleep(2 * NAP)

    def reader(ctx):
        time.sleep(NAP)
        seen["beside"] = (dict(ctx.batch), dict(ctx.metrics), ctx.get("attribute"))

    def behind(ctx):
        seen["behind"] = (dict(ctx.batch), dict(ctx.metrics), ctx.get("attribute"))

    with Task(ctx=OnlineRLContext(batch={})) as task:
        task.use(stage(writes="a")(writer)).use(stage(writes="b")(reader)).use(behind).run(max_step=1, overlap={})
    assert seen == {"beside": ({}, {}, None), "behind": ({"a": 1}, {"a": 1}, 1)}


def test_a_second_half_sees_the_results_of_all_stages():
    def two_halves(ctx):
        yield
        ctx.metrics["both"] = (ctx.batch["a"], ctx.batch["b"], ctx.later)

    def later(ctx):
        ctx.later = 3

    with Task(ctx=OnlineRLContext(batch={})) as task:
        task.use(stage(writes="x")(two_halves)).use(_nap("a", writes="a")).use(_nap("b", writes="b")).use(later)
        task.run(max_step=1, overlap={})
    assert task.ctx.metrics["both"] == ("a", "b", 3)


def test_a_concurrent_stage_can_keep_and_remove_values():
    @stage("first")
    def first(ctx):
        ctx.batch, ctx.scratch = {"scratch": 1, "a": 0}, 1

    @stage("keeper", writes="a")
    def keeper(ctx):
        ctx.keep("count")
        ctx.count = ctx.get("count", 0) + 1
        ctx.pop("scratch")
        ctx.batch.pop("scratch")

    with Task() as task:
        task.use(first).use(keeper).use(_nap("b", writes="b")).run(max_step=3, overlap={})
    assert task.ctx.count == 3 and "scratch" not in task.ctx and task.ctx.batch == {"a": 0, "b": "b"}


def test_a_concurrent_stage_may_end_the_run():
    def end(ctx):
        ctx.finish = True

    with Task(ctx=OnlineRLContext(batch={})) as task:
        task.use(stage(writes="x")(end)).use(_nap("a", writes="a")).run(max_step=5, overlap={})
    assert task.ctx.total_step == 0


def test_a_stage_may_be_replaced_between_two_steps():
    log = []

    def change(ctx):
        if ctx.total_step == 0:
            task.replace("b", stage("b", writes="b")(lambda ctx: log.append("new")))

    with Task() as task:
        task.use(change).use(stage("b", writes="b")(lambda ctx: log.append("old"))).run(max_step=2, overlap={})
    assert log == ["old", "new"]


def test_overlap_and_async_mode_together_are_refused():
    with Task(async_mode=True) as task, pytest.raises(ValueError, match="give one of them"):
        task.use(lambda ctx: None).run(max_step=1, overlap={})


COLUMNS = "abcd"
columns = st.lists(st.sampled_from(COLUMNS), unique=True, max_size=3).map(tuple)
specs = st.lists(
    st.builds(_spec, st.just("s"), st.sampled_from([None, "actor", "ref", "critic"]), columns, columns, st.booleans()),
    min_size=1,
    max_size=8,
)


@settings(max_examples=60, deadline=None)
@given(specs)
def test_the_result_of_an_overlapped_step_is_that_of_the_serial_one(specs):
    def use_all(task):
        for i, spec in enumerate(specs):

            def work(ctx, i=i, spec=spec):
                read = [ctx.batch[column] for column in spec.reads]
                time.sleep(0.0005 * (7 * i % 3))  # so that stages end in another order than they start
                for column in spec.writes:
                    ctx.batch[column] = hash((i, column, *read))

            task.use(
                stage(f"{spec.name}{i}", role=spec.role, reads=spec.reads, writes=spec.writes, pure=spec.pure)(work)
            )

    results = []
    for overlap in (None, SLOTS):
        with Task(ctx=OnlineRLContext(batch=dict.fromkeys(COLUMNS, 0))) as task:
            use_all(task)
            task.run(max_step=1, overlap=overlap)
        results.append(task.ctx.batch)
    assert results[0] == results[1]


@settings(max_examples=60, deadline=None)
@given(specs, st.randoms())
def test_conflicting_stages_never_run_concurrently_in_any_order_of_completion(specs, random):
    running, futures, ending = set(), {}, threading.Lock()

    class Executor:
        def run_inline(self, i):
            assert not running
            return i

        def submit(self, i):
            assert not [j for j in tuple(running) if conflict(specs[i], specs[j], SLOTS)]
            future = futures[i] = Future()
            running.add(i)
            if random.random() < 0.5:
                end_one()
            else:
                threading.Timer(0.001, end_one).start()
            return future

        def result(self, i, future):
            return future.result()

        def cancel(self, futures, error):
            pass

    def end_one():
        with ending:
            if running:
                i = random.choice(sorted(tuple(running)))
                running.remove(i)
                futures[i].set_result(i)

    assert OverlapPlan(specs, SLOTS).run(Executor()) == list(range(len(specs)))
