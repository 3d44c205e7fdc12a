"""Six roles in the unified style, re-expressed from the description of DLRover's `rl_mock`: three episodes on text.

After the episodes, the trainer asks the questions of `CHECKS`; `tests/sdk/test_runtime.py` compares the answers.
"""

import asyncio
import json
import os
import signal
import threading
import time
from pathlib import Path

from hybridrl.errors import CallCycle, CallTimeout, WorkerLost
from hybridrl.sdk import RLRoleType, RoleGroup, create_rpc_proxy, current_worker, export_rpc_instance, rpc
from tests.support.sdk import rl_mock_calls as calls

EPISODES = 3
PROMPTS = ["a", "bb", "ccc", "dddd", "eeeee"]


class Role:
    """What every role offers."""

    def __init__(self):
        self.rank, self.ended, self.path = current_worker().actor_info.rank, 0, None

    @rpc(calls.init)
    def load(self, path):
        self.path = path
        return self.rank

    @rpc(calls.end_job)
    def stop_working(self):
        self.ended += 1
        return self.ended

    @rpc()
    def context(self):
        worker = current_worker()
        actor = worker.actor_info
        return [actor.name, actor.role, actor.rank, worker.world_size, worker.job_info.user_config.nested.value]


class Trained(Role):
    def __init__(self):
        super().__init__()
        self.rows, self.version = [], 0

    @rpc(calls.forward)
    def values(self, samples):
        return [len(sample) + self.version for sample in samples]

    @rpc(calls.append_experience)
    def append(self, rows):
        self.rows += rows
        return [None] * len(rows)

    @rpc(calls.update)
    def learn(self):
        self.version += 1
        count, self.rows = len(self.rows), []
        return count


class Actor(Trained):
    @rpc(calls.update)
    def learn(self):
        count = super().learn()
        if self.rank == 0:
            calls.load_weights(self.version)  # from the actor to the rollouts
        return count

    @rpc()
    def weights(self):
        return self.version

    @rpc()
    def asks_rollout(self, method, *args):
        return RoleGroup("rollout").call(method, *args).result()

    @rpc()
    def asks_from_a_thread(self):
        answers = []
        thread = threading.Thread(target=lambda: answers.append(RoleGroup("reward").call("version").result()))
        thread.start()
        thread.join()
        return answers

    @rpc()
    async def asks_on_the_event_loop(self):
        try:
            RoleGroup("reward").call("version")
        except RuntimeError as error:
            future = await asyncio.to_thread(RoleGroup("reward").call, "version")
            return str(error), await asyncio.wrap_future(future)


class Rollout(Role):
    greeting = None

    def __init__(self, config):
        super().__init__()
        self.version, self.naps = 0, 0
        if Path(config["out"] + ".killed").exists():  # this process replaces another one
            self.greeting = RoleGroup("reward").call("version").result()

    @rpc(calls.generate)
    def answer(self, prompts, params):
        return [f"{prompt}{params['suffix']}v{self.version}" for prompt in prompts]

    @rpc(calls.load_weights)
    def load_version(self, version):
        self.version = version
        return version

    @rpc()
    def info(self):
        return os.getpid(), self.greeting

    @rpc()
    def naps_for(self, seconds):
        time.sleep(seconds)
        return os.getpid()

    @rpc(idempotent=True)
    def naps_if_first(self, seconds):
        if self.greeting is None:
            time.sleep(seconds)
        return os.getpid()

    @rpc(timeout_s=0.3)
    def is_slow(self):
        time.sleep(1)

    @rpc()
    def asks_actor(self):
        return RoleGroup("actor").call_rank0("weights").result()

    @rpc()
    def asks_failing_reward(self):
        return RoleGroup("reward").call("fail").result()

    @rpc()
    async def rests(self, seconds):
        await asyncio.sleep(seconds)
        return threading.get_ident()


class Reference(Role):
    @rpc(calls.forward)
    def log_probs(self, samples):
        return [-len(sample) for sample in samples]


class Store:
    def __init__(self):
        self.values = {}

    @rpc()
    def put(self, key, value):
        self.values[key] = value

    @rpc()
    def get(self, key):
        return self.values[key]


class Reward(Role):
    def __init__(self):
        super().__init__()
        export_rpc_instance("store", Store())

    @rpc(calls.rewards)
    def score(self, samples):
        return [float(len(sample)) for sample in samples]

    @rpc()
    def fail(self):
        raise ArithmeticError("in the reward")


class Critic(Trained):
    def __init__(self):
        super().__init__()
        self.answers = []
        self.thread = threading.Thread(target=self._ask_at_the_start, daemon=True)
        self.thread.start()

    def _ask_at_the_start(self):
        try:
            self.answers.append(RoleGroup("reward").call("version").result())
        except Exception as error:
            self.answers.append(repr(error))

    @rpc()
    def answer_at_the_start(self):
        self.thread.join(20)
        return self.answers


