"""Endpoints that this process exports: functions and methods of other objects than its workers.

`WorkerHost.call` looks here first, and then at the worker's own methods. Callers need no reference to the object: they
name the role and the endpoint. Exported by user code in a worker process; called by worker groups of other processes.
"""

from collections.abc import Callable
from typing import Any

from hybridrl.errors import ConfigError
from hybridrl.single_controller.worker import Worker

_EXPORTED: dict[str, Callable[..., Any]] = {}


def export(name: str, function: Callable[..., Any]) -> None:
    """Make a function callable from other processes under this name.

    Raises:
        ConfigError: another function is exported under this name.
    """
    known = _EXPORTED.setdefault(name, function)
    if known != function:
        raise ConfigError(
            f"endpoint {name!r} is exported twice in this process: {_describe(known)} and {_describe(function)}; "
            "give one of them another name"
        )


def find(name: str) -> Callable[..., Any] | None:
    """Return the function that is exported under this name, or None."""
    return _EXPORTED.get(name)


def names() -> list[str]:
    """Return the names of all exported endpoints, sorted."""
    return sorted(_EXPORTED)


def clear() -> None:
    """Withdraw all endpoints of this process."""
    _EXPORTED.clear()


def find_function(worker: Any, name: str, attribute: str, *, of: str) -> Callable[..., Any]:
    """Return what an endpoint's name means in this process: an exported function, or a method of the worker.

    Args:
        attribute: name of the worker's method.
        of: role and rank of the worker, for the error.

    Raises:
        AttributeError: neither exists; lists what the worker offers.
    """
    function: Callable[..., Any] | None = find(name) or getattr(worker, attribute, None)
    if function is None:
        methods = {m for m in dir(worker) if not m.startswith("_") and callable(getattr(type(worker), m, None))}
        offered = sorted(methods - set(dir(Worker)) | _EXPORTED.keys())
        raise AttributeError(f"{of} has no {name!r}; it offers {', '.join(offered) or 'nothing'}")
    return function


def _describe(function: Callable[..., Any]) -> str:
    name = getattr(function, "__qualname__", repr(function))
    return f"{getattr(function, '__module__', '?')}.{name}"
