"""`RoleGroup` over a role of threads: who gets what, what comes back, and when a call is sent again."""

import asyncio
import threading
import time
from concurrent.futures import Future

import pytest

from hybridrl.errors import CallTimeout, ConfigError, WorkerLost
from hybridrl.sdk import (
    FutureSequence,
    RLRoleType,
    RoleGroup,
    create_rpc_proxy,
    current_worker,
    export_rpc_instance,
    rpc,
)
from hybridrl.sdk.pending_calls import MAX_THREADS, PENDING
from hybridrl.single_controller import endpoints


def generate(prompts, params): ...


class Rollout:
    number = 0  # its rank
    sent: list = []

    def __init__(self):
        self.calls = 0
        self.gate = threading.Event()

    @rpc(generate)
    def answer(self, prompts, params=None, *, suffix=""):
        return [f"{self.number}:{prompt}{params or ''}{suffix}" for prompt in prompts]

    @rpc()
    def whoami(self, *args, **kwargs):
        return self.number, args, kwargs

    @rpc()
    def drops_one(self, prompts):
        return prompts[1:]

    @rpc()
    def fails_on(self, rank):
        if self.number == rank:
            raise ArithmeticError(f"on {rank}")
        return self.number

    @rpc()
    def waits(self):
        self.calls += 1
        self.gate.wait(20)
        return self.number

    @rpc(idempotent=True)
    def waits_idempotent(self):
        return self.waits()

    @rpc(timeout_s=0.2)
    def slow(self):
        time.sleep(1)

    def unmarked(self, x):
        return x + self.number

    @rpc()
    async def coroutine(self, x):
        await asyncio.sleep(0)
        return x


@pytest.fixture
def job(make_job):
    return make_job(rollout=(Rollout, 4))


@pytest.fixture
def group(job):
    return RoleGroup(RLRoleType.ROLLOUT)


def test_it_is_a_sequence_of_its_processes(group):
    assert len(group) == 4 and [actor.rank for actor in group] == [0, 1, 2, 3] and group[-1].name == "rollout-3"
    assert [actor.rank for actor in group[1:3]] == [1, 2] and group.role == "rollout"
    assert RoleGroup("ROLLOUT")[2].call("whoami", 1).result() == (2, (1,), {})


def test_call_gives_a_real_future_of_the_outputs_by_rank(group):
    future = group.call("whoami", [1, 2, 3, 4], key=5)
    assert isinstance(future, Future) and not future.cancel()
    assert future.result() == [(rank, ([1, 2, 3, 4],), {"key": 5}) for rank in range(4)]
    done = threading.Event()
    group.call("whoami").add_done_callback(lambda _: done.set())
    assert done.wait(60)
    assert group.call("coroutine", 1).result() == [1] * 4


def test_scatter_gives_every_process_its_entry(group):
    answers = group.call("whoami", [1, 2, 3, 4], _scatter=True, key=["abcd"] * 4).result()
    assert answers == [(rank, (rank + 1,), {"key": "abcd"}) for rank in range(4)]
    with pytest.raises(ValueError, match="a list of 4, got 3"):
        group.call("whoami", [1, 2, 3], _scatter=True)


def test_a_method_is_named_by_text_stub_or_itself_and_needs_no_mark(group):
    for method in ("generate", generate, Rollout.answer):
        assert group.call_rank0(method, ["a"]).result() == ["0:a"]
    assert group.call("unmarked", 10).result() == [10, 11, 12, 13]


def test_batches_are_cut_in_balance_and_come_back_in_order(group):
    outputs = group.call_batch(generate, 5, list("abcde"), "!", suffix="?")
    assert isinstance(outputs, FutureSequence) and len(outputs) == 5
    # 5 over 4 is 2 1 1 1; text goes to every process, as an argument and as a keyword
    assert list(outputs) == ["0:a!?", "0:b!?", "1:c!?", "2:d!?", "3:e!?"] and outputs[-1] == "3:e!?"
    assert list(group.call_batch(generate, 2, ("a", "b"))) == ["0:a", "1:b"]
    assert len(group.call_batch(generate, 0, [])) == 0
    parts = group.call_batch("whoami", 4, [1, 2, 3, 4], key=list("abcd"))._parts
    answers = [part.result() for part in parts]  # of all: a job that ends leaves calls without an answer
    assert answers[1] == (1, ([2],), {"key": ["b"]})


