"""The table of functions that a process exports."""

from collections.abc import Iterator

import pytest

from hybridrl.errors import ConfigError
from hybridrl.single_controller import endpoints
from hybridrl.single_controller.local_worker_group import LocalWorkerGroup
from hybridrl.single_controller.worker import Worker
from hybridrl.single_controller.worker_group import ClassWithInitArgs


@pytest.fixture(autouse=True)
def cleared() -> Iterator[None]:
    endpoints.clear()
    yield
    endpoints.clear()


class Store:
    def get(self) -> str:
        return "stored"


class Plain(Worker):
    def own(self) -> str:
        return "own"


def test_an_exported_function_is_found_until_the_table_is_cleared():
    store = Store()
    endpoints.export("get", store.get)
    endpoints.export("get", store.get)  # the same one: a module may be imported twice
    assert endpoints.find("get") == store.get and endpoints.names() == ["get"]
    endpoints.clear()
    assert endpoints.find("get") is None and endpoints.names() == []


def test_a_second_function_under_one_name_is_refused_with_both():
    endpoints.export("get", Store().get)
    with pytest.raises(ConfigError, match="endpoint 'get' .*twice.*Store.get and builtins"):
        endpoints.export("get", len)


def test_an_exported_function_comes_before_the_method_of_a_worker():
    group = LocalWorkerGroup(None, ClassWithInitArgs(Plain), role="plain")
    assert group.execute_rank(0, "own") == "own"
    endpoints.export("own", lambda: "exported")
    assert group.execute_rank(0, "own") == "exported"


def test_a_name_that_is_neither_is_refused_with_what_the_worker_offers():
    endpoints.export("get", Store().get)
    group = LocalWorkerGroup(None, ClassWithInitArgs(Plain), role="plain")
    with pytest.raises(AttributeError, match="^plain-0 has no 'missing'; it offers get, own$"):
        group.execute_rank(0, "missing")
