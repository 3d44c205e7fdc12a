"""The record that `register` writes, and the arguments that it refuses."""

import pytest

from hybridrl.single_controller.dispatch import Dispatch, Execute, Invocation, register
from hybridrl.single_controller.invocation import ASYNC_CONCURRENCY, invocations_of


class Base:
    @register(Dispatch.ONE_TO_ALL, Execute.RANK_ZERO, False, timeout_s=5, idempotent=True)
    def plain(self) -> int:
        return 1

    @register()
    async def coroutine(self) -> int:
        return 2


class Derived(Base):
    def plain(self) -> int:
        return 3

    @register(Dispatch.DP_COMPUTE, concurrency=2)
    async def coroutine(self) -> int:
        return 4


def test_a_registered_method_carries_the_record_of_its_call():
    assert invocations_of(Base)["plain"] == Invocation(
        "ONE_TO_ALL", "RANK_ZERO", blocking=False, timeout_s=5, idempotent=True
    )
    assert Base().plain() == 1


def test_a_coroutine_runs_concurrently_unless_registered_otherwise():
    assert invocations_of(Base)["coroutine"].concurrency == ASYNC_CONCURRENCY
    assert invocations_of(Derived)["coroutine"].concurrency == 2


def test_an_override_keeps_the_record_or_has_its_own():
    assert invocations_of(Derived)["plain"] == invocations_of(Base)["plain"]
    assert invocations_of(Derived)["coroutine"].dispatch == Dispatch.DP_COMPUTE


def test_an_unknown_execute_mode_and_a_concurrency_of_zero_are_refused():
    with pytest.raises(ValueError, match="execute_mode='SOME' is neither Execute.ALL nor Execute.RANK_ZERO"):
        register(Dispatch.ONE_TO_ALL, "SOME")
    with pytest.raises(ValueError, match="concurrency=0 must be at least 1"):
        register(concurrency=0)
