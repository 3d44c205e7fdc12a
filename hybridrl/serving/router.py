"""`Router`: requests to replicas of the policy, and around those that die or fall silent. Decisions are `routing.py`,
effects are here.

    async with Router(GroupReplicas(group, ...)) as router:
        output = await router.generate(request)

Each replica has one call in flight, which hands over new requests and brings back what has ended (`Server.serve`). A
call that fails because its process is gone, or that does not return within `progress_timeout_s`, takes the replica out
of the routing; what was open there is asked for again elsewhere, with the same seed and therefore with the same answer,
and the replica is started anew, given the current weights and routed to again. An exception raised by a replica's code
is a bug or a bad request, which would raise anywhere: it ends all requests.

Between `pause()` and `resume()` nothing is asked of any replica, so its process can take new weights or train. What was
open ends with reason "pause" and what there was; `continuation.py` goes on from there.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, Self

from hybridrl.errors import CallTimeout, HybridRLError, WorkerLost
from hybridrl.serving.routing_table import RoutingTable
from hybridrl.single_controller.references import References
from hybridrl.workers.rollout.request_server import SLICE_S
from hybridrl.workers.rollout.requests import Request, TokenOutput

logger = logging.getLogger(__name__)

PROBE_S = 1.0  # how often an idle replica is asked whether it is there
MOST_TRIES = 3  # of one request: a request that ends every process it meets must not end them for ever
MOST_RESPAWNS = 3  # of one replica without an answer in between


class NotReplaceable(Exception):
    """A lost replica is not the router's to bring back: whoever waits for its requests is told of the loss itself."""


class Replicas(Protocol):
    """Where requests are served. Methods block, and are called from threads, for one replica one at a time."""

    num_replicas: int

    def serve(self, replica: int, requests: list[Request], aborted: list[str]) -> list[TokenOutput]:
        """Hand over requests and work on them for a moment; WorkerLost or CallTimeout if the replica cannot be relied
        on any more.
        """

    def respawn(self, replica: int) -> None:
        """Have a new process in place of this one, with the current weights; raises what makes that impossible, or
        NotReplaceable.
        """


class GroupReplicas:
    """Workers of a group with a `serve` method (`ActorRolloutRefWorker`), each of them a replica.

    version: of the weights that they must hold. progress_timeout_s: without an answer for so long, a process counts as
    stuck. refill: gives a worker that was just started the current weights; None where a dead worker cannot be
    replaced.
    """

    def __init__(
        self, group: Any, *, version: int | None, progress_timeout_s: float, refill: Callable[[int], None] | None = None
    ):
        self.group, self.version, self.progress_timeout_s, self.refill = group, version, progress_timeout_s, refill
        self.num_replicas = group.world_size

    def serve(self, replica: int, requests: list[Request], aborted: list[str]) -> list[TokenOutput]:
        answer = self.group.execute_rank_async(replica, "serve", requests, aborted, SLICE_S, self.version)
        references = References([answer], ranks=[replica], fetch=self.group.fetch)
        return self.group.fetch(references, method="serve", timeout_s=self.progress_timeout_s)[0]

    def respawn(self, replica: int) -> None:
        if self.refill is None:
            raise NotReplaceable(
                f"{self.group.role}-{replica} is a process of the trainer's, too, which brings it back"
            )
        self.group.respawn(replica)
        self.group.execute_rank(replica, "init_model")
        self.refill(replica)


@dataclass
class Outage:
    """A replica that was lost: why, seconds (of `time.monotonic`) when it was last known to be well, when it was out,
    and back.
    """

    replica: int
    cause: str
    well_at: float
    out_at: float
    back_at: float | None = None
    retried: int = 0


@dataclass
class _Asked:
    request: Request
    conversation: str
    answer: "asyncio.Future[TokenOutput]"
    tries: int = 1
    paused: bool = False


@dataclass
class _Inbox:
    """What a replica is to be told next."""

    requests: list[Request] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
    news: asyncio.Event = field(default_factory=asyncio.Event)


