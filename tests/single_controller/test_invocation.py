"""The record that `register` writes, and the arguments that it refuses."""

import pytest

from hybridrl.errors import ConfigError
from hybridrl.single_controller.dispatch import Dispatch, Execute, Invocation, register
from hybridrl.single_controller.invocation import (
    ASYNC_CONCURRENCY,
    CONCURRENT,
    USER_CODE,
    endpoints_of,
    invocations_of,
)
from tests.support.single_controller import endpoint_module


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


def test_endpoints_of_a_class_have_the_names_of_their_marks():
    class Named(Base):
        @register(name="weights")
        def get_weights(self) -> None: ...

    found = endpoints_of(Named)
    assert sorted(found) == ["coroutine", "plain", "weights"]
    assert found["weights"] == ("get_weights", Invocation(name="weights"))
    assert found["plain"][0] == "plain"


def test_endpoints_of_a_module_are_its_own_marked_functions():
    assert {name: attribute for name, (attribute, _) in endpoints_of(endpoint_module).items()} == {
        "ping": "ping",
        "renamed": "original",
    }


def test_two_attributes_with_one_endpoint_name_are_refused():
    class Twice:
        @register(name="same")
        def first(self) -> None: ...

        @register(name="same")
        def second(self) -> None: ...

    with pytest.raises(ConfigError, match="Twice: first and second .*endpoint 'same'"):
        endpoints_of(Twice)


def test_a_call_runs_in_its_group_or_among_the_concurrent_ones_or_in_the_shared_thread():
    assert Invocation().used_concurrency_group is None
    assert Invocation(concurrency=2).used_concurrency_group == CONCURRENT
    assert Invocation(concurrency=2, concurrency_group=USER_CODE).used_concurrency_group == USER_CODE
