"""Route token requests to rollout replicas, and around replicas that die or stop answering.

    async with ReplicaRouter(GroupReplicas(group, ...)) as router:
        output = await router.generate(request)

Used by agent loops and the OpenAI endpoint, on an event loop in the driver process. This module carries out;
`routing_table.py` decides which replica gets a request, and `replicas.py` calls it.

Each replica has one call in flight. The call hands over new requests and returns the finished ones
(`RequestServer.serve`). A replica is lost when its process is gone or its call exceeds `progress_timeout_s`. The router
then stops routing to it and sends its open requests to other replicas with the same seeds, so the answers are the same.
Meanwhile it restarts the replica, gives it the current weights, and routes to it again. `failure_policy.py` limits how
often a replica is restarted, and how often a request is sent. What a single request raises in a replica is the answer
of that request (`RequestFailed`). An exception of the call itself is a bug that would raise anywhere. It ends all
requests.

Between `pause()` and `resume()` the router makes no calls, so that the processes can load weights or train. Open
requests end with reason "pause" and the tokens generated so far; `continuation.py` continues them.
"""

import asyncio
import contextlib
import logging
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Self

from hybridrl.errors import CallTimeout, HybridRLError, RequestFailed, WorkerLost
from hybridrl.failure_policy import Budgets, Decision, Failure, FailureKind
from hybridrl.serving.replicas import LostDuringRestart, NotReplaceable, ReplicaOutage, Replicas
from hybridrl.serving.routing_table import RoutingTable
from hybridrl.single_controller.monitoring.reports import report_decision
from hybridrl.workers.rollout.requests import Request, TokenOutput

logger = logging.getLogger(__name__)

PROBE_PERIOD_S = 1.0  # between two calls to an idle replica


@dataclass
class _PendingRequest:
    request: Request
    conversation: str
    future: "asyncio.Future[TokenOutput]"
    paused: bool = False


@dataclass
class _ReplicaQueue:
    """Requests and aborts to send with the next call of one replica."""

    requests: list[Request] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
    has_news: asyncio.Event = field(default_factory=asyncio.Event)


