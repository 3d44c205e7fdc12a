"""Calls of a reward function, in its process: `child_program` loads this file by its path.

It imports only the standard library.
"""

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any


class RewardCalls:
    """The one call `score`: that of the reward function.

    Args:
        function: What was loaded.
        names: Of the keyword arguments that differ per call.
        kwargs: Fixed keyword arguments of every call.

    Raises:
        TypeError: The function cannot take them.
    """

    lenient = True  # extra values of a score become texts

    def __init__(self, function: Any, *, names: Sequence[str], kwargs: dict[str, Any]):
        check_signature(function, [*names, *kwargs])
        if duplicates := set(names) & set(kwargs):
            raise TypeError(f"kwargs have {', '.join(sorted(duplicates))}, which every call sets itself")
        self.score = functools.partial(function, **kwargs)


def check_signature(function: Callable, arguments: list[str]) -> None:
    """Raise TypeError for a function that cannot take these keyword arguments.

    Functions without a signature (written in C) pass.
    """
    try:
        signature = inspect.signature(function)
    except ValueError:
        return
    try:
        signature.bind(**dict.fromkeys(arguments))
    except TypeError as error:
        raise TypeError(f"it is called with {', '.join(arguments)}, but takes {signature}: {error}") from error
