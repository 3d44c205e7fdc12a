"""Wait for the results of remote calls: in completion order, with a deadline, and with the address of a failure.

Called by worker groups, futures and the job supervisor, in the driver or in a worker. Functions that use Ray import it
themselves, here and in the neighbouring modules, so that a run in one process (`trainer.backend=local`) needs no Ray.
"""

import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hybridrl.errors import CallTimeout, CheckpointError, ConnectionLost, ObjectLost, WorkerLost
from hybridrl.single_controller.call_cycles import waiting_for
from hybridrl.single_controller.invocation import DEFAULT_TIMEOUT_S
from hybridrl.single_controller.monitoring.process import PROCESS, await_report, lost_reason, report_call_timeout
from hybridrl.single_controller.monitoring.tracing import wait_span

if TYPE_CHECKING:
    from ray.exceptions import OutOfMemoryError, RayActorError, RayTaskError, WorkerCrashedError

# When a worker dies in a collective, its peers fail too, often before Ray reports the death (15-25 ms after it). An
# error of one rank is held back this long, to see whether a death caused it. The value is generous: a busy machine
# detects deaths late, and a consequence that is taken for a user's error ends the run.
FOLLOW_UP_S = 2.0
# Each poll waits this long for all results, doubling up to the maximum. Short calls end in the first poll, and a death
# is reported at most MAX_POLL_S late.
FIRST_POLL_S, MAX_POLL_S = 0.01, 0.1

# Phrases in Ray's error texts.
RAY_OUT_OF_MEMORY = re.compile(r"killed due to the node running low on memory.*?was (\S+ used / \S+) limit", re.DOTALL)
RAY_CONNECTION_ENDED = "connection error code 2"  # all that Ray observes of a killed process
RAY_NODE_DIED = "node has died"
RAY_UNAVAILABLE = "is temporarily unavailable"  # the cause is not known to Ray yet
# Texts of torch.distributed: gloo's transport names its file, NCCL the reason. The type is RuntimeError or a subclass.
# A failed check of gloo, such as for an unknown GLOO_SOCKET_IFNAME, is the user's to correct.
BROKEN_CONNECTION = re.compile(
    r"\[(?!enforce fail)[^\]]*/gloo/transport/\w+/[^\]]*\] *(?P<gloo>.*?)(\. |$)"
    r"|remote process exited or there was a network error"
)
# Of a collective in which a peer was not there in time: gloo's, NCCL's watchdog, the store in which ranks meet.
LATE_PEER = re.compile(
    r"/gloo/[^\]]*\] *Timed out waiting \d+ms|Watchdog caught collective operation timeout|"
    r"wait timeout after \d+ms, keys: |Timed out after \d+ seconds waiting for clients"
)
CALLED_FROM = "\n\nThis method was called from:\n\n"  # between the remote tracebacks of two workers
OBJECT_LOST_HINT = (
    "an argument or a result was in the memory of a node that is gone; "
    "restart the run, it resumes from its newest checkpoint"
)
OWNER_LOST_HINT = (
    "the process is lost that held an argument or a result, such as the snapshot store; "
    "restart the run, it resumes from its newest checkpoint"
)
TIMEOUT_HINT = (
    "; if it is slow and not stuck, raise its limit: trainer.call_timeout_s in main_ppo and main_sft, elsewhere the "
    "timeout_s that the method is registered with"
)


@dataclass(frozen=True)
class ShardFetcher:
    """Fetch the results of one call from their references; picklable, as part of a `DataProtoFuture`.

    Attributes:
        rank_of: reference (hex) -> rank.
        addresses: role and rank of actors, see `ProcessState`.
    """

    role: str
    method: str
    rank_of: Mapping[str, int]
    addresses: Mapping[str, tuple[str, int]]
    timeout_s: float | None = DEFAULT_TIMEOUT_S

    def __call__(self, references: Sequence[Any]) -> list[Any]:
        PROCESS.register_actors(self.addresses)
        ranks = [self.rank_of.get(reference.hex(), i) for i, reference in enumerate(references)]
        return wait_all(
            references, ranks, role=self.role, method=self.method, timeout_s=self.timeout_s, hint=TIMEOUT_HINT
        )


