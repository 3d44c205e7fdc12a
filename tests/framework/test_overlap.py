"""Overlap: submitted work beside other stages, what waits for what, and equality with the result in order."""

import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridrl.framework import OnlineRLContext, StageSpec, StepTimer, Task, stage
from hybridrl.framework.overlap import Half, conflict, schedule

NAP = 0.1
SLOTS = {"actor": {0, 1}, "ref": {1, 2}, "critic": {3}}


def _spec(name="s", role=None, reads=(), writes=(), pure=True, submits=False):
    return StageSpec(name, role, tuple(reads), tuple(writes), pure, submits)


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
        (_spec(reads="a", role="judge"), _spec(reads="a", role="actor"), None),  # takes no turns
        (_spec(reads="a"), _spec(reads="a", role="critic"), None),
        (_spec("log"), _spec(reads="a"), "log is a barrier"),  # names no column
        (_spec(reads="a"), _spec("adv", reads="b", pure=False), "adv is a barrier"),  # changes state of the driver
    ],
)
def test_two_stages_may_not_overlap_for_a_reason(first, second, reason):
    assert conflict(first, second, SLOTS) == conflict(second, first, SLOTS) == reason


PPO_STEP = [
    _spec("next_batch", writes=["ids"], pure=False),
    _spec("gen", "actor", ["ids"], ["responses"]),
    _spec("reward", None, ["responses"], ["scores"]),
    _spec("old_log_prob", "actor", ["responses"], ["old"], submits=True),
    _spec("ref", "ref", ["responses"], ["ref"], submits=True),
    _spec("values", "critic", ["responses"], ["values"], submits=True),
    _spec("adv", None, ["scores", "old", "values"], ["advantages"], pure=False),
    _spec("update_critic", "critic", ["values", "advantages"], pure=False, submits=True),
    _spec("update_actor", "actor", ["old", "advantages"], pure=False),
    _spec("log", pure=False),
]


def _order(slots, **options):
    halves = schedule(PPO_STEP, slots, **options)
    return [("end " if half.is_end else "") + PPO_STEP[half.stage].name for half in halves]


def test_the_order_of_a_ppo_step_where_roles_share_no_device():
    scores = ["old_log_prob", "ref", "values", "reward", "end old_log_prob", "end ref", "end values"]
    updates = ["update_critic", "update_actor", "end update_critic"]
    assert _order({}) == ["next_batch", "gen", *scores, "adv", *updates, "log"]


def test_a_role_waits_for_the_devices_that_it_shares():
    scores = ["old_log_prob", "values", "reward", "end old_log_prob", "ref", "end values", "end ref"]
    assert _order(SLOTS)[2:9] == scores, "the reference shares a device with the actor"


def test_submitted_work_waits_in_line_where_roles_share_a_process_and_other_stages_take_turns():
    everywhere = dict.fromkeys(SLOTS, {0})
    order = [
        ("end " if half.is_end else "") + PPO_STEP[half.stage].name
        for half in schedule(PPO_STEP, everywhere, queued=True)
    ]
    assert order[2:6] == ["old_log_prob", "ref", "values", "reward"]
    assert order[-4:] == ["update_critic", "end update_critic", "update_actor", "log"]


def _submits(name, pool, seconds, *, role=None, reads=(), writes=()):
    """Return a stage whose work is a nap in a thread of the pool."""

    def work(ctx):
        future = pool.submit(time.sleep, seconds)
        yield
        future.result()
        for column in writes:
            ctx.batch[column] = name

    return stage(name, role=role, reads=reads, writes=writes, submits=True)(work)


@pytest.mark.parametrize(("overlap", "naps"), [(None, 3), ({}, 1)], ids=["in order", "overlapped"])
def test_submitted_work_runs_at_once_if_it_may(overlap, naps):
    with ThreadPoolExecutor(3) as pool, Task(ctx=OnlineRLContext(batch={})) as task:
        for name in "abc":
            task.use(_submits(name, pool, NAP, writes=name))
        start = time.perf_counter()
        task.run(max_step=1, overlap=overlap)
        elapsed = time.perf_counter() - start
    assert task.ctx.batch == {"a": "a", "b": "b", "c": "c"}
    assert naps * NAP <= elapsed and (overlap is None or elapsed < 3 * NAP)