class ReplicaRouter:
    """Sends requests to replicas and returns their tokens.

    Use it in one event loop, inside `async with`.

    Args:
        replicas: Where requests are served.
        slack: How many more open requests a replica may have and still be preferred for its cached prompt.
    """

    def __init__(self, replicas: Replicas, *, slack: int = 4):
        self.replicas = replicas
        self.table = RoutingTable(replicas.num_replicas, slack=slack)
        self.outages: list[ReplicaOutage] = []
        self._queues = [_ReplicaQueue() for _ in range(replicas.num_replicas)]
        self._pending: dict[str, _PendingRequest] = {}
        self._budgets = Budgets()  # of each replica since its last answer, and of each open request
        self._unassigned: list[str] = []  # requests that wait for a healthy replica
        self._given_up: set[int] = set()  # replicas that cannot be restarted
        self._away: set[int] = set()  # replicas that take no part now; a `HybridRouter` has some
        self._idle: set[int] = set()  # replicas that get no calls until `resume`
        self._all_idle = asyncio.Event()
        self._failure: BaseException | None = None
        self._closing = False
        self._running = asyncio.Event()

    async def __aenter__(self) -> Self:
        self._threads = ThreadPoolExecutor(self.replicas.num_replicas, thread_name_prefix="router")
        self._running.set()
        taking_part = set(range(self.replicas.num_replicas)) - self._away
        self._pumps = {replica: asyncio.create_task(self._pump(replica)) for replica in taking_part}
        return self

    async def __aexit__(self, *_: object) -> None:
        """Abort open requests, and wait until every replica is restored or given up."""
        self._start_closing()
        await asyncio.gather(*self._pumps.values())
        self._threads.shutdown()

    async def close(self, *, wait: bool = False) -> None:
        """Stop at once, in place of `__aexit__`.

        Args:
            wait: Wait for calls in flight and have healthy replicas drop their open requests, because another router
                will use them. Not needed where their processes end, too.
        """
        self._start_closing()
        for pump in self._pumps.values():
            pump.cancel()
        await asyncio.gather(*self._pumps.values(), return_exceptions=True)
        await asyncio.to_thread(self._threads.shutdown, wait=wait, cancel_futures=True)
        if wait:
            await asyncio.to_thread(self._abort_open)

    def _abort_open(self) -> None:
        for replica, queue in enumerate(self._queues):
            if queue.aborted and replica not in self._given_up:
                with contextlib.suppress(HybridRLError):  # a replica that fails here will be replaced anyway
                    self.replicas.serve(replica, [], queue.aborted)

    def _start_closing(self) -> None:
        self._closing = True
        for pending in list(self._pending.values()):
            pending.future.cancel()
            self._remove(pending.request.request_id, abort=True)
        self._running.set()
        for queue in self._queues:
            queue.has_news.set()

    async def generate(self, request: Request, *, conversation: str | None = None) -> TokenOutput:
        """Return the tokens that the policy generates for this request.

        While the router is paused, a new request waits. One that was already open ends with reason "pause" and the
        tokens generated so far.

        Args:
            request: What to generate; its id must not be open already.
            conversation: Requests of one conversation go to the same replica while it is healthy; default: the
                request's id.

        Raises:
            RequestFailed: A replica cannot serve this request. Any other error has ended all requests.
        """
        await self._running.wait()
        if self._failure is not None:
            raise self._failure
        if self._closing:
            raise asyncio.CancelledError(f"request {request.request_id!r}: the router is closed")
        if request.request_id in self._pending:
            raise ValueError(f"request {request.request_id!r} is open already; ids must differ")
        future = asyncio.get_running_loop().create_future()
        self._pending[request.request_id] = _PendingRequest(request, conversation or request.request_id, future)
        self._assign(request.request_id)
        try:
            return await future
        finally:
            self._remove(request.request_id, abort=future.cancelled())

    def abort(self, request_id: str) -> None:
        """End a request: its caller gets the tokens generated so far, with reason "abort".

        Does nothing for a request that is not open.
        """
        pending = self._pending.get(request_id)
        if pending is None:
            return
        where = self.table.replica_of(request_id)
        if where is None:
            self._unassigned.remove(request_id)
            self._resolve(TokenOutput(request_id, [], [], "abort", -1))
            return
        self._queues[where].aborted.append(request_id)
        self._queues[where].has_news.set()

    async def pause(self) -> None:
        """End all open requests with the tokens generated so far, and hold back new ones.

        Returns when no call is in flight and no replica is being restarted. This takes one slice of a replica's work,
        or until a lost replica is restored. Raises the error that ended all requests, if there was one.
        """
        self._running.clear()
        for name, pending in list(self._pending.items()):
            pending.paused = True
            self.abort(name)
        for queue in self._queues:
            queue.has_news.set()
        self._update_all_idle()
        await self._all_idle.wait()
        if self._failure is not None:
            raise self._failure

    def resume(self) -> None:
        """Send requests again, starting with those that were held back."""
        self._idle.clear()
        self._all_idle.clear()
        self._running.set()

    @property
    def failure(self) -> BaseException | None:
        """Return what ended all requests, now and later; None while there is nothing."""
        return self._failure

    async def wait_until_running(self) -> None:
        """Return when the router is not paused."""
        await self._running.wait()

    @property
    def is_paused(self) -> bool:
        return not self._running.is_set()

    def end_conversation(self, conversation: str) -> None:
        self.table.end_conversation(conversation)

    # -- requests

    def _assign(self, request_id: str) -> None:
        pending = self._pending[request_id]
        where = self.table.assign(request_id, pending.request.prompt_ids, conversation=pending.conversation)
        if where is None:
            self._unassigned.append(request_id)
            return
        self._queues[where].requests.append(pending.request)
        self._queues[where].has_news.set()

    def _resolve(self, output: TokenOutput) -> None:
        pending = self._pending.get(output.request_id)
        if pending is None or pending.future.done():
            return
        if output.finish_reason == "error":
            why = f"request {output.request_id} cannot be served: {output.error}"
            pending.future.set_exception(RequestFailed(why))
        else:
            was_cut = pending.paused and output.finish_reason == "abort"
            pending.future.set_result(replace(output, finish_reason="pause") if was_cut else output)

    def _remove(self, request_id: str, *, abort: bool) -> None:
        """Drop a finished request. abort: also have its replica stop working on it."""
        pending = self._pending.pop(request_id, None)
        if pending is None:
            return
        self._budgets.reset(FailureKind.REQUEST_LOST, request_id)
        where = self.table.replica_of(request_id)
        self.table.finish(request_id)
        if pending.conversation == request_id:
            self.table.end_conversation(request_id)
        if where is None:
            self._unassigned = [name for name in self._unassigned if name != request_id]
        elif abort:
            self._queues[where].aborted.append(request_id)
            self._queues[where].has_news.set()

    def _fail_all(self, error: BaseException) -> None:
        """End all requests, now and later, with this error."""
        self._failure = self._failure or error
        for pending in self._pending.values():
            if not pending.future.done():
                pending.future.set_exception(self._failure)
        self._update_all_idle()

    # -- replicas

    async def _pump(self, replica: int) -> None:
        """Keep one call in flight while a replica has work.

        An idle replica is probed every `PROBE_PERIOD_S` seconds.
        """
        last_ok_at = time.monotonic()
        while self._failure is None:
            if not self._has_work(replica):
                await self._wait_for_news(replica)
                if not self._has_work(replica):
                    if self._closing or replica in self._away:
                        return
                    if self.is_paused:
                        continue
            try:
                for output in await self._serve(replica):
                    self._resolve(output)
                last_ok_at = time.monotonic()
                self._budgets.reset(FailureKind.REPLICA_LOST, str(replica))
                await asyncio.sleep(0)  # let callers submit their next requests before the next call
            except (WorkerLost, CallTimeout) as error:
                if not await self._replace(replica, error, last_ok_at=last_ok_at):
                    return
            except Exception as error:
                self._fail_all(error)

    def _has_work(self, replica: int) -> bool:
        return self.table.load(replica) > 0 or bool(self._queues[replica].aborted)

    async def _wait_for_news(self, replica: int) -> None:
        if replica not in self._away:
            await (self._wait_for_resume(replica) if self.is_paused else self._wait_for_work(replica))

    async def _wait_for_resume(self, replica: int) -> None:
        """Make no calls to a replica until `resume`."""
        self._idle.add(replica)
        self._update_all_idle()
        await self._running.wait()

    def _update_all_idle(self) -> None:
        if self._failure is not None or (
            self.is_paused and len(self._idle | self._given_up | self._away) == self.replicas.num_replicas
        ):
            self._all_idle.set()

    async def _wait_for_work(self, replica: int) -> None:
        queue = self._queues[replica]
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(queue.has_news.wait(), PROBE_PERIOD_S)

    async def _serve(self, replica: int) -> list[TokenOutput]:
        old, self._queues[replica] = self._queues[replica], _ReplicaQueue()
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, self.replicas.serve, replica, old.requests, old.aborted)

    async def _replace(self, replica: int, error: Exception, *, last_ok_at: float) -> bool:
        """Stop routing to a replica, send its requests elsewhere, and restart it.

        Returns:
            False if the replica cannot be restarted.
        """
        lost = self.table.mark_lost(replica)
        self._queues[replica] = _ReplicaQueue()
        outage = ReplicaOutage(
            replica, f"{type(error).__name__}: {error}", last_ok_at, time.monotonic(), num_retried=len(lost)
        )
        self.outages.append(outage)
        decision = self._decide_about_replica(
            replica, f"was lost ({error}); its {len(lost)} open requests go to other replicas"
        )
        for name in lost:
            self._send_again(name, replica, error)
        if not await self._restart(replica, error, decision):
            return False
        outage.restored_at = time.monotonic()
        logger.warning(
            "replica %d was restarted and gets requests again after %.1f s",
            replica,
            outage.restored_at - outage.lost_at,
        )
        self.table.mark_healthy(replica)
        unassigned, self._unassigned = self._unassigned, []
        for name in unassigned:
            self._assign(name)
        return True

    async def _restart(self, replica: int, error: Exception, decision: Decision | None) -> bool:
        """Restart a replica as often as its budget allows; give it up and return False if that fails."""
        while True:
            try:
                if decision is not None and not decision.is_granted:
                    raise error
                await asyncio.get_running_loop().run_in_executor(self._threads, self.replicas.respawn, replica)
                return True
            except LostDuringRestart as lost:
                error = lost.cause
                decision = self._decide_about_replica(replica, f"was lost during its restart ({error})")
            except NotReplaceable as why:
                return self._give_up(replica, error, why)
            except Exception as reason:
                reason.__cause__ = None if reason is error else error
                return self._give_up(replica, reason, reason)

    def _decide_about_replica(self, replica: int, happened: str) -> Decision | None:
        """Log and return what follows the loss of a replica; None if the router cannot restart it."""
        what = f"replica {replica} {happened}"
        if not self.replicas.can_respawn:
            logger.warning("%s", what)
            return None
        subject = str(replica)
        decision = self._budgets.spend(
            Failure(FailureKind.REPLICA_LOST, what, subject=subject, target=f"replica {replica}")
        )
        report_decision(decision)
        logger.warning("%s", decision)
        return decision

    def _send_again(self, request_id: str, replica: int, error: Exception) -> None:
        """Assign a lost request to another replica, or end it if it was lost too often."""
        pending = self._pending[request_id]
        if pending.paused:
            self._resolve(TokenOutput(request_id, [], [], "abort", -1))
            return
        if pending.future.done():
            return
        what = f"request {request_id} was lost with replica {replica}"
        decision = self._budgets.spend(
            Failure(FailureKind.REQUEST_LOST, what, subject=request_id, target="the request")
        )
        if decision.is_granted:
            self._assign(request_id)
            return
        report_decision(decision)
        logger.warning("%s", decision)
        pending.future.set_exception(error)

    def _give_up(self, replica: int, error: Exception, why: Exception) -> bool:
        """Exclude a replica for good; if it was the last one, end all requests with `error`. Returns False."""
        logger.error("replica %d was not restarted and gets no more requests: %s", replica, why)
        self._given_up.add(replica)
        self._update_all_idle()
        if len(self._given_up | self._away) == self.replicas.num_replicas:
            self._fail_all(error)
        return False