def wait_all(
    references: Sequence[Any],
    ranks: Sequence[int] | None = None,
    *,
    role: str,
    method: str,
    timeout_s: float | None,
    hint: str = "",
) -> list[Any]:
    """Return the values behind the references, in their order.

    The first failure is raised at once, while other ranks may still be running.

    Consumes: the results of one call.
    Waits for: the workers that compute them, at most `timeout_s`.
    Unblocked by: the last result, the first error, or a loss that the master or Ray reports.

    Args:
        ranks: rank behind each reference; default 0, 1, 2, ...
        timeout_s: seconds for the whole call; None waits without limit.
        hint: appended to the text of `CallTimeout`.

    Raises:
        WorkerLost: a worker process died; names role, rank and method.
        ConnectionLost: a WorkerLost whose process lives, but was disconnected in a collective call.
        CallTimeout: past `timeout_s`, or a collective timed out; names the ranks without a result.
        CallCycle: the call waits for the call that waits here.
        Exception: raised in a worker, with its own type.
    """
    import ray

    rank_of = dict(zip(references, ranks or range(len(references)), strict=True))
    reader = _ResultReader(role, method, None if timeout_s is None else time.monotonic() + timeout_s, rank_of)
    values: dict[Any, Any] = {}
    pending = list(rank_of)
    with wait_span(role, method), waiting_for(references, role=role, method=method) as wait:
        poll_s = FIRST_POLL_S
        while pending:
            # Returns early only when all are ready; otherwise reads the ready ones after `poll_s`, because a failure
            # must not wait for ranks that are still running.
            left = reader.seconds_left()
            wait_s = poll_s if left is None else min(poll_s, left)
            done, pending = ray.wait(pending, num_returns=len(pending), timeout=wait_s, fetch_local=False)
            values |= reader.values(done) if done else {}
            for reference in pending:
                if reason := lost_reason(reference):
                    raise WorkerLost(*reader.address(reference), method, reason)
            if pending and left is not None and left <= poll_s:
                silent = sorted({reader.address(reference) for reference in pending})
                raise call_timeout(role, silent, method, timeout_s or 0.0, hint)
            wait.raise_if_cycle(pending)
            poll_s = min(2 * poll_s, MAX_POLL_S)
    return [values[reference] for reference in references]


def call_timeout(role: str, silent: Sequence[tuple[str, int]], method: str, timeout_s: float, hint: str) -> CallTimeout:
    """Report to the master that these workers have not answered in time, and return the error.

    Args:
        role: Of the call.
        silent: Role and rank of each worker; other roles if the call also waits for theirs, as a push of weights does.
        method: Of the call.
        timeout_s: Its deadline.
        hint: See `wait_all`.
    """
    others = sorted({its_role for its_role, _ in silent} - {role})
    names = [
        f"{'rank' if one == role else one} {', '.join(str(r) for its_role, r in silent if its_role == one)}"
        for one in (role, *others)
        if one in dict(silent)
    ]
    text = f"{role}.{method}() did not answer within {timeout_s:g} s; still waiting for {' and '.join(names)}"
    return _with_silent(CallTimeout(text + hint), role, silent, method, evidence=text)


def _with_silent(
    error: CallTimeout, role: str, silent: Sequence[tuple[str, int]], method: str, *, evidence: str
) -> CallTimeout:
    """Return the error with the workers that have not answered, after a report to the master."""
    ranks: dict[str, list[int]] = {}
    for its_role, rank in silent:
        ranks.setdefault(its_role, []).append(rank)
    report_call_timeout(f"{role}.{method}", ranks, evidence)
    error.role, error.method, error.ranks, error.others = role, method, tuple(ranks.pop(role, ())), ranks
    return error


