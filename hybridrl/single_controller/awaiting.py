"""Waiting for remote answers: in completion order, with a deadline, and with the address of whoever failed.

Ray is imported by the functions that talk to it, here and in its neighbours, so that a run in one process needs no Ray
at all.
"""

import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hybridrl.errors import CallTimeout, ObjectLost, WorkerLost
from hybridrl.single_controller.invocation import DEFAULT_TIMEOUT_S
from hybridrl.single_controller.monitoring import lost_workers as losses
from hybridrl.single_controller.monitoring.heartbeat_client import tell_of_deadline
from hybridrl.single_controller.monitoring.tracing import wait_span

if TYPE_CHECKING:
    from ray.exceptions import OutOfMemoryError, RayActorError, RayTaskError, WorkerCrashedError

# A worker that dies in a collective makes its peers fail too, often before Ray has noticed the death (15-25 ms after
# it): an error of one rank is held back this long to see whether it is the echo of a death. A busy machine notices
# late, and an echo that passes for a mistake ends the run.
ECHO_S = 2.0
# A look waits so long for all answers, then takes those that are there: short calls end in one, and a death is told
# this late at most.
FIRST_LOOK_S, LONGEST_LOOK_S = 0.01, 0.1

RAN_OUT_OF_MEMORY = re.compile(r"killed due to the node running low on memory.*?was (\S+ used / \S+) limit", re.DOTALL)
END_OF_CONNECTION = "connection error code 2"  # all that Ray sees of a process that is killed
END_OF_NODE = "node has died"
UNAVAILABLE = "is temporarily unavailable"  # what Ray says while it does not know why
GONE_WITH_ITS_NODE = (
    "what it was given, or what it answered, lay in the memory of a node that is gone; "
    "a run that is started again goes on from its newest commit"
)
LONGER = (
    "; if it is slow and not stuck, raise trainer.call_timeout_s (or the timeout_s that the method is registered with)"
)


# Who is who among the actors this process has heard of: actor id (hex) -> (name of the process's roles, rank).
_ADDRESSES: dict[str, tuple[str, int]] = {}


def introduce(addresses: Mapping[str, tuple[str, int]]) -> None:
    """Remember who is who, so that a death is told by name.

    addresses: actor id (hex) -> (roles joined by "+", rank).
    """
    _ADDRESSES.update(addresses)


@dataclass(frozen=True)
class Fetch:
    """Values of references to one call's answers: what a `DataProtoFuture` carries, to this process or another.

    See `gather`.
    """

    role: str
    method: str
    rank_of: Mapping[str, int]  # reference (hex) -> rank
    addresses: Mapping[str, tuple[str, int]]  # for `introduce`
    timeout_s: float | None = DEFAULT_TIMEOUT_S

    def __call__(self, references: Sequence) -> list:
        introduce(self.addresses)
        ranks = [self.rank_of.get(reference.hex(), i) for i, reference in enumerate(references)]
        return gather(references, ranks, role=self.role, method=self.method, timeout_s=self.timeout_s, way_out=LONGER)


def gather(
    references: Sequence,
    ranks: Sequence[int] | None = None,
    *,
    role: str,
    method: str,
    timeout_s: float | None,
    way_out: str = "",
) -> list:
    """Return the values behind the references, in their order. ranks: whose they are; default 0, 1, 2, ...

    The first failure is raised at once, whoever else is still running: a dead process as `WorkerLost(role, rank,
    method)`, an exception in a worker with its own type. Past `timeout_s` seconds: `CallTimeout` naming the silent
    ranks, and `way_out`.
    """
    import ray

    rank_of = dict(zip(references, ranks or range(len(references)), strict=True))
    waiting = _Waiting(role, method, None if timeout_s is None else time.monotonic() + timeout_s)
    values: dict[Any, Any] = {}
    pending = list(rank_of)
    with wait_span(role, method):
        look_s = FIRST_LOOK_S
        while pending:
            # Over as soon as all are ready; else a look at who is: a failure must not wait for those who are still
            # running.
            left = waiting.seconds_left()
            until = look_s if left is None else min(look_s, left)
            done, pending = ray.wait(pending, num_returns=len(pending), timeout=until, fetch_local=False)
            values |= waiting.values(done, rank_of) if done else {}
            for answer in pending:
                if account := losses.account_of(answer):
                    raise WorkerLost(role, rank_of[answer], method, account)
            if pending and left is not None and left <= look_s:
                silent = sorted(rank_of[p] for p in pending)
                tell_of_deadline(role, silent, method, timeout_s or 0.0)
                names = ", ".join(map(str, silent))
                text = (
                    f"{role}.{method}() did not answer within {timeout_s:g} s; still waiting for rank {names}{way_out}"
                )
                raise CallTimeout(text, role=role, ranks=silent, method=method)
            look_s = min(2 * look_s, LONGEST_LOOK_S)
    return [values[reference] for reference in references]


