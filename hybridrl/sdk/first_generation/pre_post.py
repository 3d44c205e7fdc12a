"""Functions that run in the caller before and after a call: `pre_func` and `post_func` of `trainer_invocation`.

Each has two forms, which `parse_pre` and `parse_post` tell apart by the signature:

    form of DLRover's code                              form of DLRover's guide
    pre_func(proxy, *args, **kwargs) -> (args, kwargs)  pre_func(input) -> value
    post_func(proxy, result) -> result                  post_func(result) -> result

`proxy` is the `RG_<ROLE>` that is called. `result` is what the call returns: the list of outputs by rank, or of
references if the call does not wait.
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from hybridrl.errors import ConfigError
from hybridrl.single_controller.invocation import Invocation
from hybridrl.single_controller.references import OutputRefs

POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
PROXY = "proxy"  # a first parameter of this name is the proxy, however many others there are
PRE_FORMS = "it must be pre_func(proxy, *args, **kwargs) -> (args, kwargs), or pre_func(input) -> value"
POST_FORMS = "it must be post_func(proxy, result) -> result, or post_func(result) -> result"


@dataclass(frozen=True)
class PreFunction:
    """Computes the arguments of a call.

    Attributes:
        method: Name of the called method, for messages.
        proxy: The `RG_<ROLE>` that is called. None on a worker group that no proxy wraps.
    """

    function: Callable[..., Any]
    takes_proxy: bool
    method: str
    proxy: Any = None

    def __call__(self, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if self.takes_proxy:
            _require_proxy(self.proxy, "pre_func", self.method)
            return self._checked(self.function(self.proxy, *args, **kwargs))
        if len(args) + len(kwargs) != 1:
            raise TypeError(
                f"{self.method}(): its pre_func(input) takes the one argument of the call, got "
                f"{len(args) + len(kwargs)}; for more write pre_func(proxy, *args, **kwargs) -> (args, kwargs)"
            )
        return tuple(map(self.function, args)), {name: self.function(value) for name, value in kwargs.items()}

    def _checked(self, returned: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        is_pair = isinstance(returned, tuple | list) and len(returned) == 2
        if not (is_pair and isinstance(returned[0], tuple | list) and isinstance(returned[1], Mapping)):
            raise TypeError(
                f"{self.method}(): its pre_func returned {returned!r}, not (args, kwargs): a tuple and a dict"
            )
        return tuple(returned[0]), dict(returned[1])


@dataclass(frozen=True)
class PostFunction:
    """Computes what a call returns.

    Attributes:
        function: None if the result only has to become a list.
        is_rank0: The output of rank 0 becomes a list of one.
        method, proxy: As of `PreFunction`.
    """

    function: Callable[..., Any] | None
    takes_proxy: bool
    is_rank0: bool
    method: str
    proxy: Any = None

    def __call__(self, result: Any) -> Any:
        if self.is_rank0 and not isinstance(result, OutputRefs):
            result = [result]
        if self.function is None:
            return result
        if not self.takes_proxy:
            return self.function(result)
        _require_proxy(self.proxy, "post_func", self.method)
        return self.function(self.proxy, result)


def _require_proxy(proxy: Any, name: str, method: str) -> None:
    if proxy is None:
        raise TypeError(
            f"{method}(): its {name} takes the proxy; call the method through RG_<ROLE> of a BaseTrainer, or write "
            f"{name} without the proxy"
        )


def parse_pre(function: Any, method: Callable[..., Any]) -> PreFunction | None:
    """Return the function with its form; None for None.

    Args:
        method: The method that is decorated; its number of arguments distinguishes `pre(a, b)` in the two forms.

    Raises:
        ConfigError: It has neither form.
    """
    if function is None:
        return None
    name = f"{method.__qualname__}(): pre_func={_name(function)}"
    parameters = _parameters(function, name)
    positional = [p for p in parameters if p.kind in POSITIONAL]
    has_star = any(p.kind is inspect.Parameter.VAR_POSITIONAL for p in parameters)
    if not positional or any(p.kind is p.KEYWORD_ONLY and p.default is p.empty for p in parameters):
        raise ConfigError(f"{name}: cannot tell which of its arguments is the proxy; {PRE_FORMS}")
    least, most = _argument_counts(method)
    required = sum(p.default is p.empty for p in positional)
    if positional[0].name == PROXY or has_star or most == 0:
        return PreFunction(function, True, method.__qualname__)
    if required <= 1 and len(parameters) == 1:
        if least > 1:
            raise ConfigError(
                f"{name}: takes one argument, but the method takes {least}; write pre_func(proxy, *args, **kwargs) -> "
                "(args, kwargs)"
            )
        return PreFunction(function, False, method.__qualname__)
    if len(positional) - 1 < least or required - 1 > most:
        raise ConfigError(
            f"{name}: takes {len(positional)} arguments, which are neither the proxy and the method's {least}, nor one "
            f"input; {PRE_FORMS}"
        )
    return PreFunction(function, True, method.__qualname__)


def parse_post(function: Any, method: Callable[..., Any], *, is_rank0: bool) -> PostFunction | None:
    """Return the function with its form; None if there is nothing to do after the call.

    Raises:
        ConfigError: It has neither form.
    """
    if function is None:
        return PostFunction(None, False, True, method.__qualname__) if is_rank0 else None
    name = f"{method.__qualname__}(): post_func={_name(function)}"
    parameters = _parameters(function, name)
    required = [p for p in parameters if p.kind in POSITIONAL and p.default is p.empty]
    is_plain = all(p.kind in POSITIONAL or p.default is not p.empty for p in parameters)
    if not is_plain or len(required) not in (1, 2):
        raise ConfigError(f"{name}: has {len(parameters)} parameters; {POST_FORMS}")
    return PostFunction(function, len(required) == 2, is_rank0, method.__qualname__)


def with_proxy(invocation: Invocation, proxy: Any) -> Invocation:
    """Return the record with the proxy for its functions that take one."""
    pre = replace(invocation.pre, proxy=proxy) if isinstance(invocation.pre, PreFunction) else invocation.pre
    post = replace(invocation.post, proxy=proxy) if isinstance(invocation.post, PostFunction) else invocation.post
    return replace(invocation, pre=pre, post=post)


def _parameters(function: Any, name: str) -> list[inspect.Parameter]:
    try:
        return list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        raise ConfigError(f"{name} is no function with a signature; wrap it in a def") from None


def _argument_counts(method: Callable[..., Any]) -> tuple[int, float]:
    """Return the least and the largest number of arguments that a method takes, `self` not counted."""
    parameters = [p for name, p in inspect.signature(method).parameters.items() if name != "self"]
    least = sum(p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in parameters)
    is_open = any(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in parameters)
    return least, float("inf") if is_open else len(parameters)


def _name(function: Any) -> str:
    return getattr(function, "__qualname__", repr(function))