def test_a_future_sequence_may_be_the_next_calls_argument(group):
    first = group.call_batch(generate, 3, list("abc"))
    assert list(group.call_batch(generate, 3, first)) == ["0:0:a", "1:1:b", "2:2:c"]
    assert group.call_rank0("whoami", first).result()[1] == (["0:a", "1:b", "2:c"],)


def test_a_list_of_another_length_is_named(group):
    with pytest.raises(ValueError, match="3.*5|5.*3"):
        group.call_batch(generate, 5, list("abc"))


def test_a_process_that_returns_too_few_outputs_is_an_error_and_no_shifted_rows(group):
    with pytest.raises(ValueError, match="one output for each of its inputs"):
        list(group.call_batch("drops_one", 8, list("abcdefgh")))


def test_an_exception_of_one_process_is_the_futures(group):
    with pytest.raises(ArithmeticError, match="on 2"):
        group.call("fails_on", 2).result()
    assert group.call("fails_on", 7).result() == [0, 1, 2, 3]


def test_reading_part_of_a_batch_waits_for_its_process_only(job, group):
    gates = [worker.gate for worker in job.group("rollout").workers]
    gates[0].set()
    parts = [actor.call("waits") for actor in group]
    assert parts[0].result(60) == 0 and not parts[1].done()
    for gate in gates:
        gate.set()
    assert [part.result(60) for part in parts] == [0, 1, 2, 3]


def test_calls_have_the_endpoints_deadline_or_the_groups(group):
    with pytest.raises(CallTimeout, match="slow"):
        group.call("slow").result()
    with pytest.raises(CallTimeout, match="waits"):
        RoleGroup("rollout", timeout_s=0.1).call_rank0("waits").result()
    with pytest.raises(ConfigError, match="timeout_s=0"):
        RoleGroup("rollout", timeout_s=0)


def test_an_absent_role_is_an_error_unless_it_is_optional(job):
    with pytest.raises(ConfigError, match=r"RoleGroup\('critic'\): .*no such role.* rollout, trainer"):
        RoleGroup("critic")
    absent = RoleGroup("critic", optional=True)
    assert len(absent) == 0 and absent.call("init", 1).result() == [] and absent.call_rank0("init").result() is None
    assert list(absent.call_batch("values", 3, [1, 2, 3])) == [None, None, None] and job.lookups == 0


def test_a_role_is_looked_up_once(job, group):
    for _ in range(3):
        group.call("whoami").result()
    RoleGroup("rollout").call("whoami").result()
    assert job.lookups == 1


def test_on_an_event_loop_a_call_is_refused_with_the_way_out(group):
    async def wrong():
        group.call("whoami")

    async def right():
        future = await asyncio.to_thread(group.call, "coroutine", 1)
        return await asyncio.wrap_future(future)

    with pytest.raises(RuntimeError, match=r"rollout.whoami\(\) was called on this process's event loop.*to_thread"):
        asyncio.run(wrong())
    assert asyncio.run(right()) == [1] * 4


def test_many_pending_calls_have_few_threads_and_all_end(job, group):
    before, others = threading.active_count(), len(PENDING)
    futures = [group[number % 4].call("waits") for number in range(400)]
    assert len(PENDING) >= 396 and threading.active_count() - before <= 4 + MAX_THREADS + 1
    for worker in job.group("rollout").workers:
        worker.gate.set()
    assert [future.result(60) for future in futures] == [0, 1, 2, 3] * 100 and len(PENDING) <= others
    assert threading.active_count() - before <= 4 + MAX_THREADS + 1


