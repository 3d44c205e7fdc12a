"""The address of a reward function: what a new process needs to load it.

Nothing is loaded here.
"""

import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import cloudpickle

from hybridrl.system.child_process import frame_of_request

SAMPLE_ARGUMENTS = ("data_source", "solution_str", "ground_truth", "extra_info")
BATCH_ARGUMENTS = ("data_sources", "solution_strs", "ground_truths", "extra_infos")


@dataclass(frozen=True)
class FunctionAddress:
    """A function by import path, or as a pickled object.

    Attributes:
        path: Python file or dotted module, as in `hybridrl.import_path`; None for a pickled object.
        kwargs: Fixed keyword arguments of every call.
        arguments: Names of the keyword arguments that differ per call.
    """

    path: str | None
    name: str = "compute_score"
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    arguments: tuple[str, ...] = SAMPLE_ARGUMENTS
    pickled: bytes | None = field(default=None, repr=False)

    @classmethod
    def of(
        cls,
        function: Callable,
        *,
        kwargs: Mapping[str, Any] | None = None,
        arguments: tuple[str, ...] = SAMPLE_ARGUMENTS,
    ) -> "FunctionAddress":
        """Return the address of a Python object.

        Importable objects are pickled by name, those of a script or a notebook by value.

        Raises:
            TypeError: `function` is not callable. Pickling raises its own error for a function that holds an open file,
                a lock or the like.
        """
        if not callable(function):
            raise TypeError(f"a reward function must be callable, not {function!r}")
        name = getattr(function, "__qualname__", type(function).__qualname__)
        return cls(
            path=None, name=name, kwargs=dict(kwargs or {}), arguments=arguments, pickled=cloudpickle.dumps(function)
        )

    def __str__(self) -> str:
        return self.name if self.path is None else f"{self.path}:{self.name}"

    def request(self) -> bytes:
        """Return the first frame for a score process: this address and this process's Python path."""
        arguments = {"names": self.arguments, "kwargs": dict(self.kwargs)}
        return frame_of_request(
            path=self.path,
            name=self.name,
            pickled=self.pickled,
            arguments=cloudpickle.dumps(arguments),
            sys_path=[entry or os.getcwd() for entry in sys.path],
        )
