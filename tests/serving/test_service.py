"""The order of batches and pushes on a service's event loop, without any replica that works."""

import threading
from collections.abc import Iterator
from concurrent.futures import CancelledError

import pytest

from hybridrl.serving.replicas import GroupReplicas
from hybridrl.serving.router import ReplicaRouter
from hybridrl.serving.service import PolicyService

WAIT_S = 60


class NoGroup:
    """A worker group of one process that always answers with nothing."""

    world_size, role = 1, "rollout"

    def execute_ranks_async(self, ranks, method, *args):
        return []

    def fetch(self, references, *, method, timeout_s):
        return [[]]


class Push:
    """The rollout's half of a push. It has begun when `began` is set, and ends when `may_end` is."""

    def __init__(self, error: Exception | None = None):
        self.began, self.may_end, self.error = threading.Event(), threading.Event(), error

    def receive(self) -> "Push":
        self.began.set()
        return self

    def wait(self) -> None:
        assert self.may_end.wait(WAIT_S)
        if self.error is not None:
            raise self.error


@pytest.fixture
def service() -> Iterator[PolicyService]:
    service = PolicyService(GroupReplicas(NoGroup(), version=None, progress_timeout_s=WAIT_S), concurrent=True)
    yield service
    service.close()


def paused_in(found: list[bool]):
    """Return a batch that notes whether the router is paused while it runs."""

    async def generate(router: ReplicaRouter) -> None:
        found.append(router.is_paused)

    return generate


def test_batches_and_pushes_run_in_the_order_of_their_submission(service):
    found, first, second = list[bool](), Push(), Push()
    pushes = [service.push(1, first.receive)]
    batch = service.generate(1, paused_in(found))
    pushes.append(service.push(2, second.receive))
    assert first.began.wait(WAIT_S) and service.router.is_paused and not found
    first.may_end.set()
    batch.wait()
    assert found == [False] and second.began.wait(WAIT_S) and service.replicas.version == 1
    assert service.router.is_paused
    second.may_end.set()
    for push in pushes:
        push.wait()
    assert service.replicas.version == 2 and not service.router.is_paused


def test_after_a_failed_push_nothing_runs_and_everything_has_its_error(service):
    found, push = list[bool](), Push(ValueError("no such tensor"))
    submitted = service.push(1, push.receive)
    batch = service.generate(1, paused_in(found))
    push.may_end.set()
    with pytest.raises(ValueError, match="no such tensor"):
        submitted.wait()
    with pytest.raises(ValueError, match="no such tensor"):
        batch.wait()
    assert not found


def test_closing_cancels_what_runs_and_what_waits(service):
    push = Push()
    service.push(1, push.receive)
    batch = service.generate(1, paused_in([]))
    assert push.began.wait(WAIT_S)
    service.close()
    push.may_end.set()
    with pytest.raises(CancelledError):
        batch.wait()


def test_where_processes_train_a_batch_runs_at_once_and_the_router_is_paused_before_and_after():
    service = PolicyService(GroupReplicas(NoGroup(), version=None, progress_timeout_s=WAIT_S), concurrent=False)
    try:
        found, push = list[bool](), Push()
        assert service.push(3, push.receive) is push
        assert service.generate(3, paused_in(found)).done.done()
        assert found == [False] and service.router.is_paused and service.replicas.version == 3
    finally:
        service.close()
