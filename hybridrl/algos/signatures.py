"""Checks before a run starts that a user's formula accepts the arguments it will get."""

import inspect
from collections.abc import Callable, Collection
from typing import Any

from hybridrl.errors import ConfigError

POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def check_signature(
    fn: Callable[..., Any], *, what: str, positional: Collection[str], offered: Collection[str]
) -> None:
    """Raise ConfigError if a formula cannot be called with what it gets.

    Args:
        fn: The formula.
        what: Its kind and name, for the message.
        positional: Names of the arguments that it gets by position.
        offered: Those that it gets by name, if its signature names them.

    Raises:
        ConfigError: It takes too few arguments by position, or needs one by name that is not offered.
    """
    parameters = inspect.signature(fn).parameters.values()
    by_position = [parameter for parameter in parameters if parameter.kind in POSITIONAL]
    takes_all = any(parameter.kind is inspect.Parameter.VAR_POSITIONAL for parameter in parameters)
    if len(by_position) < len(positional) and not takes_all:
        raise ConfigError(f"{what} takes {len(by_position)} arguments by position; it gets {', '.join(positional)}")
    rest = [*by_position[len(positional) :], *(p for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY)]
    unknown = [p.name for p in rest if p.default is p.empty and p.name not in offered]
    if unknown:
        raise ConfigError(
            f"{what} needs {', '.join(unknown)}, which nobody passes; by name it gets {', '.join(sorted(offered))}"
        )
