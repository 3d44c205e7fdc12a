"""The address of a reward function: what a new process needs to load it.

Nothing is loaded here.
"""

import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import cloudpickle

from hybridrl.errors import ConfigError
from hybridrl.system.child_process import frame_of_request

SAMPLE_ARGUMENTS = ("data_source", "solution_str", "ground_truth", "extra_info")
BATCH_ARGUMENTS = ("data_sources", "solution_strs", "ground_truths", "extra_infos")
BUILT_IN = ("reward_score", "default_compute_score")


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
        function: "Callable | FunctionAddress | None",
        *,
        kwargs: Mapping[str, Any] | None = None,
        arguments: tuple[str, ...] = SAMPLE_ARGUMENTS,
    ) -> "FunctionAddress":
        """Return the address of a Python object, of the built-in function for None, or an address with more `kwargs`.

        Importable objects are pickled by name, those of a script or a notebook by value.

        Raises:
            TypeError: `function` is not callable. Pickling raises its own error for a function that holds an open file,
                a lock or the like.
            ConfigError: `function` is None, and `arguments` are not those of the built-in one.
        """
        if isinstance(function, FunctionAddress):
            return replace(function, kwargs={**function.kwargs, **(kwargs or {})})
        if function is None:
            if arguments != SAMPLE_ARGUMENTS:
                raise ConfigError(
                    "reward_model.reward_manager: the built-in function takes one sample at a time, and this manager "
                    f"calls compute_score({', '.join(arguments)}); set custom_reward_function.path to a file with such "
                    "a function, or reward_manager=naive"
                )
            return cls(*BUILT_IN, kwargs=dict(kwargs or {}))
        if not callable(function):
            raise TypeError(f"a reward function must be callable, not {function!r}")
        name = getattr(function, "__qualname__", type(function).__qualname__)
        pickled = cloudpickle.dumps(function)
        return cls(path=None, name=name, kwargs=dict(kwargs or {}), arguments=arguments, pickled=pickled)

    @property
    def is_built_in(self) -> bool:
        return (self.path, self.name) == BUILT_IN

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