def test_callbacks_that_wait_for_further_calls_end_also_if_all_threads_are_in_one(group):
    ends: list[Future] = [Future() for _ in range(5 * MAX_THREADS)]

    def call_again(end, answers):
        try:
            end.set_result(group.call("whoami", answers.result()[0][0]).result(20))
        except Exception as error:
            end.set_exception(error)

    for end in ends:
        group.call("whoami").add_done_callback(lambda answers, end=end: call_again(end, answers))
    assert [len(end.result(30)) for end in ends] == [4] * len(ends)


# -- losses


@pytest.mark.parametrize("clock_step_s", [0.0, -3600.0])
def test_a_lost_process_ends_the_future_with_the_masters_words_and_nothing_runs_twice(
    job, group, monkeypatch, clock_step_s
):
    future, clock = group.call("waits"), time.time
    old = job.group("rollout")
    while sum(worker.calls for worker in old.workers) < 4:
        time.sleep(0.01)
    monkeypatch.setattr(time, "time", lambda: clock() + clock_step_s)  # the machine's clock is set meanwhile
    old.lose(2)
    job.restart("rollout")
    with pytest.raises(WorkerLost, match="rollout-2 was lost .*in the master's words"):
        future.result(10)
    assert sum(worker.calls for worker in job.group("rollout").workers) == 0
    assert group.call("unmarked", 0).result() == [0, 1, 2, 3]  # the next call goes to the new ones


def test_a_call_to_processes_that_were_replaced_before_it_is_sent_again(job, group):
    assert group.call("unmarked", 0).result() == [0, 1, 2, 3]
    old = job.group("rollout")
    for rank in range(4):
        old.lose(rank)
    job.restart("rollout")
    time.sleep(0.02)
    assert group.call("unmarked", 1).result(60) == [1, 2, 3, 4] and job.lookups == 2
    assert list(group.call_batch(generate, 2, ["a", "b"])) == ["0:a", "1:b"]


def test_an_idempotent_call_waits_for_the_new_process_and_is_sent_again(job, group):
    future = group[1].call("waits_idempotent")
    old = job.group("rollout")
    while not old.workers[1].calls:
        time.sleep(0.01)
    old.lose(1)
    time.sleep(0.4)
    assert not future.done()  # the job has not started the new process yet
    job.restart("rollout")
    while not job.group("rollout").workers[1].calls:
        time.sleep(0.01)
    job.group("rollout").workers[1].gate.set()
    assert future.result(60) == 1


def test_a_call_that_ends_its_process_each_time_is_not_sent_forever(job, group):
    future, seen = group[0].call("waits_idempotent"), 0
    while not future.done():
        current = job.group("rollout")
        if current.workers[0].calls:
            seen += 1
            current.lose(0)
            job.restart("rollout")
        time.sleep(0.01)
    assert seen == 3
    with pytest.raises(WorkerLost):
        future.result()


# -- objects in other processes


class Store:
    def __init__(self):
        self.values = {}

    @rpc()
    def put(self, key, value):
        self.values[key] = value

    @rpc("read")
    async def get(self, key):
        return self.values[key]


def test_a_proxy_calls_an_exported_object(job):
    export_rpc_instance("store", Store())
    for owner in ("rollout-1", RoleGroup("rollout")[1]):
        proxy = create_rpc_proxy(owner, "store", Store)
        assert proxy.put("a", 1) is None and asyncio.run(proxy.get("a")) == 1
    with pytest.raises(ConfigError, match=r"create_rpc_proxy\('rollout'\): a process is named role-rank"):
        create_rpc_proxy("rollout", "store", Store)
    with pytest.raises(KeyError):
        asyncio.run(proxy.get("b"))
    assert "store.put" in endpoints.names()


def test_current_worker_tells_job_and_role(job):
    worker = current_worker()
    assert (worker.job_info.name, worker.job_info.job_id, worker.job_info.user_config.lr) == (
        "threads",
        "threads-1",
        0.5,
    )
    assert worker.actor_info.role == RLRoleType.TRAINER and worker.world_size == 1
    assert worker.actor_info.name == "trainer-0"


def test_outside_of_a_job_everything_says_so():
    for call in (current_worker, lambda: RoleGroup("actor")):
        with pytest.raises(ConfigError, match="belongs to no submitted job"):
            call()
