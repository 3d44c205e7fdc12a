"""The states of a router's replicas: losses, restarts, pauses, and replicas that leave, one during the other."""

import asyncio
import threading
from collections.abc import Callable

import pytest

from hybridrl.errors import RequestFailed, WorkerLost
from hybridrl.serving.replicas import NotReplaceable
from hybridrl.serving.router import ReplicaRouter
from hybridrl.serving.routing_table import ReplicaState
from hybridrl.workers.rollout.requests import Request, TokenOutput
from hybridrl.workers.rollout.sampling.sampler import SamplingParams

SERVING, IDLE, RESTARTING = ReplicaState.SERVING, ReplicaState.IDLE, ReplicaState.RESTARTING
GIVEN_UP = ReplicaState.GIVEN_UP


class ScriptedReplicas:
    """Replicas in this process that answer at once with their number, and raise what `errors` has for them.

    `may_restart`: a restart ends when it is set.
    """

    def __init__(self, num_replicas: int, *, can_respawn: bool = True):
        self.num_replicas, self.can_respawn = num_replicas, can_respawn
        self.errors: dict[int, Exception] = {}
        self.may_restart = threading.Event()
        self.num_restarts = 0

    def serve(self, replica: int, requests: list[Request], aborted: list[str]) -> list[TokenOutput]:
        if (error := self.errors.pop(replica, None)) is not None:
            raise error
        return [TokenOutput(request.request_id, [replica], [-1.0], "stop", 0) for request in requests]

    def respawn(self, replica: int) -> None:
        if not self.can_respawn:
            raise NotReplaceable(f"replica {replica} is not the router's")
        assert self.may_restart.wait(60)
        self.num_restarts += 1


def request(name: str) -> Request:
    return Request(name, (1, 2), SamplingParams(1), 0)


def lost(replica: int) -> WorkerLost:
    return WorkerLost("rollout", replica, "serve", "killed")


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.001)


def test_a_pause_waits_for_a_restart_and_the_new_process_serves_after_the_resume():
    replicas = ScriptedReplicas(1)
    replicas.errors = {0: lost(0)}

    async def check() -> None:
        async with ReplicaRouter(replicas) as router:
            answer = asyncio.create_task(router.generate(request("a")))
            await until(lambda: router.table.states == [RESTARTING])
            pause = asyncio.create_task(router.pause())
            assert (await answer).finish_reason == "pause"
            late = asyncio.create_task(router.generate(request("b")))
            await asyncio.sleep(0.05)
            assert not pause.done()
            replicas.may_restart.set()
            await pause
            await asyncio.sleep(0.05)
            assert router.table.states == [IDLE] and not late.done()
            router.resume()
            assert (await late).token_ids == [0] and router.table.states == [SERVING]
        assert router.table.states == [IDLE]

    asyncio.run(check())


def test_a_lost_replicas_request_is_answered_by_another_one_and_it_serves_again():
    replicas = ScriptedReplicas(2)
    replicas.errors = {0: lost(0)}
    replicas.may_restart.set()

    async def check() -> None:
        async with ReplicaRouter(replicas) as router:
            assert (await router.generate(request("a"))).token_ids == [1]
            await until(lambda: router.table.states == [SERVING, SERVING])
            assert [(await router.generate(request(name))).token_ids for name in "bc"] == [[0], [1]]
        [outage] = router.outages
        assert outage.restored_at is not None and outage.num_retried == 1

    asyncio.run(check())


def test_a_replica_that_nobody_restarts_is_given_up_and_the_last_one_ends_all_requests():
    replicas = ScriptedReplicas(2, can_respawn=False)
    replicas.errors = {0: lost(0)}

    async def check() -> None:
        router = ReplicaRouter(replicas)
        router.resume()
        assert (await router.generate(request("a"))).token_ids == [1]
        assert router.table.states == [GIVEN_UP, SERVING]
        replicas.errors = {1: lost(1)}
        for name in "bc":
            with pytest.raises(WorkerLost, match="rollout-1"):
                await router.generate(request(name))
        with pytest.raises(WorkerLost, match="rollout-1"):
            await router.pause()
        router.resume()
        assert router.table.states == [GIVEN_UP, GIVEN_UP]
        await router.close()

    asyncio.run(check())


def test_an_error_of_a_call_ends_all_requests_and_a_pause_raises_it_although_another_call_hangs():
    class Hanging(ScriptedReplicas):
        ends = threading.Event()

        def serve(self, replica: int, requests: list[Request], aborted: list[str]) -> list[TokenOutput]:
            if replica == 0 and requests:
                assert self.ends.wait(60)
            return super().serve(replica, requests, aborted)

    replicas = Hanging(2)

    async def check() -> None:
        router = ReplicaRouter(replicas)
        router.resume()
        hanging = asyncio.create_task(router.generate(request("b")))
        await until(lambda: router.table.load(0) == 1)
        replicas.errors = {1: KeyError("a bug")}
        for answer in (router.generate(request("a")), hanging, router.pause()):
            with pytest.raises(KeyError, match="a bug"):
                await asyncio.wait_for(answer, 30)
        replicas.ends.set()
        await router.close()

    asyncio.run(check())


def test_what_one_request_raises_is_its_answer_alone():
    class Failing(ScriptedReplicas):
        def serve(self, replica: int, requests: list[Request], aborted: list[str]) -> list[TokenOutput]:
            good = super().serve(replica, [one for one in requests if one.request_id != "bad"], aborted)
            bad = [TokenOutput("bad", [], [], "error", -1, error="no") for one in requests if one.request_id == "bad"]
            return good + bad

    async def check() -> None:
        async with ReplicaRouter(Failing(1)) as router:
            good = asyncio.create_task(router.generate(request("good")))
            with pytest.raises(RequestFailed, match="request bad cannot be served: no"):
                await router.generate(request("bad"))
            assert (await good).token_ids == [0] and router.failure is None

    asyncio.run(check())
