"""Route token requests to rollout replicas, and around replicas that die or stop answering.

    async with ReplicaRouter(GroupReplicas(group, ...)) as router:
        output = await router.generate(request)

Used by agent loops and the OpenAI endpoint, on an event loop in the driver process. This module carries out;
`routing_table.py` has the state of each replica and decides which one gets a request, `replicas.py` calls it.

Each serving replica has a task, its pump, with one call in flight. The call hands over new requests and returns the
finished ones (`RequestEngine.serve`). A replica is lost when its process is gone or its call exceeds
`progress_timeout_s`. The router sends its open requests to other replicas with the same seeds, so the answers are the
same, restarts it with the current weights, and routes to it again. `failure_policy.py` limits how often. What a single
request raises in a replica is the answer of that request (`RequestFailed`). An exception of the call itself is a bug
that would raise anywhere. It ends all requests.

Between `pause()` and `resume()` the router makes no calls, so that the processes can load weights or train. Open
requests end with reason "pause" and the tokens generated so far, and their callers continue them.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Self

from hybridrl.errors import CallTimeout, HybridRLError, RequestFailed, WorkerLost
from hybridrl.failure_policy import Budgets, Failure, FailureKind
from hybridrl.serving.replicas import LostDuringRestart, NotReplaceable, ReplicaOutage, Replicas
from hybridrl.serving.routing_table import ReplicaState, RoutingTable
from hybridrl.single_controller.monitoring.process import report_decision
from hybridrl.workers.rollout.requests import Request, TokenOutput

logger = logging.getLogger(__name__)

PROBE_PERIOD_S = 1.0  # between two calls to an idle replica


@dataclass
class _PendingRequest:
    request: Request
    conversation: str
    future: "asyncio.Future[TokenOutput]"
    is_interrupted: bool = False  # it ends now, and its caller continues it


@dataclass
class _ReplicaQueue:
    """Requests and aborts to send with the next call of one replica."""

    requests: list[Request] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
    has_news: asyncio.Event = field(default_factory=asyncio.Event)

    def abort(self, request_id: str) -> None:
        self.aborted.append(request_id)
        self.has_news.set()


class ReplicaRouter:
    """Sends requests to replicas and returns their tokens.

    Use it in one event loop. `async with` resumes it, and closes it at the end. Without, it is paused at first.

    Args:
        replicas: Where requests are served.

    Attributes:
        table: The state of each replica, and where requests are open.
        failure: What ended all requests, now and later; None while there is nothing.
        outages: Losses of replicas so far.
    """

    def __init__(self, replicas: Replicas):
        self.replicas = replicas
        self.table = RoutingTable(replicas.num_replicas)
        self.failure: BaseException | None = None
        self.outages: list[ReplicaOutage] = []
        self._queues = [_ReplicaQueue() for _ in range(replicas.num_replicas)]
        self._pending: dict[str, _PendingRequest] = {}  # open on a replica in the table, or waiting for one
        self._budgets = Budgets()  # of each replica since its last answer, and of each open request
        self._pumps: dict[int, asyncio.Task[None]] = {}
        self._threads = ThreadPoolExecutor(replicas.num_replicas, thread_name_prefix="router")
        self._resumed = asyncio.Event()
        self._closing = False

    async def __aenter__(self) -> Self:
        self.resume()
        return self

    async def __aexit__(self, *_: object) -> None:
        """Abort open requests, and wait until every replica is restored or given up."""
        self._start_closing()
        await self._stop(self._pumps)
        self._threads.shutdown()

    async def close(self, *, wait: bool = False) -> None:
        """Stop at once, in place of `__aexit__`.

        Args:
            wait: Wait for calls in flight and have replicas drop their open requests, because another router will use
                them. Not needed where their processes end, too.
        """
        self._start_closing()
        for pump in self._pumps.values():
            pump.cancel()
        await asyncio.gather(*self._pumps.values(), return_exceptions=True)
        await asyncio.to_thread(self._threads.shutdown, wait=wait, cancel_futures=True)
        if wait:
            for replica, queue in enumerate(self._queues):
                if queue.aborted and self.table.states[replica] is not ReplicaState.GIVEN_UP:
                    with contextlib.suppress(HybridRLError):  # a replica that fails here will be replaced anyway
                        await asyncio.to_thread(self.replicas.serve, replica, [], queue.aborted)

    def _start_closing(self) -> None:
        self._closing = True
        for name, pending in list(self._pending.items()):
            pending.future.cancel()
            self._remove(name, abort=True)
        self._stop_routing(self.table.serving)
        self._resumed.set()  # who waits for it finds the router closed

    async def generate(self, request: Request, *, conversation: str | None = None) -> TokenOutput:
        """Return the tokens that the policy generates for this request.

        While the router is paused, a new request waits. One that was already open ends with reason "pause" and the
        tokens generated so far; so does one that moves to another replica.

        Args:
            request: What to generate; its id must not be open already.
            conversation: Its requests go to the same replica while that serves; default: the request's id.

        Raises:
            RequestFailed: A replica cannot serve this request. Any other error has ended all requests.
        """
        if self.failure is not None:
            raise self.failure
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
        if (where := self.table.replica_of(request_id)) is None:
            self._resolve(TokenOutput(request_id, [], [], "abort", -1))
        else:
            self._queues[where].abort(request_id)

    def _interrupt(self, request_id: str) -> None:
        """End a request with reason "pause" and the tokens so far; its caller continues it."""
        self._pending[request_id].is_interrupted = True
        self.abort(request_id)

    # -- states of replicas

    async def pause(self) -> None:
        """End all open requests with the tokens generated so far, and hold back new ones.

        Returns when no call is in flight and no replica is being restarted. This takes one slice of a replica's work,
        or until a lost replica is restored. Raises the error that ended all requests, if there was one.
        """
        self._resumed.clear()
        for name in list(self._pending):
            self._interrupt(name)
        await self._stop(self._pumps)
        if self.failure is not None:
            raise self.failure

    def resume(self) -> None:
        """Send requests again, starting with those that were held back."""
        self._resumed.set()
        for replica in self.table.in_state(ReplicaState.STOPPING):  # `pause` was cancelled
            self.table.move(replica, ReplicaState.SERVING)
        self._start(self.table.in_state(ReplicaState.IDLE))

    def _start(self, replicas: Iterable[int]) -> None:
        """Route to idle replicas, unless the router is paused or closed, or has failed."""
        if self.is_paused or self._closing or self.failure is not None:
            return
        for replica in replicas:
            self.table.move(replica, ReplicaState.SERVING)
            self._pumps[replica] = asyncio.create_task(self._pump(replica))
            self._pumps[replica].add_done_callback(self._end_pump)
        for name, pending in self._pending.items():
            if self.table.replica_of(name) is None and not pending.future.done():
                self._assign(name)

    def _stop_routing(self, replicas: Iterable[int]) -> None:
        for replica in self.table.serving & {*replicas}:
            self.table.move(replica, ReplicaState.STOPPING)
            self._queues[replica].has_news.set()

    async def _stop(self, replicas: Iterable[int]) -> None:
        """Route no more to these replicas; return when they have no call in flight, and none is being restarted."""
        self._stop_routing(replicas)
        if pumps := [self._pumps[replica] for replica in replicas if replica in self._pumps]:
            await asyncio.wait(pumps)

    @property
    def is_paused(self) -> bool:
        """Whether no calls are made until `resume`. Nothing else holds this state."""
        return not self._resumed.is_set()

    async def wait_until_running(self) -> None:
        """Return when the router is not paused."""
        await self._resumed.wait()

    # -- requests

    def _assign(self, request_id: str) -> None:
        pending = self._pending[request_id]
        where = self.table.assign(request_id, pending.request.prompt_ids, conversation=pending.conversation)
        if where is not None:
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
            was_cut = pending.is_interrupted and output.finish_reason == "abort"
            pending.future.set_result(replace(output, finish_reason="pause") if was_cut else output)

    def _remove(self, request_id: str, *, abort: bool) -> None:
        """Drop a finished request. abort: also have its replica stop working on it."""
        if (pending := self._pending.pop(request_id, None)) is None:
            return
        self._budgets.reset(FailureKind.REQUEST_LOST, request_id)
        where = self.table.replica_of(request_id)
        self.table.finish(request_id)
        if pending.conversation == request_id:
            self.table.end_conversation(request_id)
        if where is not None and abort:
            self._queues[where].abort(request_id)

    def fail(self, error: BaseException) -> None:
        """End all requests, now and later, with this error. Replicas get no more calls."""
        self.failure = self.failure or error
        for pending in self._pending.values():
            if not pending.future.done():
                pending.future.set_exception(self.failure)
        self._stop_routing(self.table.serving)
        for pump in self._pumps.values():
            if pump is not asyncio.current_task():
                pump.cancel()

    # -- calls to replicas

    async def _pump(self, replica: int) -> None:
        """Make one call after another to a serving replica, until it shall stop or was lost.

        Consumes: The requests and aborts in the replica's queue.
        Waits for: The call in flight. Without work, for news, but not longer than `PROBE_PERIOD_S` seconds: the next
            call then finds out whether the replica is alive.
        Unblocked by: The call's answer or deadline; `generate`, `abort` and `_stop`, which tell the news.
        """
        try:
            while self._has_work(replica) or self.table.states[replica] is ReplicaState.SERVING:
                if not self._has_work(replica):
                    with contextlib.suppress(TimeoutError):
                        await asyncio.wait_for(self._queues[replica].has_news.wait(), PROBE_PERIOD_S)
                    if self.table.states[replica] is not ReplicaState.SERVING:
                        continue
                for output in await self._serve(replica):
                    self._resolve(output)
                self._budgets.reset(FailureKind.REPLICA_LOST, str(replica))
                await asyncio.sleep(0)  # let callers submit their next requests before the next call
            self.table.move(replica, ReplicaState.IDLE)
        except (WorkerLost, CallTimeout) as error:
            await self._replace(replica, error)

    def _end_pump(self, pump: "asyncio.Task[None]") -> None:
        if not pump.cancelled() and (error := pump.exception()) is not None:
            self.fail(error)  # a bug, which would be raised by every replica

    def _has_work(self, replica: int) -> bool:
        return self.table.load(replica) > 0 or bool(self._queues[replica].aborted)

    async def _serve(self, replica: int) -> list[TokenOutput]:
        old, self._queues[replica] = self._queues[replica], _ReplicaQueue()
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, self.replicas.serve, replica, old.requests, old.aborted)

    async def _replace(self, replica: int, error: Exception) -> None:
        """Send a lost replica's requests elsewhere, and restart it or give it up."""
        lost = self.table.lose(replica)
        self._queues[replica] = _ReplicaQueue()
        outage = ReplicaOutage(replica, f"{type(error).__name__}: {error}", time.monotonic(), num_retried=len(lost))
        self.outages.append(outage)
        for name in lost:
            self._send_again(name, replica, error)
        try:
            await self._restart(
                replica, error, f"was lost ({error}); its {len(lost)} open requests go to other replicas"
            )
        except Exception as why:
            self._give_up(replica, error if isinstance(why, NotReplaceable) else why, why)
            return
        outage.restored_at = time.monotonic()
        lasted_s = outage.restored_at - outage.lost_at
        logger.warning("replica %d was restarted and gets requests again after %.1f s", replica, lasted_s)
        self.table.move(replica, ReplicaState.IDLE)
        self._start([replica])

    async def _restart(self, replica: int, error: Exception, happened: str) -> None:
        """Restart a replica as often as its budget allows. Raises what ended the attempts."""
        while self._may_restart(replica, f"replica {replica} {happened}"):
            try:
                await asyncio.get_running_loop().run_in_executor(self._threads, self.replicas.respawn, replica)
                return
            except LostDuringRestart as lost:
                error, happened = lost.cause, f"was lost during its restart ({lost.cause})"
        raise error

    def _may_restart(self, replica: int, what: str) -> bool:
        """Log what happened to a replica, and return whether to try a restart."""
        if not self.replicas.can_respawn:
            logger.warning("%s", what)
            return True  # `respawn` says who restarts it instead
        failure = Failure(FailureKind.REPLICA_LOST, what, subject=str(replica), target=f"replica {replica}")
        decision = self._budgets.spend(failure)
        report_decision(decision)
        logger.warning("%s", decision)
        return decision.is_granted

    def _send_again(self, request_id: str, replica: int, error: Exception) -> None:
        """Assign a lost request to another replica, or end it if it was lost too often."""
        pending = self._pending[request_id]
        if pending.is_interrupted:
            self.abort(request_id)
        if pending.future.done():
            return
        what = f"request {request_id} was lost with replica {replica}"
        failure = Failure(FailureKind.REQUEST_LOST, what, subject=request_id, target="the request")
        decision = self._budgets.spend(failure)
        if decision.is_granted:
            self._assign(request_id)
        else:
            report_decision(decision)
            logger.warning("%s", decision)
            pending.future.set_exception(error)

    def _give_up(self, replica: int, error: Exception, why: Exception) -> None:
        """Exclude a replica for good; if it was the last one, end all requests with `error`."""
        logger.error("replica %d was not restarted and gets no more requests: %s", replica, why)
        self.table.move(replica, ReplicaState.GIVEN_UP)
        if len(self.table.in_state(ReplicaState.GIVEN_UP)) == self.replicas.num_replicas:
            self.fail(error)