@dataclass
class _ResultReader:
    """Reads ready results of one call and translates Ray's errors."""

    role: str
    method: str
    deadline: float | None
    rank_of: Mapping[Any, int]

    def address(self, reference: Any) -> tuple[str, int]:
        """Return role and rank of the worker that computes a reference, which may be of another group."""
        return _address(reference.task_id().actor_id().hex(), self.role, self.rank_of[reference])

    def seconds_left(self) -> float | None:
        return None if self.deadline is None else max(0.0, self.deadline - time.monotonic())

    def fetch_timeout_s(self) -> float | None:
        # A result that became ready at the last moment still gets a second to arrive.
        return None if self.deadline is None else max(1.0, self.deadline - time.monotonic())

    def values(self, done: list[Any]) -> dict[Any, Any]:
        """Return the values of ready results, by reference; raise the first failure among them."""
        import ray

        try:
            return dict(zip(done, ray.get(done, timeout=self.fetch_timeout_s()), strict=True))
        except Exception:  # of one of them: read one by one to find which
            return {reference: self._value_or_worker_lost(reference) for reference in done}

    def _value_or_worker_lost(self, reference: Any) -> Any:
        from ray.exceptions import OwnerDiedError

        try:
            return self.value(reference)
        except WorkerLost:
            raise
        except Exception as error:
            self.raise_if_worker_lost([other for other in self.rank_of if other != reference], error)
            if isinstance(error, CallTimeout) and not error.role and hasattr(error, "remote_traceback"):
                raise self._with_waiting(error, reference) from error.__cause__
            if is_late_peer(error):
                raise self._with_late_peer(error, reference) from error
            if isinstance(error, OwnerDiedError):
                raise ObjectLost(f"{self.role}-{self.rank_of[reference]}, {self.method}(): {OWNER_LOST_HINT}") from None
            if cause := broken_connection(error):
                raise ConnectionLost(self.role, self.rank_of[reference], self.method, cause) from error
            raise

    def _with_waiting(self, error: CallTimeout, reference: Any) -> CallTimeout:
        """Return the error of a wait inside a worker, for a peer, with all workers that have not answered."""
        import ray

        _, pending = ray.wait(list(self.rank_of), num_returns=len(self.rank_of), timeout=0, fetch_local=False)
        silent = sorted({self.address(one) for one in (reference, *pending)})
        return _with_silent(error, self.role, silent, self.method, evidence=str(error))

    def _with_late_peer(self, error: Exception, reference: Any) -> CallTimeout:
        """Return the timeout of a call in which a rank has waited too long for another one in a collective.

        It names the workers that have not answered: one of them is not where its peers are. If all have, each waited.
        """
        import ray

        _, pending = ray.wait(list(self.rank_of), num_returns=len(self.rank_of), timeout=0, fetch_local=False)
        silent = sorted({self.address(one) for one in pending or self.rank_of})
        found = LATE_PEER.search(str(error))
        reason = found[0].rpartition("] ")[2] if found else str(error)
        names = ", ".join(f"{role}-{rank}" for role, rank in silent)
        text = (
            f"{self.role}.{self.method}(): rank {self.rank_of[reference]} waited for a peer in a collective until its "
            f"timeout ({reason}); {'without an answer' if pending else 'all waited'}: {names}"
        )
        return _with_silent(CallTimeout(text + TIMEOUT_HINT), self.role, silent, self.method, evidence=text)

    def value(self, reference: Any) -> Any:
        """Return the value of a ready result, or raise its error as the caller should see it."""
        import ray
        from ray.exceptions import (
            GetTimeoutError,
            ObjectLostError,
            OutOfMemoryError,
            OwnerDiedError,
            RayActorError,
            RayTaskError,
            WorkerCrashedError,
        )

        rank = self.rank_of[reference]
        try:
            return ray.get(reference, timeout=self.fetch_timeout_s())
        except (OutOfMemoryError, RayActorError, WorkerCrashedError) as error:
            raise _worker_lost(error, self.role, rank, self.method) from None
        except (ObjectLostError, RayTaskError) as error:
            lost = error if isinstance(error, ObjectLostError) else error.cause
            # OwnerDiedError means that a process died, not that a node lost its objects.
            if isinstance(lost, ObjectLostError) and not isinstance(lost, OwnerDiedError):
                raise ObjectLost(f"{self.role}-{rank}, {self.method}(): {OBJECT_LOST_HINT}") from None
            raise (unwrap_ray_error(error) if isinstance(error, RayTaskError) else error) from None
        except GetTimeoutError:
            raise CallTimeout(
                f"{self.role}.{self.method}(): the result of rank {rank} is ready but did not arrive in time; "
                "check the network connection to its node"
            ) from None

    def raise_if_worker_lost(self, others: list[Any], error: Exception) -> None:
        """Raise WorkerLost, caused by `error`, if another worker dies within FOLLOW_UP_S."""
        import ray

        until = time.monotonic() + FOLLOW_UP_S
        while others and (left := until - time.monotonic()) > 0:
            done, others = ray.wait(others, num_returns=1, timeout=left, fetch_local=False)
            for reference in done:
                try:
                    self.value(reference)
                except WorkerLost as lost:
                    raise lost from error
                except Exception:  # another consequence or another user error: the first one is reported
                    continue