class Router:
    """Requests in, tokens out, whichever replica makes them.

    To be used in one event loop, between `async with` and its end.
    """

    def __init__(self, replicas: Replicas, *, slack: int = 4):
        self.replicas = replicas
        self.table = RoutingTable(replicas.num_replicas, slack=slack)
        self.outages: list[Outage] = []
        self._inboxes = [_Inbox() for _ in range(replicas.num_replicas)]
        self._asked: dict[str, _Asked] = {}
        self._homeless: list[str] = []  # requests that no healthy replica was there for
        self._gone: set[int] = set()  # replicas that cannot be brought back
        self._resting: set[int] = set()  # replicas that are asked nothing until `resume`
        self._all_rest = asyncio.Event()
        self._failure: BaseException | None = None
        self._ending = False
        self._running = asyncio.Event()

    async def __aenter__(self) -> Self:
        self._threads = ThreadPoolExecutor(self.replicas.num_replicas, thread_name_prefix="router")
        self._running.set()
        self._pumps = [asyncio.create_task(self._pump(replica)) for replica in range(self.replicas.num_replicas)]
        return self

    async def __aexit__(self, *_: object) -> None:
        """Abort what is open, and wait until every replica is there again, or cannot be."""
        self._end()
        await asyncio.gather(*self._pumps)
        self._threads.shutdown()

    async def leave(self, *, wait: bool = False) -> None:
        """End at once, in place of `__aexit__`.

        wait: for calls that are on their way, and for replicas that are well to drop what is open there: another router
        will ask them. Not needed where their processes end, too.
        """
        self._end()
        for pump in self._pumps:
            pump.cancel()
        await asyncio.gather(*self._pumps, return_exceptions=True)
        await asyncio.to_thread(self._threads.shutdown, wait=wait, cancel_futures=True)
        if wait:
            await asyncio.to_thread(self._drop_what_is_open)

    def _drop_what_is_open(self) -> None:
        for replica, inbox in enumerate(self._inboxes):
            if inbox.aborted and replica not in self._gone:
                with contextlib.suppress(HybridRLError):  # one that is not well will be replaced
                    self.replicas.serve(replica, [], inbox.aborted)

    def _end(self) -> None:
        self._ending = True
        for asked in list(self._asked.values()):
            asked.answer.cancel()
            self._forget(asked.request.request_id, tell=True)
        self._running.set()
        for inbox in self._inboxes:
            inbox.news.set()

    async def generate(self, request: Request, *, conversation: str | None = None) -> TokenOutput:
        """Return what the policy says. conversation: requests of the same one go to the same replica while it is
        healthy.

        While the router is paused a request waits; one that was open before ends with reason "pause" and what there
        was.
        """
        await self._running.wait()
        if self._failure is not None:
            raise self._failure
        if self._ending:
            raise asyncio.CancelledError(f"request {request.request_id!r}: the router has ended")
        if request.request_id in self._asked:
            raise ValueError(f"request {request.request_id!r} is open already; ids must differ")
        answer = asyncio.get_running_loop().create_future()
        self._asked[request.request_id] = _Asked(request, conversation or request.request_id, answer)
        self._send(request.request_id)
        try:
            return await answer
        finally:
            self._forget(request.request_id, tell=answer.cancelled())

    def abort(self, request_id: str) -> None:
        """End a request: who waits for it gets what there is, with reason "abort". Nothing for one that is not open."""
        asked = self._asked.get(request_id)
        if asked is None:
            return
        where = self.table.replica_of(request_id)
        if where is None:
            self._homeless.remove(request_id)
            self._answer(TokenOutput(request_id, [], [], "abort", -1))
            return
        self._inboxes[where].aborted.append(request_id)
        self._inboxes[where].news.set()

    async def pause(self) -> None:
        """End all open requests with what there is, and hold new ones back. Returns when no replica is asked anything
        or being replaced.

        That takes as long as a replica works at a time, or until one that fell silent is back. Raises what ended all
        requests, if something did.
        """
        self._running.clear()
        for name, asked in list(self._asked.items()):
            asked.paused = True
            self.abort(name)
        for inbox in self._inboxes:
            inbox.news.set()
        self._note_rest()
        await self._all_rest.wait()
        if self._failure is not None:
            raise self._failure

    def resume(self) -> None:
        """Take requests again, those that were held back first."""
        self._resting.clear()
        self._all_rest.clear()
        self._running.set()

    async def wait_until_running(self) -> None:
        """Return when requests are taken."""
        await self._running.wait()

    @property
    def is_paused(self) -> bool:
        return not self._running.is_set()

    def end_conversation(self, conversation: str) -> None:
        self.table.end_conversation(conversation)

    # -- requests

    def _send(self, request_id: str) -> None:
        asked = self._asked[request_id]
        where = self.table.place(request_id, asked.request.prompt_ids, conversation=asked.conversation)
        if where is None:
            self._homeless.append(request_id)
            return
        self._inboxes[where].requests.append(asked.request)
        self._inboxes[where].news.set()

    def _answer(self, output: TokenOutput) -> None:
        asked = self._asked.get(output.request_id)
        if asked is not None and not asked.answer.done():
            was_cut = asked.paused and output.finish_reason == "abort"
            asked.answer.set_result(replace(output, finish_reason="pause") if was_cut else output)

    def _forget(self, request_id: str, *, tell: bool) -> None:
        """A request is over. tell: its replica still works on it and has to know."""
        asked = self._asked.pop(request_id, None)
        if asked is None:
            return
        where = self.table.replica_of(request_id)
        self.table.finish(request_id)
        if asked.conversation == request_id:
            self.table.end_conversation(request_id)
        if where is None:
            self._homeless = [name for name in self._homeless if name != request_id]
        elif tell:
            self._inboxes[where].aborted.append(request_id)
            self._inboxes[where].news.set()

    def _fail(self, error: BaseException) -> None:
        """Nobody can be served any more."""
        self._failure = self._failure or error
        for asked in self._asked.values():
            if not asked.answer.done():
                asked.answer.set_exception(self._failure)
        self._note_rest()

    # -- replicas

    async def _pump(self, replica: int) -> None:
        """Keep one call in flight on a replica as long as there is something to do, and ask now and then whether it is
        there.
        """
        well_at, failures = time.monotonic(), 0
        while self._failure is None:
            if not self._has_work(replica):
                await (self._rest(replica) if self.is_paused else self._news(replica))
                if not self._has_work(replica):
                    if self._ending:
                        return
                    if self.is_paused:
                        continue
            try:
                for output in await self._serve(replica):
                    self._answer(output)
                well_at, failures = time.monotonic(), 0
                await asyncio.sleep(0)  # who got an answer may have the next request
            except (WorkerLost, CallTimeout) as error:
                failures += 1
                if not await self._replace(replica, error, well_at=well_at, failures=failures):
                    return
            except Exception as error:
                self._fail(error)

    def _has_work(self, replica: int) -> bool:
        return self.table.load(replica) > 0 or bool(self._inboxes[replica].aborted)

    async def _rest(self, replica: int) -> None:
        """Ask nothing of a replica until `resume`."""
        self._resting.add(replica)
        self._note_rest()
        await self._running.wait()

    def _note_rest(self) -> None:
        if self._failure is not None or (
            self.is_paused and len(self._resting | self._gone) == self.replicas.num_replicas
        ):
            self._all_rest.set()

    async def _news(self, replica: int) -> None:
        inbox = self._inboxes[replica]
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(inbox.news.wait(), PROBE_S)

    async def _serve(self, replica: int) -> list[TokenOutput]:
        old, self._inboxes[replica] = self._inboxes[replica], _Inbox()
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, self.replicas.serve, replica, old.requests, old.aborted)

    async def _replace(self, replica: int, error: Exception, *, well_at: float, failures: int) -> bool:
        """Route around a replica, ask elsewhere for what was open there, and bring it back.

        False if it cannot be brought back.
        """
        lost = self.table.lose(replica)
        self._inboxes[replica] = _Inbox()
        outage = Outage(replica, f"{type(error).__name__}: {error}", well_at, time.monotonic(), retried=len(lost))
        self.outages.append(outage)
        logger.warning("replica %d is out of the routing, %d requests go elsewhere: %s", replica, len(lost), error)
        for name in lost:
            asked = self._asked[name]
            asked.tries += 1
            if asked.paused:
                self._answer(TokenOutput(name, [], [], "abort", -1))
            elif asked.tries > MOST_TRIES and not asked.answer.done():
                asked.answer.set_exception(error)
            elif not asked.answer.done():
                self._send(name)
        try:
            if failures > MOST_RESPAWNS:
                raise error
            await asyncio.get_running_loop().run_in_executor(self._threads, self.replicas.respawn, replica)
        except NotReplaceable as why:
            return self._give_up(replica, error, why)
        except Exception as reason:
            reason.__cause__ = None if reason is error else error
            return self._give_up(replica, reason, reason)
        outage.back_at = time.monotonic()
        logger.warning("replica %d is back after %.1f s", replica, outage.back_at - outage.out_at)
        self.table.restore(replica)
        homeless, self._homeless = self._homeless, []
        for name in homeless:
            self._send(name)
        return True

    def _give_up(self, replica: int, error: Exception, why: Exception) -> bool:
        """A replica stays out. Without any other all requests end with `error`. Returns False."""
        logger.error("replica %d stays out: %s", replica, why)
        self._gone.add(replica)
        self._note_rest()
        if len(self._gone) == self.replicas.num_replicas:
            self._fail(error)
        return False
