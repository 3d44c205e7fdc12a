"""`rpc`: how functions and methods get their endpoint's name, and which ones a process exports."""

import pytest

from hybridrl.errors import ConfigError
from hybridrl.sdk import export_rpc_instance, export_rpc_method, rpc
from hybridrl.sdk.rpc_endpoints import endpoint_name
from hybridrl.single_controller import endpoints
from hybridrl.single_controller.invocation import endpoints_of


@pytest.fixture(autouse=True)
def _no_exports_left():
    yield
    endpoints.clear()


def generate(prompts): ...


class Engine:
    @rpc(generate)
    def answer(self, prompts):
        return [prompt.upper() for prompt in prompts]

    @rpc("version", timeout_s=5, idempotent=True)
    def weight_version(self):
        return 3

    @rpc()
    def ping(self):
        return "pong"

    @rpc()
    async def waits(self): ...

    def unmarked(self): ...


def test_a_name_a_stub_or_the_methods_own_name_is_the_endpoints():
    found = endpoints_of(Engine)
    assert {name: attribute for name, (attribute, _) in found.items()} == {
        "generate": "answer",
        "version": "weight_version",
        "ping": "ping",
        "waits": "waits",
    }
    record = found["version"][1]
    assert (record.timeout_s, record.idempotent, record.concurrency) == (5, True, 1)
    assert found["waits"][1].concurrency > 1  # async ones run beside others


def test_a_caller_names_the_endpoint_by_text_stub_or_marked_method():
    assert endpoint_name("generate") == endpoint_name(generate) == endpoint_name(Engine.answer) == "generate"
    assert endpoint_name(Engine().weight_version) == "version" and endpoint_name(Engine.ping) == "ping"
    with pytest.raises(TypeError, match="not 5"):
        endpoint_name(5)


def test_export_makes_a_function_of_any_module_an_endpoint():
    @rpc(export=True)
    def helper(): ...

    @rpc("other", export=True)
    def named(): ...

    assert endpoints.find("helper") is helper and endpoints.find("other") is named
    with pytest.raises(ConfigError, match="other"):
        export_rpc_method("other", lambda: None)


def test_an_instance_is_exported_with_a_namespace():
    engine = Engine()
    export_rpc_instance("first", engine)
    assert endpoints.find("first.generate")(["a"]) == ["A"] and endpoints.find("first.version")() == 3
    export_rpc_instance(None, Engine())
    assert endpoints.find("ping")() == "pong"
    with pytest.raises(ConfigError, match=r"first\.generate"):
        export_rpc_instance("first", Engine())
    with pytest.raises(ConfigError, match=r"object has no method with @rpc\(\)"):
        export_rpc_instance("x", object())


def test_a_method_cannot_be_exported_without_its_instance():
    with pytest.raises(ConfigError, match=r"export=True.*Outer\.method needs an instance.*export_rpc_instance"):

        class Outer:
            @rpc(export=True)
            def method(self): ...


def test_missing_parentheses_are_named():
    with pytest.raises((TypeError, RuntimeError), match=r"write @rpc\(\) with parentheses|__set_name__") as caught:

        class Wrong:
            @rpc
            def method(self): ...

    cause = caught.value.__cause__ or caught.value
    assert "Wrong.method: write @rpc() with parentheses" in str(cause)


def test_a_name_that_is_neither_text_nor_function_is_refused():
    with pytest.raises(ConfigError, match=r"rpc\(name=5\)"):
        rpc(5)