@rpc()
def version():
    """A function of the entry's module."""
    return 7


# -- the trainer


def caught(error_type, call):
    try:
        call()
    except error_type as error:
        return str(error)
    return None


def check_the_context():
    return [current_worker().actor_info.name, *RoleGroup("rollout").call("context").result()]


def check_functions():
    store = create_rpc_proxy("reward-0", "store", Store)
    store.put("key", [1, 2])
    return RoleGroup("reward").call(version).result(), store.get("key"), RoleGroup("critic")[0].call("version").result()


def check_an_exported_function():
    pids = [pid for pid, _ in RoleGroup("rollout").call("info").result()]
    return RoleGroup("rollout").call(calls.process_id).result() == pids and os.getpid() not in pids


def check_an_absent_role():
    absent = RoleGroup("tool", optional=True)
    return len(absent), absent.call("x").result(), list(absent.call_batch("x", 2, [1, 2]))


def check_threads():
    answers = RoleGroup("actor").call("asks_from_a_thread").result()
    return answers, RoleGroup("critic").call("answer_at_the_start").result()


def check_the_event_loop():
    return RoleGroup("actor").call_rank0("asks_on_the_event_loop").result()


def check_scatter():
    return RoleGroup("rollout").call("naps_for", [0, 0.01], _scatter=True).result() == [
        pid for pid, _ in RoleGroup("rollout").call("info").result()
    ]


def check_coroutines_run_side_by_side():
    start = time.monotonic()
    for future in [RoleGroup("rollout")[0].call("rests", 1.0) for _ in range(3)]:
        future.result()
    return time.monotonic() - start < 2.5


def check_the_deadline():
    return caught(CallTimeout, RoleGroup("rollout").call("is_slow").result)


def check_a_cycle():
    return caught(CallCycle, RoleGroup("actor")[0].call("asks_rollout", "asks_actor").result)


def check_a_failure_three_hops_away():
    try:
        RoleGroup("actor")[0].call("asks_rollout", "asks_failing_reward").result()
    except ArithmeticError as error:
        return str(error), error.__notes__, error.remote_traceback


def check_an_unknown_endpoint():
    return caught(AttributeError, RoleGroup("reward").call("scoer").result)


def kill(pid):
    os.kill(pid, signal.SIGKILL)


def check_a_killed_process():
    rollouts = RoleGroup("rollout")
    (first, _), (second, _) = rollouts.call("info").result()
    lost, beside = rollouts[1].call("naps_for", 60), rollouts[0].call("naps_for", 3)
    time.sleep(0.5)
    kill(second)
    loss = caught(WorkerLost, lambda: lost.result(60))
    (again, _), (new, greeting) = rollouts.call("info").result()
    asked = RoleGroup("actor").call("asks_rollout", "info").result()  # they know the old process
    return (
        loss,
        beside.result() == first == again,
        new not in (first, second),
        greeting,
        asked == [[(first, None), (new, [7])]] * 2,
    )


def check_an_idempotent_call_of_a_killed_process():
    rollouts = RoleGroup("rollout")
    pid, _ = rollouts[0].call("info").result()
    future = rollouts[0].call("naps_if_first", 60)
    time.sleep(0.5)
    kill(pid)
    return future.result(60) not in (pid, None)


CHECKS = {name: check for name, check in globals().items() if name.startswith("check_")}


class Trainer:
    def run(self):
        config = current_worker().job_info.user_config
        result = {"episodes": [self.episode() for _ in range(EPISODES)], "ended": calls.end_job()}
        Path(config.out + ".killed").write_text("from now on")
        for name, check in CHECKS.items():
            start = time.monotonic()
            try:
                result[name] = check()
            except Exception as error:
                result[name] = repr(error)
            result[f"{name}_s"] = round(time.monotonic() - start, 2)
        Path(config.out).write_text(json.dumps(result))

    def episode(self):
        started = [calls.init(role, "/model") for role in RLRoleType if role is not RLRoleType.TRAINER]
        ranks = [future.result() for future in started]
        samples = calls.generate(PROMPTS, {"suffix": "!"})
        rewards = calls.rewards(samples)
        values, log_probs = (calls.forward(role, samples) for role in (RLRoleType.CRITIC, RLRoleType.REFERENCE))
        rows = list(zip(samples, rewards, values, log_probs, strict=True))
        for appended in [calls.append_experience(role, rows) for role in (RLRoleType.ACTOR, RLRoleType.CRITIC)]:
            appended.wait()
        updates = [calls.update(role) for role in (RLRoleType.ACTOR, RLRoleType.CRITIC)]
        return ranks, rows, [update.result() for update in updates]