@dataclass
class _Waiting:
    role: str
    method: str
    deadline: float | None

    def seconds_left(self) -> float | None:
        return None if self.deadline is None else max(0.0, self.deadline - time.monotonic())

    def seconds_to_arrive(self) -> float | None:
        """For an answer that is ready: what is left, and enough for a small one that came at the last moment."""
        return None if self.deadline is None else max(1.0, self.deadline - time.monotonic())

    def values(self, done: list, rank_of: Mapping) -> dict:
        """The values of answers that are ready, by reference.

        A failure among them is raised as the caller should see it.
        """
        import ray

        try:
            return dict(zip(done, ray.get(done, timeout=self.seconds_to_arrive()), strict=True))
        except Exception:  # one of them: which?
            return {reference: self._value_or_death(reference, rank_of) for reference in done}

    def _value_or_death(self, reference, rank_of: Mapping) -> Any:
        try:
            return self.value(reference, rank_of[reference])
        except WorkerLost:
            raise
        except Exception as error:
            self.look_for_death([other for other in rank_of if other != reference], rank_of, error)
            raise

    def value(self, reference, rank: int) -> Any:
        """The value of an answer that is ready, or the exception in its place."""
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

        try:
            return ray.get(reference, timeout=self.seconds_to_arrive())
        except (OutOfMemoryError, RayActorError, WorkerCrashedError) as error:
            raise _lost(error, self.role, rank, self.method) from None
        except (ObjectLostError, RayTaskError) as error:
            lost = error if isinstance(error, ObjectLostError) else error.cause
            if isinstance(lost, ObjectLostError) and not isinstance(
                lost, OwnerDiedError
            ):  # which is the death of a process
                raise ObjectLost(f"{self.role}-{rank}, {self.method}(): {GONE_WITH_ITS_NODE}") from None
            raise (own_exception(error) if isinstance(error, RayTaskError) else error) from None
        except GetTimeoutError:
            raise CallTimeout(
                f"{self.role}.{self.method}(): the answer of rank {rank} is ready but did not arrive in "
                "time; is its node reachable?"
            ) from None

    def look_for_death(self, others: list, rank_of: Mapping, error: Exception) -> None:
        """Raise WorkerLost if one of the other workers is dead by now, with the echo as its cause."""
        import ray

        until = time.monotonic() + ECHO_S
        while others and (left := until - time.monotonic()) > 0:
            done, others = ray.wait(others, num_returns=1, timeout=left, fetch_local=False)
            for reference in done:
                try:
                    self.value(reference, rank_of[reference])
                except WorkerLost as lost:
                    raise lost from error
                except Exception:  # another echo, or another mistake: the first one is reported
                    continue


def own_exception(error: "RayTaskError") -> BaseException:
    """Return the worker's own exception, with the remote traceback as `remote_traceback`.

    The worker noted where it happened.
    """
    cause = error.cause if isinstance(error.cause, BaseException) else error
    cause.remote_traceback = str(error)  # type: ignore[attr-defined]
    return cause


def _lost(
    error: "OutOfMemoryError | RayActorError | WorkerCrashedError", role: str, rank: int, method: str
) -> WorkerLost:
    """The error for a death.

    Whoever died is named: a worker that is well fails too when its argument is a dead one's answer.
    """
    died, its_rank = _ADDRESSES.get(getattr(error, "actor_id", None) or "", (role, rank))
    if its_rank != rank or role not in died.split("+"):
        role, rank = died, its_rank
    return WorkerLost(role, rank, method, in_words(str(error)))


def in_words(report: str) -> str:
    """Return why a worker is dead, from Ray's report of it: in words where Ray only tells that a
    connection has ended.
    """
    where = " on ".join(
        found[1] for name in ("pid", "ip") if (found := re.search(rf"^\s*{name}: (\S+)", report, re.MULTILINE))
    )
    if END_OF_NODE in report:
        return f"its node is gone ({where})" if where else "its node is gone"
    if UNAVAILABLE in report:
        return "the connection to its process has ended: it is gone, or its node is"
    if END_OF_CONNECTION in report:
        process = f"its process ({where})" if where else "its process"
        return (
            f"{process} ended without a word: it was killed by a signal, crashed or left through os._exit. "
            "If its machine ran out of "
            "memory, the kernel's log says so (dmesg)"
        )
    if short := RAN_OUT_OF_MEMORY.search(report):
        return f"Ray ended its process because the machine ran low on memory ({short[1]})"
    # Without identifiers, and without the advice for every other case.
    wanted = [line.strip() for line in report.split("Some common causes")[0].splitlines()[:8]]
    return " ".join(
        line for line in wanted if line and not line.startswith(("class_name:", "actor_id:", "namespace:", "name:"))
    )


def wait_ready(reference, *, what: str, timeout_s: float) -> None:
    """Wait until something that Ray makes (a placement group) is there; past the deadline: `CallTimeout` naming it."""
    import ray
    from ray.exceptions import GetTimeoutError

    try:
        ray.get(reference, timeout=timeout_s)
    except GetTimeoutError:
        raise CallTimeout(f"{what} was not there within {timeout_s:g} s") from None
