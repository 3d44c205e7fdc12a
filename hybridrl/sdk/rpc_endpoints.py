"""`rpc`: marks a function or method that other processes of the job call through a `RoleGroup`.

    # remote_call.py                                # rollout.py
    def generate(prompts):                          class Rollout:
        group = RoleGroup("rollout")                    @rpc(remote_call.generate)
        return group.call_batch(generate,               def generate(self, prompts): ...
                                len(prompts), prompts)

The marked methods of a role's entry class, and the marked functions of its module, are exported when the entry is
constructed. Others are exported by `rpc(export=True)`, `export_rpc_method` and `export_rpc_instance`.
"""

from collections.abc import Callable
from inspect import isfunction
from typing import Any

from hybridrl.errors import ConfigError
from hybridrl.single_controller import endpoints, invocation


def rpc(
    name: str | Callable[..., Any] | None = None,
    export: bool = False,
    *,
    timeout_s: float | None = invocation.DEFAULT_TIMEOUT_S,
    idempotent: bool = False,
    concurrency: int | None = None,
) -> Any:
    """Mark a function or a method, plain or `async def`; return it unchanged.

    Args:
        name: The name that callers use: text, or a function of that name, such as the stub that makes the call.
            Default: the name of what is marked.
        export: Export a function of any module when the decorator runs, that is when its module is imported.
        timeout_s: Deadline of a call in seconds.
        idempotent: A call may be repeated after its process was lost.
        concurrency: Calls that one process runs at once; as for `register`.

    Raises:
        ConfigError: `export` for a method, or the name is exported already.
    """
    if name is not None and not isinstance(name, str) and not hasattr(name, "__name__"):
        raise ConfigError(f"rpc(name={name!r}): must be text or a function")
    chosen = name if name is None or isinstance(name, str) else name.__name__
    mark = invocation.register(
        invocation.Dispatch.ONE_TO_ALL, timeout_s=timeout_s, idempotent=idempotent, concurrency=concurrency, name=chosen
    )
    return _Marker(mark, chosen, export)


class _Marker:
    """The decorator.

    A class, so that `@rpc` without parentheses is found when its class is made.
    """

    def __init__(self, mark: Callable[..., Any], name: str | None, export: bool) -> None:
        self._mark, self._name, self._export = mark, name, export

    def __call__(self, function: Any) -> Any:
        if not callable(function):
            raise TypeError(f"@rpc marks a function or method, not {function!r}; write @rpc() with parentheses")
        if self._export and not isfunction(function):
            raise ConfigError(f"rpc(export=True) is for functions, not for {function!r}")
        if self._export and _is_method(function):
            raise ConfigError(
                f"rpc(export=True) is for functions, and {function.__qualname__} needs an instance; write @rpc() and "
                "export_rpc_instance(None, the_instance)"
            )
        marked = self._mark(function)
        if self._export:
            endpoints.export(self._name or function.__name__, marked)
        return marked

    def __set_name__(self, owner: type, attribute: str) -> None:
        raise TypeError(f"{owner.__name__}.{attribute}: write @rpc() with parentheses")


def _is_method(function: Any) -> bool:
    scope, _, _ = function.__qualname__.rpartition(".")
    return bool(scope) and not scope.endswith("<locals>")


def export_rpc_method(name: str, function: Callable[..., Any]) -> None:
    """Export a function or bound method of this process under a name.

    Raises:
        ConfigError: The name is exported already.
    """
    endpoints.export(name, function)


def export_rpc_instance(namespace: str | None, instance: Any) -> None:
    """Export the `rpc` methods of an object as `namespace.name`, or as `name` if the namespace is None.

    Raises:
        ConfigError: The object has none, or a name is exported already.
    """
    found = invocation.endpoints_of(type(instance))
    if not found:
        raise ConfigError(f"export_rpc_instance: {type(instance).__name__} has no method with @rpc()")
    for name, (attribute, _) in found.items():
        endpoints.export(namespaced(namespace, name), getattr(instance, attribute))


def namespaced(namespace: str | None, name: str) -> str:
    """Return the endpoint's name of a method of an exported object."""
    return name if namespace is None else f"{namespace}.{name}"


def endpoint_name(method: str | Callable[..., Any]) -> str:
    """Return the name that a call uses, for a name, a stub, or a marked function."""
    if isinstance(method, str):
        return method
    record: invocation.Invocation | None = getattr(method, invocation.MAGIC_ATTR, None)
    name = record.name if record is not None and record.name else getattr(method, "__name__", None)
    if name is None:
        raise TypeError(f"a call needs a name, a stub function or a marked method, not {method!r}")
    return str(name)