def broken_connection(error: BaseException) -> str:
    """Return what a collective call says about a connection that has ended; "" for any other error."""
    if not isinstance(error, RuntimeError) or (found := BROKEN_CONNECTION.search(str(error))) is None:
        return ""
    if is_late_peer(error):
        return ""
    return f"a connection of its process group has ended ({found['gloo'] or found[0]})"


def is_late_peer(error: BaseException) -> bool:
    """Return whether a collective has timed out, in which the rank waited for a peer.

    The peer may be stuck, slow, or in another collective.
    """
    return isinstance(error, (RuntimeError, CheckpointError)) and LATE_PEER.search(str(error)) is not None


def unwrap_ray_error(error: "RayTaskError") -> BaseException:
    """Return the worker's own exception, with the remote tracebacks as `remote_traceback`.

    An exception that passed through several workers has the traceback of each, the one that raised it first.
    """
    cause = error.cause if isinstance(error.cause, BaseException) else error
    inner = getattr(cause, "remote_traceback", "")
    cause.remote_traceback = f"{inner}{CALLED_FROM}{error}" if inner else str(error)  # type: ignore[attr-defined]
    return cause


def _worker_lost(
    error: "OutOfMemoryError | RayActorError | WorkerCrashedError", role: str, rank: int, method: str
) -> WorkerLost:
    # Names the process that died. A healthy worker's call fails too when its argument is a dead worker's result.
    actor_id = getattr(error, "actor_id", None) or ""
    role, rank = _address(actor_id, role, rank)
    return WorkerLost(role, rank, method, await_report(actor_id) or describe_exit_report(str(error)))


def _address(actor_id: str, role: str, rank: int) -> tuple[str, int]:
    """Return roles (joined by "+") and rank of an actor by its id (hex): the given ones if they are its or unknown."""
    known_role, known_rank = PROCESS.addresses.get(actor_id, (role, rank))
    return (role, rank) if known_rank == rank and role in known_role.split("+") else (known_role, known_rank)


def describe_exit_report(report: str) -> str:
    """Return why a worker is dead, from the text of Ray's error."""
    where = " on ".join(
        found[1] for name in ("pid", "ip") if (found := re.search(rf"^\s*{name}: (\S+)", report, re.MULTILINE))
    )
    if RAY_NODE_DIED in report:
        return f"its node is gone ({where})" if where else "its node is gone"
    if RAY_UNAVAILABLE in report:
        return "the connection to its process ended: the process or its node is gone"
    if RAY_CONNECTION_ENDED in report:
        process = f"its process ({where})" if where else "its process"
        return (
            f"{process} ended without a message: it was killed by a signal, crashed or left through os._exit. "
            "If its machine ran out of memory, the kernel's log says so (dmesg)"
        )
    if short := RAY_OUT_OF_MEMORY.search(report):
        return f"Ray ended its process because the machine ran low on memory ({short[1]})"
    # Drop identifiers, and the general advice after them.
    wanted = [line.strip() for line in report.split("Some common causes")[0].splitlines()[:8]]
    return " ".join(
        line for line in wanted if line and not line.startswith(("class_name:", "actor_id:", "namespace:", "name:"))
    )