class _Work:
    """Work that began and ended at these times of `time.perf_counter()`."""

    def __init__(self, begin, end):
        self.begin, self.end = begin, end


def test_the_timer_counts_the_work_and_not_the_stages_beside_it():
    def work(ctx):
        start = time.perf_counter()
        yield _Work(start, start + NAP)
        ctx.batch["a"] = 1

    @stage("slow", writes="b")
    def slow(ctx):
        time.sleep(3 * NAP)

    with Task(ctx=OnlineRLContext(batch={})) as task:
        task.use_wrapper(timer := StepTimer(print_per_step=0))
        task.use(slow).use(stage("a", writes="a", submits=True)(work)).run(max_step=1, overlap={})
    assert NAP <= task.ctx.timing["a"] < 2 * NAP < task.ctx.timing["slow"]
    assert timer.last["a"] == pytest.approx(task.ctx.timing["a"])


def test_a_stage_that_does_not_yield_needs_no_end():
    with Task(ctx=OnlineRLContext(batch={})) as task:
        task.use(stage("a", writes="a", submits=True)(lambda ctx: ctx.batch.update(a=1))).use(lambda ctx: None)
        task.run(max_step=1, overlap={})
    assert task.ctx.batch == {"a": 1}


def test_second_halves_of_other_stages_still_run_at_the_end_of_the_step():
    log = []

    def layer(name):
        def run(ctx):
            log.append(name)
            yield
            log.append(f"end {name}")

        return run

    with Task() as task:
        task.use(stage("a", writes="a")(layer("a"))).use(stage("b", writes="b", submits=True)(layer("b")))
        task.use(lambda ctx: log.append("barrier")).run(max_step=1, overlap={})
    assert log == ["b", "a", "end b", "barrier", "end a"]


def test_an_exception_ends_the_step_and_closes_what_was_submitted():
    log = []

    def submitted(ctx):
        try:
            yield
        finally:
            log.append("closed")

    def fail(ctx):
        raise KeyError("x")

    with Task(ctx=OnlineRLContext(batch={})) as task:
        task.use(stage("fail", writes="b")(fail)).use(stage("a", writes="a", submits=True)(submitted))
        task.use(stage("c", reads="a")(lambda ctx: log.append("c")))
        with pytest.raises(KeyError) as caught:
            task.run(max_step=1, overlap={})
    assert log == ["closed"] and caught.value.__notes__ == ["in stage 'fail' of step 0"]


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
roles = st.sampled_from([None, "actor", "ref", "critic"])
specs = st.lists(
    st.builds(_spec, st.just("s"), roles, columns, columns, st.booleans(), st.booleans()), min_size=1, max_size=8
)


@settings(max_examples=200, deadline=None)
@given(specs)
def test_a_stage_starts_after_the_end_of_every_earlier_one_with_which_it_conflicts(specs):
    halves = schedule(specs, SLOTS)
    assert sorted(halves) == sorted(
        [Half(i) for i in range(len(specs))] + [Half(i, is_end=True) for i, spec in enumerate(specs) if spec.submits]
    )
    for late, spec in enumerate(specs):
        for early in range(late):
            if conflict(specs[early], spec, SLOTS):
                assert halves.index(Half(early, is_end=specs[early].submits)) < halves.index(Half(late))
        if spec.submits:
            assert halves.index(Half(late)) < halves.index(Half(late, is_end=True))


@settings(max_examples=60, deadline=None)
@given(specs)
def test_the_result_of_an_overlapped_step_is_that_of_the_one_in_order(specs):
    def use_all(task):
        for i, spec in enumerate(specs):

            def work(ctx, i=i, spec=spec):
                result = hash((i, *[ctx.batch[column] for column in spec.reads]))
                if spec.submits:
                    yield
                for column in spec.writes:
                    ctx.batch[column] = hash((column, result))

            options = {"role": spec.role, "reads": spec.reads, "writes": spec.writes, "pure": spec.pure}
            task.use(stage(f"{spec.name}{i}", submits=spec.submits, **options)(work))

    results = []
    for overlap in (None, SLOTS):
        with Task(ctx=OnlineRLContext(batch=dict.fromkeys(COLUMNS, 0))) as task:
            use_all(task)
            task.run(max_step=1, overlap=overlap)
        results.append(task.ctx.batch)
    assert results[0] == results[1]
